"""A PE in a process of its own, told over its standard input what to do. See `Pe`."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import select
import subprocess
import sys
import threading
from pathlib import Path

TIMEOUT = 30.0


class Pe:
    """The parent's end. faults: of nvshmem_fake.Faults. script: this one, or one with more commands."""

    def __init__(self, root, script=__file__, **faults):
        self._process = subprocess.Popen(
            [sys.executable, script, str(root), json.dumps(faults)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def tell(self, command, *arguments):
        self._process.stdin.write(json.dumps([command, *arguments]) + "\n")

    def answer(self, timeout=TIMEOUT):
        """What the last command gave. TimeoutError; EOFError when the process is gone."""
        ready, _, _ = select.select([self._process.stdout], [], [], timeout)
        if not ready:
            raise TimeoutError
        line = self._process.stdout.readline()
        if not line:
            raise EOFError(self._process.wait(TIMEOUT))
        return json.loads(line)

    def ask(self, command, *arguments):
        self.tell(command, *arguments)
        return self.answer()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._process.kill()
        self._process.wait(TIMEOUT)
        self._process.stdin.close()
        self._process.stdout.close()


def pattern(seed, nbytes):
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def digest(tensor):
    return hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest()


class Child:
    """The commands."""

    where = "cpu"  # torch's name of the memory

    def __init__(self, root, faults):
        import torch

        torch.set_num_threads(1)
        self.library, self.cuda = self.parts(root, faults)
        self.heap = None
        self.kept = []

    def parts(self, root, faults):
        from nvshmem_fake import Faults, pe

        return pe(root, Faults(**faults))[:2]

    def mint(self):
        return base64.b64encode(self.library.mint()).decode()

    def alive(self):
        return True

    def attach(self, uid, pe, n_pes, nbytes, seconds=TIMEOUT / 2):
        """What came of it: attached, the error, or hangs."""
        said = []

        def attach():
            try:
                self.library.attach(base64.b64decode(uid), pe, n_pes, 0, nbytes)
                said.append("attached")
            except OSError as error:
                said.append(str(error))

        thread = threading.Thread(target=attach, daemon=True)
        thread.start()
        thread.join(seconds)
        if not said:
            return "hangs"
        if said == ["attached"]:
            from worker_plugin.nvshmem_heap import NvshmemHeap

            self.heap = NvshmemHeap(
                self.library, self.cuda, name=uid[:8], generation=1, pe=pe, n_pes=n_pes
            )
        return said[0]

    def write(self, seed, nbytes):
        block = self.heap.allocate(nbytes)
        tensor = self.heap.tensor(block)
        tensor.copy_(pattern(seed, nbytes))
        self.heap.settle()
        self.kept.append(tensor)
        address = self.heap.address
        return [address.uuid, address.nbytes, block.offset, block.nbytes, block.generation]

    def drop(self):
        self.kept.clear()
        self.heap._check()
        return self.heap.used_bytes

    def pull(self, *ticket):
        import torch

        into = torch.zeros(ticket[4], dtype=torch.uint8, device=self.where)
        found = self.heap.pull(self.ticket(*ticket), into)
        return [found, digest(into)]

    def ticket(self, uuid, size, pe, offset, nbytes, generation):
        from worker_plugin.heap import HeapAddress, Ticket

        there = HeapAddress("nvshmem", uuid, size, (1, pe))
        return Ticket(there, offset, nbytes, generation)

    def finalize(self):
        self.library.finalize()
        return True


def main(kind):
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    child = kind(Path(sys.argv[1]), json.loads(sys.argv[2]))
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        print(json.dumps(getattr(child, command)(*arguments)), file=answers, flush=True)


if __name__ == "__main__":
    main(Child)
