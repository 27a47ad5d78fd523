"""A cluster in virtual time, served by the very objects that serve a real one.

    workload = settings.s1(seed=1)                              workflows, tenants, shares
    requests = generate.evaluation(workload, rate=1.8, seconds=600.0, seed=1)
    report = Cluster(systems.OURS, workload, executors=32).run(requests)
    report.attainment(slo_scale=3.0)

Real: the policy (`FairPolicy` with its fair queue, ledger, cost model and placement, or a rival
chooser), one `WeightCache` per executor, the prefix of Eq. 2, and the arena's allocator where memory is
simulated. Models: the clock, the devices and the links.

What is simplified:
* A model is a row of equal layers, few of them (`profiles.LAYERS`): the blocks of a real one in groups.
* An executor runs one invocation at a time, so what its weight cache does during a run is worked out
  when the run is dispatched, layer by layer, in that run's own time. Loads of a run go over the
  executor's own link to host memory, one after the other; links of executors do not slow each other.
* Weights are in host memory: the paper found 99 % of loads there, and `figures/host_cache` checks it.
* A pull costs a latency and bytes over one bandwidth, whatever else is pulled.
* Activations are a constant; no executor fails; nobody cancels.
"""

from __future__ import annotations
