"""LoRA: a style on top of a model, without a second copy of the model.

    python examples/lora.py [OUT.png]

Saves the pictures that one prompt and seed give plain, with the style `framed` (a frame in the
colour of the shape) and with the style `night` (a black background), side by side. All requests
use the same weights of the model; a style adds 0.2 MB.
"""

import sys

from dask.distributed import Client
from PIL import Image

import st2i_dask as st2i

if __name__ == "__main__":  # Dask starts processes that import this file
    out = sys.argv[1] if len(sys.argv) > 1 else "styles.png"
    asked = {"prompt": "a small yellow circle on a blue background", "seed": 7}
    # Packaged ones by name; your own by file or hub id, with a scale.
    adapters = [[], [("shapes-framed", 1.0)], [("shapes-night", 1.0)]]
    with st2i.local_cluster(n_workers=2) as cluster, Client(cluster) as client:
        st2i.attach(client)
        shapes = st2i.load("shapes")
        futures = [
            shapes.submit(client, **asked, loras=loras, tenant=tenant)
            for loras, tenant in zip(adapters, ("alice", "bob", "carol"), strict=True)
        ]
        strip = Image.new("RGB", (64 * len(futures), 64))
        for i, future in enumerate(futures):
            strip.paste(future.result(), (64 * i, 0))
    strip.save(out)
    print(f"{out}: plain, framed, at night")
