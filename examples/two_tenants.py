"""Two tenants: one submits hundreds of pictures at once, the other wants a few now.

    python examples/two_tenants.py

On a cluster with a queue, the second would wait for all of the first. Here every tenant is charged the
device seconds it uses, and who has used least is next.
"""

import time

from dask.distributed import Client, wait

import st2i_dask as st2i

PROMPTS = [
    f"a {size} {colour} {shape} on a white background"
    for size in ("small", "large")
    for colour in ("red", "green", "blue")
    for shape in ("circle", "square", "star")
]


def watch(client, seconds, every=2.0):
    """Print what each tenant gets of the device time, and return it for the whole while."""
    used = {row["tenant"]: row["service_s"] for row in st2i.tenants(client)}
    first = dict(used)
    for _ in range(round(seconds / every)):
        time.sleep(every)
        now = {row["tenant"]: row["service_s"] for row in st2i.tenants(client)}
        print("  ".join(f"{name} {share:4.0%}" for name, share in shares(used, now)))
        used = now
    print("in all: " + ", ".join(f"{name} {share:.0%}" for name, share in shares(first, used)))


def shares(before, after):
    total = sum(after.values()) - sum(before.values())
    return [(name, (after[name] - before.get(name, 0.0)) / total) for name in sorted(after)]


if __name__ == "__main__":  # Dask starts processes that import this file
    with st2i.local_cluster(n_workers=2) as cluster, Client(cluster) as client:
        # Pictures of this model take a third of a second; the default slack is 5 s.
        st2i.settings(client, slack_s=0.5)
        shapes = st2i.load("shapes")

        batch = shapes.map(client, PROMPTS * 40, seed=range(720), tenant="batch")
        wait(batch, return_when="FIRST_COMPLETED")  # batch has paid for loading the model
        print(f"batch has submitted {len(batch)} pictures")

        for number, prompt in enumerate(PROMPTS[:3]):
            queued = sum(not future.done() for future in batch)
            start = time.monotonic()
            shapes.submit(client, prompt=prompt, seed=number, tenant="alice").result()
            print(
                f"alice has one after {time.monotonic() - start:.1f} s, {queued} of batch waiting"
            )

        alice = shapes.map(client, PROMPTS * 20, seed=range(360), tenant="alice")
        print(f"now alice submits {len(alice)} too, at equal weights")
        watch(client, 8)
        st2i.settings(client, weights={"alice": 3.0})
        print("alice's weight is 3")
        watch(client, 8)

        print("tenant  weight  vTime (s)  device time (s)  unfinished")
        for row in st2i.tenants(client):
            print(
                f"{row['tenant']:6}  {row['weight']:6g}  {row['vtime_s']:9.1f}  "
                f"{row['service_s']:15.1f}  {row['queued'] + row['running']:10}"
            )
        client.cancel([*batch, *alice])  # this was only a demonstration
