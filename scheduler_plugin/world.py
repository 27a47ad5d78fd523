"""Who belongs to which generation of the NVSHMEM world, and under which number.

A world is a fixed set of processes: all of them attach, or none does. Nobody can be added, and when one
is lost the others can neither go on without it nor attach again, so a generation ends as a whole and
the next one is formed by processes that were in none before. Whoever belongs to no world is served by
the other transports.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

#: Fewer processes than this form no world: there is nobody to pull from.
SMALLEST = 2


class Phase(StrEnum):
    UNKNOWN = "unknown"  # never offered, or gone
    WAITING = "waiting"  # offered; belongs to no generation yet
    ATTACHING = "attaching"
    UP = "up"  # every member has attached
    ENDED = "ended"  # its generation ended; this process can be in no other


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a process stands.

    generation counts from 1; pe is its number in it, 0 <= pe < n_pes; nbytes is the size that all
    members must allocate. mints: it has to make the unique id, and has not yet. uid: the unique id,
    once made. why: for people, when the phase is ENDED.
    """

    phase: Phase
    generation: int = 0
    pe: int = -1
    n_pes: int = 0
    nbytes: int = 0
    mints: bool = False
    uid: bytes | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class _Offer:
    worker: str
    nbytes: int


class World:
    """Events in, standings out. `now` is any monotonic clock, seconds.

    gather_s: how long to wait for further offers once a world could be formed.
    attach_s: how long attaching may take, from forming until the last member has attached.

    An event about a process or generation that is no longer current changes nothing: messages cross.
    """

    def __init__(self, *, gather_s: float, attach_s: float) -> None:
        self._gather_s = gather_s
        self._attach_s = attach_s
        self.generation = 0
        self._offers: dict[str, _Offer] = {}  # waiting, oldest first
        self._gathering: float | None = None  # since when; only while a world could be formed
        self._members: dict[str, int] = {}  # PE of each; empty: no generation lives
        self._terms: dict[str, _Offer] = {}  # what the members had offered
        self._uid: bytes | None = None
        self._attached: set[str] = set()
        self._formed = 0.0
        self._ended: dict[str, tuple[str, int, str]] = {}  # worker, generation, why

    # -- events ------------------------------------------------------------------------------------

    def offer(self, now: float, process: str, worker: str, nbytes: int, expected: int = 0) -> None:
        """A process would attach with up to `nbytes` of memory.

        process: names it for ever (an address does not: a restarted worker may get it again).
        expected: how many may offer at all; a world is formed at once when all of them have.
        """
        if self.standing(process).phase is Phase.UNKNOWN:
            self._offers[process] = _Offer(worker, nbytes)
            self._gather(now)
        if self._gathering is not None and expected and len(self._offers) >= expected:
            self._form(now)

    def leave(self, now: float, worker: str) -> None:
        """A worker is gone: nothing more is heard of its processes."""
        for process in [p for p, offer in self._offers.items() if offer.worker == worker]:
            del self._offers[process]
        if any(offer.worker == worker for offer in self._terms.values()):
            self._end(f"worker {worker} is gone")
        for process in [p for p, (where, _, _) in self._ended.items() if where == worker]:
            del self._ended[process]
        self._gather(now)

    def minted(self, process: str, generation: int, uid: bytes) -> bool:
        """PE 0 has made the unique id. False: nobody waits for that one."""
        current = generation == self.generation and self._members.get(process) == 0
        if not current or self._uid is not None:
            return False
        self._uid = uid
        return True

    def attached(self, process: str, generation: int) -> bool:
        """A member has attached. False: its generation is no more."""
        if generation != self.generation or process not in self._members or self._uid is None:
            return False
        self._attached.add(process)
        return True

    def failed(self, now: float, process: str, generation: int, why: str) -> None:
        """A member could not attach or has lost touch: that ends its generation. A process that
        waits takes its offer back."""
        if process in self._offers:
            del self._offers[process]
        elif generation == self.generation and process in self._members:
            pe, worker = self._members[process], self._terms[process].worker
            self._end(f"PE {pe} on {worker}: {why}")
        self._gather(now)

    def tick(self, now: float) -> None:
        """To be called when `deadline` has passed."""
        deadline = self.deadline
        if deadline is None or now < deadline:
            return
        if self._members:
            late = [self._terms[p].worker for p in self._members if p not in self._attached]
            self._end(f"not attached within {self._attach_s:g} s: {', '.join(late)}")
            self._gather(now)
        else:
            self._form(now)

    # -- answers -----------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Members of the living generation; 0: none lives."""
        return len(self._members)

    @property
    def deadline(self) -> float | None:
        """When the next `tick` is due; None: not before another event."""
        if self._members:
            complete = len(self._attached) == len(self._members)
            return None if complete else self._formed + self._attach_s
        return None if self._gathering is None else self._gathering + self._gather_s

    def standing(self, process: str) -> Standing:
        if process in self._members:
            up = len(self._attached) == len(self._members)
            pe = self._members[process]
            return Standing(
                Phase.UP if up else Phase.ATTACHING,
                self.generation,
                pe,
                len(self._members),
                min(offer.nbytes for offer in self._terms.values()),
                mints=pe == 0 and self._uid is None,
                uid=self._uid,
            )
        if process in self._offers:
            return Standing(Phase.WAITING)
        if process in self._ended:
            _, generation, why = self._ended[process]
            return Standing(Phase.ENDED, generation, why=why)
        return Standing(Phase.UNKNOWN)

    # -- inside ------------------------------------------------------------------------------------

    def _gather(self, now: float) -> None:
        possible = len(self._offers) >= SMALLEST and not self._members
        if not possible:
            self._gathering = None
        elif self._gathering is None:
            self._gathering = now

    def _form(self, now: float) -> None:
        self.generation += 1
        self._terms, self._offers = self._offers, {}
        self._members = {process: pe for pe, process in enumerate(self._terms)}
        self._formed = now
        self._gathering = None

    def _end(self, why: str) -> None:
        for process, offer in self._terms.items():
            self._ended[process] = (offer.worker, self.generation, why)
        self._members, self._terms, self._attached, self._uid = {}, {}, set(), None

    def _check(self) -> None:
        groups = [set(self._offers), set(self._members), set(self._ended)]
        assert sum(map(len, groups)) == len(set().union(*groups))
        assert sorted(self._members.values()) == list(range(len(self._members)))
        assert not self._members or len(self._members) >= SMALLEST
        assert self._terms.keys() == self._members.keys()
        assert self._attached <= self._members.keys()
        assert self._uid is None or self._members
        assert not self._attached or self._uid is not None
        assert (self._gathering is not None) == (
            len(self._offers) >= SMALLEST and not self._members
        )
        assert all(0 < generation <= self.generation for _, generation, _ in self._ended.values())
