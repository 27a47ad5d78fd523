"""A PE on the real library and device, in a process of its own. See Pe in nvshmem_pe.py."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "worker_plugin"))

from nvshmem_pe import Child, digest, main

# Cycles of a kernel that does nothing: some tenths of a second on any device.
_BUSY = 500_000_000


class DeviceChild(Child):
    where = "cuda:0"

    def parts(self, root, faults):
        import torch

        from worker_plugin.nvshmem_cuda import Cuda
        from worker_plugin.nvshmem_library import Library, Packages

        torch.zeros(1, device=self.where)  # the context is not part of the time to attach
        return Library(Packages.real()), Cuda(0)

    def attach(self, *arguments):
        """What came of it, and how long it took, seconds."""
        start = time.perf_counter()
        return [super().attach(*arguments), time.perf_counter() - start]

    def mapped(self, pe):
        return self.library.mapped(pe)

    def measure(self, repeats, *ticket):
        """Median seconds of a pull, and of torch's copy of as many bytes on the device."""
        import torch

        ticket = self.ticket(*ticket)
        into = torch.zeros(ticket.nbytes, dtype=torch.uint8, device=self.where)
        source = torch.ones_like(into)

        def copy():
            into.copy_(source)
            torch.cuda.synchronize()

        def pull():
            assert self.heap.pull(ticket, into)

        return [_median(pull, repeats), _median(copy, repeats)]

    def allocation(self, repeats):
        """Median seconds to allocate and to let go of a block."""

        def turn():
            assert self.heap.allocate(1 << 20) is not None

        return _median(turn, repeats)

    def reuse(self):
        """[whether the arena is full while a kernel that may use it runs, and free after it]."""
        import torch

        everything = self.heap.address.nbytes
        tensor = self.heap.tensor(self.heap.allocate(everything))
        torch.cuda._sleep(_BUSY)
        del tensor
        during = self.heap.allocate(1) is None
        torch.cuda.synchronize()
        return [during, self.heap.allocate(everything) is not None]

    def order(self, *ticket):
        """[sum of the destination as a kernel before the pull saw it, digest after the pull]."""
        import torch

        ticket = self.ticket(*ticket)
        into = torch.zeros(ticket.nbytes, dtype=torch.uint8, device=self.where)
        torch.cuda._sleep(_BUSY)
        before = into.clone()
        assert self.heap.pull(ticket, into)
        return [int(before.sum()), digest(into)]

    def other_stream(self, *ticket):
        """The digest of bytes pulled by a thread whose current stream is another one."""
        import torch

        ticket = self.ticket(*ticket)
        with torch.cuda.stream(torch.cuda.Stream()):
            into = torch.zeros(ticket.nbytes, dtype=torch.uint8, device=self.where)
            assert self.heap.pull(ticket, into)
            return digest(into)

    def views(self):
        """[whether bfloat16 views compute right, used bytes while the last lives, and after]."""
        import torch

        block = self.heap.allocate(1 << 20)
        tensor = self.heap.tensor(block).view(torch.bfloat16).view(512, 1024)
        tensor.fill_(1.5)
        right = float(tensor.float().sum()) == 1.5 * 512 * 1024
        row = tensor[7]
        found = self.heap.block_of(row)
        right = right and found[0] is block and found[1] == 7 * 2048
        del tensor, block, found
        torch.cuda.synchronize()
        used = self.heap.used_bytes
        del row
        torch.cuda.synchronize()
        return [right, used, self.heap.used_bytes]


def _median(function, repeats):
    for _ in range(3):
        function()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


if __name__ == "__main__":
    main(DeviceChild)
