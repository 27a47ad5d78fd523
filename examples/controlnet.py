"""ControlNet: the drawn shape takes the place and the outline of a silhouette.

    python examples/controlnet.py [OUT.png]

Saves the silhouette, the picture that follows it, and the one that the same prompt and seed give
without it, side by side. The ControlNet's blocks stream into the transformer while it runs: with
two workers both work at once.
"""

import sys

from dask.distributed import Client
from PIL import Image

import st2i_dask as st2i
from st2i_dask.shapes.render import silhouette

if __name__ == "__main__":  # Dask starts processes that import this file
    out = sys.argv[1] if len(sys.argv) > 1 else "controlled.png"
    # White on black. Any picture of that kind will do, for example one drawn by hand.
    control_image = silhouette("triangle", radius=18, dx=-12, dy=10, turn=30).convert("RGB")
    asked = {"prompt": "a small yellow triangle on a purple background", "seed": 7}
    with st2i.local_cluster(n_workers=2) as cluster, Client(cluster) as client:
        st2i.attach(client)
        plain = st2i.load("shapes")
        controlled = st2i.load("shapes", controlnet="shapes-silhouette")
        free = plain.submit(client, **asked, tenant="alice")
        bound = controlled.submit(client, **asked, control_image=control_image, tenant="bob")
        pictures = [control_image, bound.result(), free.result()]
    strip = Image.new("RGB", (64 * len(pictures), 64))
    for i, picture in enumerate(pictures):
        strip.paste(picture, (64 * i, 0))
    strip.save(out)
    print(f"{out}: the silhouette, the picture that follows it, and the one that does not")
