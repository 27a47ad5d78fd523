"""`python -m st2i_dask.cli`: the same as `st2i`."""

from . import main

if __name__ == "__main__":
    main(prog_name="st2i")
