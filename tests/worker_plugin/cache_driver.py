"""What a driver of the policy of residency does, in a few lines."""

from __future__ import annotations

import itertools

from worker_plugin.weight_cache import Load, WeightCache

WHOLE = ("mcache", "wcache", "nocache")


class Driver:
    """Carries out what the cache says; copies at once unless `hold` is set. Time is a counter."""

    def __init__(self, framework, arena=0, mode="elastic", **models):
        self.cache = WeightCache({"framework": framework, "arena": arena}, mode)
        for name, sizes in models.items():
            self.cache.add(name, sizes)
        self.hold, self.log, self.load = False, [], None
        self.clock = itertools.count()

    def tell(self, event, *args):
        self.obey(getattr(self.cache, event)(*args, now=next(self.clock)))

    def obey(self, instructions):
        for instruction in instructions:
            self.log.append(instruction)
            if isinstance(instruction, Load):
                assert self.load is None
                self.load = instruction
        self.cache._check()
        while self.load is not None and not self.hold:
            self.report("loaded")

    def report(self, outcome):
        load, self.load = self.load, None
        self.tell(outcome, load.weights, load.layer)

    def seen(self):
        """Since last asked, such as '+a0' for a load and '-a0' for an eviction."""
        log, self.log = self.log, []
        return [f"{'+' if isinstance(i, Load) else '-'}{i.weights}{i.layer}" for i in log]

    def execute(self, run, weights, layers):
        for layer in layers:
            self.tell("enter", run, weights, layer)
            assert not self.cache.waiting(run)
            self.tell("leave", run, weights, layer)

    def run(self, run, *weights):
        self.tell("begin", run, weights)
        for name in weights:
            self.execute(run, name, range(len(self.cache.resident(name))))
        self.tell("end", run)

    def resident(self, name):
        return "".join("x" if there else "." for there in self.cache.resident(name))
