from typing import Any, TypedDict, final

from numpy.typing import NDArray

def scan(values: NDArray[object]) -> tuple[float, float, int]:
    """Range and non-finite count of pixels, in one pass, without the GIL.

    `values`: C-contiguous float32 CPU array (NumPy or any DLPack exporter) of any shape.
    Returns (minimum, maximum, nonfinite); minimum and maximum cover the finite values only
    and are +inf and -inf when there are none. TypeError for another dtype or layout.
    """

def copy(into_address: int, from_address: int, nbytes: int) -> None:
    """Copy bytes between two addresses of this process that do not overlap. Without the GIL.

    OSError where the source is a mapped file that was cut short meanwhile; the destination is worth
    nothing then. The caller answers for both. TypeError for what is not an integer of 0 to 2^64 - 1.
    """

GRANULE: int
"""Bytes; blocks start at its multiples and are rounded up to them."""

class Statistics(TypedDict):
    """Bytes, except `blocks`. used: as rounded by the allocator. largest_free: the largest request
    that would succeed. peak: of `used`."""

    used: int
    free: int
    largest_free: int
    blocks: int
    peak: int

class HeapStatistics(Statistics):
    """taken: bytes of payload that memory was taken for."""

    taken: int

@final
class Allocator:
    """Divides an arena that lies elsewhere, in device memory for example: offsets only.

    nbytes: at least a granule, rounded down to granules. kind: "best_fit" (the smallest gap that
    is large enough, coalescing) or "buddy" (powers of two, at multiples of their size). ValueError
    for others. Every call holds the GIL: threads may share it.
    """

    def __init__(self, nbytes: int, kind: str = "best_fit") -> None: ...
    @property
    def nbytes(self) -> int: ...
    def alloc(self, nbytes: int) -> int | None:
        """Offset, bytes; None when no gap is large enough. ValueError below 1."""

    def alloc_scattered(self, nbytes: int) -> list[tuple[int, int]] | None:
        """Blocks that hold `nbytes` together, as few as possible: (offset, bytes used of it) of each,
        longest first; each is freed by itself. None when all free bytes are too few. ValueError
        below 1."""

    def free(self, offset: int) -> None:
        """ValueError unless a live block starts there."""

    def statistics(self) -> Statistics: ...
    def _check(self) -> None:
        """RuntimeError if an invariant is broken."""

@final
class Block:
    """Memory of a heap, freed when this object and every view of it are gone. Any thread."""

    @property
    def offset(self) -> int:
        """Bytes from the start of the payload."""

    @property
    def nbytes(self) -> int:
        """As asked for."""

    @property
    def generation(self) -> int:
        """Not 0, and no other block of the heap ever has it."""

    def array(self) -> Any:
        """The bytes, uint8 (nbytes,), writable, without a copy: an exporter of DLPack and of the
        buffer protocol for `torch.from_dlpack` and `numpy.asarray`. Keeps the block alive."""

@final
class Scattered:
    """Memory of a heap that is one range of addresses here and one or several blocks there, for what
    only this process uses. Freed when this object and every view of it are gone, without the GIL. Any
    thread. Where it is several, `Heap.find` does not find its addresses, and each has a mapping in
    this process, of which Linux allows 65,530."""

    @property
    def nbytes(self) -> int:
        """As asked for."""

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Offset and bytes of each block, in the order of the range."""

    def array(self) -> Any:
        """As `Block.array`; it starts at a page."""

@final
class Heap:
    """This process's part of a symmetric heap, in shared memory without a name in any file system.

    nbytes: payload; at least a granule, rounded down to granules, at most the machine's memory.
    name: 1 to 200 bytes; peers must know it. allocator: as in `Allocator`. poison: fill freed
    blocks with 0xDB. ValueError for others; OSError where the system refuses. Memory is taken in
    steps of 32 MiB as it is used. Thread-safe. In a forked child `allocate`, `allocate_scattered` and
    `allocate_word` raise RuntimeError, and dying blocks free nothing.
    """

    def __init__(
        self, nbytes: int, name: str, allocator: str = "best_fit", poison: bool = False
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def pid(self) -> int: ...
    @property
    def fd(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def base(self) -> int:
        """Address of the payload in this process."""

    def allocate(self, nbytes: int) -> Block | None:
        """None when no gap is large enough. ValueError below 1; OSError when the machine has no
        memory left. Without the GIL."""

    def allocate_scattered(self, nbytes: int) -> Scattered | None:
        """In as few blocks as possible: one where a gap is large enough. None only when the free bytes
        are too few, counted in granules. ValueError below 1; OSError when the machine has no memory or
        the process no mappings left, and nothing is kept then. Without the GIL."""

    def find(self, address: int) -> Block | None:
        """The live block that contains the address."""

    def statistics(self) -> HeapStatistics: ...
    def allocate_word(self) -> int:
        """Index of a signal word with value 0. RuntimeError when all 16384 are in use."""

    def free_word(self, word: int) -> None: ...
    def signal(self, word: int, value: int) -> None:
        """Store a value of 32 bits and wake all who wait. What was written before is seen by them."""

    def value(self, word: int) -> int: ...
    def wait(self, word: int, at_least: int, timeout_s: float) -> int | None:
        """The value once it is `at_least` (up to 2^31 - 1 ahead, modulo 2^32); None after
        `timeout_s` seconds. Without the GIL; Ctrl-C gets through within 0.1 s."""

    def _check(self) -> None:
        """RuntimeError if an invariant is broken."""

@final
class Peer:
    """The heap of another process of this machine and user, mapped for reading until this object
    dies, even if its owner dies before.

    OSError: there is no such process or heap, it is not allowed, or it is something else.
    Thread-safe.
    """

    def __init__(self, pid: int, fd: int, name: str) -> None: ...
    @property
    def nbytes(self) -> int: ...
    def get(self, offset: int, generation: int, nbytes: int, into_address: int) -> bool:
        """Copy the first `nbytes` of the block at `offset` to an address of this process.

        False: that block is gone, and what was copied is worth nothing. IndexError outside of the
        heap; ValueError where no block can start. Without the GIL. The caller answers for the
        destination.
        """

    def value(self, word: int) -> int: ...
    def wait(self, word: int, at_least: int, timeout_s: float) -> int | None:
        """As `Heap.wait`. An owner's death does not end the wait."""
