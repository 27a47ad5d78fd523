"""For tests of how workflows are composed and registered: a ModelFn, and what is said of an image."""

from __future__ import annotations

import st2i_dask as st2i


class Step(st2i.ModelFn):
    def setup_io(self):
        self.add_input("x")
        self.add_input("extra", optional=True)
        self.add_output("y")


def about(request):
    return request.tasks[request.key].args[2]
