"""Tensors in a worker's arena: put there by their producer, pulled from there by who needs them.

A stored tensor is an ordinary torch tensor whose memory lies in the arena; its block is freed when
the last view of it dies, that is when Dask lets go of the result that holds it. Wherever Dask counts a
replica the bytes are really there: what travels between workers is a ticket, and the receiver has
pulled the bytes before Dask hears that it has the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, WeakValueDictionary, ref

from st2i_dask.outputs import PackedTensor, dense, dtype_name, is_plain_tensor

from .arena import WAIT_SECONDS, Arena
from .heap import Block, Ticket
from .transports import Transport, Transports

#: Smaller tensors travel inside messages, bytes: a block takes a granule, a pull two look-ups.
SMALL = 16 * 1024

#: The stores of this process, by the uuid of their heap.
_stores: WeakValueDictionary[str, TensorStore] = WeakValueDictionary()
# Weak: event loops keep copies of a context for as long as a connection lives.
_receiver: ContextVar[ReferenceType[TensorStore] | None] = ContextVar("st2i-receiver", default=None)


@contextmanager
def receiving(store: TensorStore | None) -> Iterator[None]:
    """Tickets unpickled in the body are pulled into that store; None: into any of the process."""
    token = _receiver.set(ref(store) if store is not None else None)
    try:
        yield
    finally:
        _receiver.reset(token)


class TensorStore:
    """One per worker. Thread-safe."""

    def __init__(self, arena: Arena):
        self.arena = arena
        self.transports = Transports()
        _stores[arena.heap.address.uuid] = self

    def keep(self, tensor: Any) -> Any:
        """A copy in the arena: the same values, shape, strides and dtype; a model may use its
        buffers again.

        Itself if it is there already or is no plain tensor. Small ones, and those without room in
        the arena, are copied to torch's own memory, on the heap's device.
        """
        if not is_plain_tensor(tensor):
            return tensor
        tensor, nbytes = tensor.detach(), tensor.numel() * tensor.element_size()
        if nbytes >= SMALL and self._whole_block(tensor) is not None:
            return tensor
        tensor = dense(tensor)
        block = self.arena.allocate(nbytes, WAIT_SECONDS) if nbytes >= SMALL else None
        if block is None:
            return tensor.to(self.arena.heap.device, copy=True)
        stored = _shaped(self.arena.heap.tensor(block), tensor.dtype, tensor.shape, tensor.stride())
        stored.copy_(tensor)
        return stored

    def holds(self, tensor: Any) -> bool:
        """Whether the tensor's memory is a block of the arena."""
        return self.arena.heap.block_of(tensor) is not None

    def pack(self, tensor: Any) -> PackedTensor | None:
        """How the tensor travels to another store that can reach this heap (a function for
        `outputs.packing`); None if it is not in the arena."""
        block = self._whole_block(tensor)
        if block is None:
            return None
        ticket = Ticket(self.arena.heap.address, block.offset, block.nbytes, block.generation)
        return _TensorTicket(ticket, dtype_name(tensor), tuple(tensor.shape), tensor.stride())

    def pull(self, ticket: Ticket) -> Any:
        """The ticket's bytes, in this arena if there is room: torch.uint8 (nbytes,).

        OSError when they are not to be had any more.
        """
        import torch

        heap = self.arena.heap
        block = self.arena.allocate(ticket.nbytes)
        if block is not None:
            into = heap.tensor(block)
        else:
            into = torch.empty(ticket.nbytes, dtype=torch.uint8, device=heap.device)
        if not heap.pull(ticket, into):
            raise OSError(f"block {ticket.offset} of heap {ticket.heap.uuid} is not there any more")
        self.transports.count(self._transport(ticket), ticket.nbytes)
        return into

    def _transport(self, ticket: Ticket) -> Transport:
        if ticket.heap.uuid in _stores:
            return "process"
        return "host" if ticket.heap.kind == "host" else "nvshmem"

    def _whole_block(self, tensor: Any) -> Block | None:
        """The block that a dense tensor fills; None for any other tensor."""
        found = self.arena.heap.block_of(tensor)
        if found is None:
            return None
        block, start = found
        whole = start == 0 and block.nbytes == tensor.numel() * tensor.element_size()
        return block if whole and dense(tensor) is tensor else None


@dataclass(frozen=True, slots=True)
class _TensorTicket(PackedTensor):
    """Pulls when it is unpacked, in the receiver's process."""

    ticket: Ticket
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def unpack(self) -> Any:
        import torch

        receiver = _receiver.get()
        store = receiver() if receiver is not None else next(iter(_stores.values()), None)
        if store is None:
            raise OSError(f"no arena in this process to pull {self.ticket} into")
        return _shaped(store.pull(self.ticket), getattr(torch, self.dtype), self.shape, self.stride)


def _shaped(raw: Any, dtype: Any, shape: Any, stride: Any) -> Any:
    return raw.view(dtype).as_strided(shape, stride)
