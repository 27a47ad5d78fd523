"""What a symmetric heap offers, whichever memory it lies in.

Every worker owns one part of a symmetric heap: fixed size, own allocator. A producer writes a tensor
there and hands out a `Ticket`; whoever can reach the heap pulls the bytes one-sidedly. Two backends:
`host_heap.py` (shared memory of one machine) and `nvshmem_heap.py` (device memory).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class HeapAddress:
    """Where a heap is; sent to other workers.

    kind: "host" or "nvshmem". uuid: names this heap of this process for ever. place: what the
    backend needs to reach it (host: pid and fd; nvshmem: generation of the world and PE).
    """

    kind: str
    uuid: str
    nbytes: int
    place: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Ticket:
    """A few bytes that stand for a block of some worker's heap."""

    heap: HeapAddress
    offset: int  # bytes from the start of the payload
    nbytes: int
    generation: int  # of the block; another one there means that the block was freed


class Block(Protocol):
    """Memory of a heap. Freed when this object and every view of it are gone. Any thread."""

    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def generation(self) -> int: ...


class SymmetricHeap(Protocol):
    """A worker's own part of a symmetric heap. Thread-safe."""

    @property
    def address(self) -> HeapAddress: ...

    @property
    def device(self) -> str:
        """torch's name of the device that its memory is on."""
        ...

    @property
    def used_bytes(self) -> int:
        """Bytes of live blocks, rounded up to the heap's granule."""
        ...

    def allocate(self, nbytes: int) -> Block | None:
        """A block of at least `nbytes` >= 1; None when no gap is large enough."""
        ...

    def allocate_weights(self, nbytes: int) -> Any | None:
        """Memory for a layer of weights: torch.uint8 (nbytes,), nbytes >= 1, which only this process
        uses; freed when its last view dies. None when there is no room. `block_of` need not find it."""
        ...

    def tensor(self, block: Block) -> Any:
        """The block's bytes as a torch.uint8 tensor (nbytes,), without a copy. Keeps it alive."""
        ...

    def block_of(self, tensor: Any) -> tuple[Block, int] | None:
        """The live block that a tensor's storage lies in, and the offset of its first element in
        it, bytes; None for a tensor that is elsewhere."""
        ...

    def reach(self, other: HeapAddress) -> bool:
        """Whether `pull` can get from that heap; connects to it on the first call. Never raises."""
        ...

    def pull(self, ticket: Ticket, into: Any) -> bool:
        """Copy the ticket's bytes into a torch.uint8 tensor of that size, on the heap's device.

        False when the block is not there any more: nothing of `into` may then be used. Ready for
        use by the calling thread when it returns. OSError: the heap cannot be reached.
        """
        ...

    def settle(self) -> None:
        """Wait until what this thread has written to the heap is there for others: before a ticket
        is handed out. OSError when the device does not get done."""
        ...

    def allocate_word(self) -> int | None:
        """A signal word of 32 bits with value 0, for others to wait on; None: there is none."""
        ...

    def free_word(self, word: int) -> None: ...

    def signal(self, word: int, value: int) -> None:
        """Store the value and wake who waits. They see what was written to the heap before."""
        ...

    def wait(self, other: HeapAddress, word: int, at_least: int, timeout_s: float) -> int | None:
        """The value of another heap's word once it is `at_least`; None after `timeout_s` seconds.

        OSError: the heap cannot be reached. Its owner's death does not end the wait.
        """
        ...

    def close(self) -> None:
        """Let go of other heaps. Own memory goes with its last view."""
        ...
