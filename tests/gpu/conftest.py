"""One command on a machine with a CUDA device: pytest -m gpu -s tests/gpu (-s shows the figures)."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def device():
    """The index of the device that the tests use."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device and a torch built for CUDA: torch.cuda sees none")
    return 0
