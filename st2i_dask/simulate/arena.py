"""An executor's arena with the real allocator: blocks of tensors, and of the layers that lie there."""

from __future__ import annotations

from st2i_dask._core import Allocator


class Arena:
    """Tensors need a block each; a layer may lie in several."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.tensor_bytes = self.fallbacks = self.tensors = 0
        self._allocator = Allocator(nbytes, "best_fit")
        self._layers: dict[tuple[str, int], list[int]] = {}

    def place_layer(self, weights: str, layer: int, nbytes: int) -> bool:
        """False: there are no gaps for it."""
        pieces = self._allocator.alloc_scattered(nbytes)
        if pieces is None:
            return False
        self._layers[weights, layer] = [offset for offset, _ in pieces]
        return True

    def drop_layer(self, weights: str, layer: int) -> None:
        """Nothing happens to one that lies elsewhere."""
        for offset in self._layers.pop((weights, layer), ()):
            self._allocator.free(offset)

    def place_tensor(self, nbytes: int) -> int | None:
        """Its offset; None: no gap is large enough."""
        offset = self._allocator.alloc(nbytes)
        if offset is not None:
            self.tensor_bytes += nbytes
        return offset

    def drop_tensor(self, offset: int, nbytes: int) -> None:
        self._allocator.free(offset)
        self.tensor_bytes -= nbytes

    def _check(self) -> None:
        self._allocator._check()
        assert 0 <= self.tensor_bytes <= self.nbytes
