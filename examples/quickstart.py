"""Quickstart: a cluster on this machine, one prompt, one picture.

    python examples/quickstart.py [OUT.png]

To use a bigger cluster, replace the local one by `Client("tcp://scheduler:8786")`.
"""

import sys

from dask.distributed import Client

import st2i_dask as st2i

if __name__ == "__main__":  # Dask starts processes that import this file
    out = sys.argv[1] if len(sys.argv) > 1 else "star.png"
    with st2i.local_cluster(n_workers=2) as cluster, Client(cluster) as client:
        st2i.attach(client)
        shapes = st2i.load("shapes")
        future = shapes.submit(
            client, prompt="a small yellow star on a purple background", seed=7, tenant="alice"
        )
        image = future.result()  # a PIL image
        image.save(out)
        print(f"{out}: {image.metadata['prompt']!r}, version {image.metadata['version']}")
