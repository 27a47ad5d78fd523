"""Watching requests: a progress bar, a callback with previews, and an event loop.

    python examples/progress.py [FOLDER]

Saves a picture and what it was halfway there.
"""

import asyncio
import sys
from pathlib import Path

from dask.distributed import Client

import st2i_dask as st2i

PROMPT = "a small yellow star on a purple background"


async def tell(future):
    """In any event loop, also a notebook's: `await tell(future)` in a cell."""
    async for update in st2i.updates(future):
        print(f"{update.state}: {update.done} of {update.total or '?'} steps")


if __name__ == "__main__":  # Dask starts processes that import this file
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    with st2i.local_cluster(n_workers=2) as cluster, Client(cluster) as client:
        st2i.attach(client)
        shapes = st2i.load("shapes")

        # A bar in a terminal or a notebook, a few lines in a log: images, steps, place in the queue.
        st2i.progress(shapes.map(client, [PROMPT] * 4, seed=range(4), num_steps=20))

        # A callback, and one preview: what it has after half of its steps, decoded.
        def show(update):
            if update.preview is not None:
                update.preview.save(folder / "halfway.png")

        future = shapes.submit(client, prompt=PROMPT, seed=7, num_steps=20, previews=1)
        st2i.progress(future, on_progress=show)
        future.result().save(folder / "star.png")

        asyncio.run(tell(shapes.submit(client, prompt=PROMPT, seed=8, num_steps=20)))
