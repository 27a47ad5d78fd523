"""Any Diffusers pipeline, unmodified, as a workflow.

    python examples/any_pipeline.py [folder or hub id] [file.png]

Without a folder it uses the packaged `shapes` model. The pipeline's own code runs on a worker that holds
no executor for it; its text encoders, denoiser and VAE run wherever the fair scheduler sends them.
"""

from __future__ import annotations

import sys

from distributed import Client

import st2i_dask as st2i

PROMPT = "a small yellow star on a purple background"
SHAPES = {"height": 64, "width": 64, "num_inference_steps": 20, "max_sequence_length": 32}


def main(source: str = "shapes", path: str = "any.png") -> None:
    workflow = st2i.from_pipeline(source, dtype="float32")
    print(workflow)
    # What the pipeline's own call takes, except that a seed stands for its generator.
    arguments = SHAPES if source == "shapes" else {}
    with st2i.local_cluster(2) as cluster, Client(cluster) as client:
        future = workflow.submit(client, tenant="ann", seed=7, prompt=PROMPT, **arguments)
        image = future.result()
        image.save(path)
        print(f"{path}: {image.metadata['prompt']!r}, seed {image.metadata['seed']}")
        for row in st2i.tenants(client):
            print(f"{row['tenant']} used {row['service_s']:.2f} device seconds")


if __name__ == "__main__":
    main(*sys.argv[1:])
