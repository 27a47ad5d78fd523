"""A workflow made in ComfyUI, run on a Dask cluster.

    python examples/comfyui.py

Draws with the packaged model; give models={"your.safetensors": "/models/..."} for your own.
"""

from dask.distributed import Client

import st2i_dask as st2i

# What ComfyUI writes with Workflow > Export (API), here for the model `shapes`; a path works as well.
EXPORT = {
    "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "shapes.safetensors"}},
    "2": {
        "class_type": "CLIPTextEncode",
        "inputs": {"text": "a large green circle on a yellow background", "clip": ["1", 1]},
    },
    "3": {"class_type": "CLIPTextEncode", "inputs": {"text": "", "clip": ["1", 1]}},
    "4": {
        "class_type": "EmptyLatentImage",
        "inputs": {"width": 64, "height": 64, "batch_size": 1},
    },
    "5": {
        "class_type": "KSampler",
        "inputs": {
            "model": ["1", 0],
            "positive": ["2", 0],
            "negative": ["3", 0],
            "latent_image": ["4", 0],
            "seed": 7,
            "steps": 8,
            "cfg": 1.0,
            "sampler_name": "euler",
            "scheduler": "simple",
            "denoise": 1.0,
        },
    },
    "6": {"class_type": "VAEDecode", "inputs": {"samples": ["5", 0], "vae": ["1", 2]}},
    "7": {"class_type": "SaveImage", "inputs": {"images": ["6", 0], "filename_prefix": "shape"}},
}

if __name__ == "__main__":  # Dask starts processes that import this file
    workflow = st2i.from_comfyui(EXPORT, models={"shapes.safetensors": "shapes"}, name="shape")
    with st2i.local_cluster(n_workers=1) as cluster, Client(cluster) as client:
        # As it was exported, and with another prompt and seed.
        futures = [
            workflow.submit(client),
            workflow.submit(client, prompt="a small red square on a white background", seed=8),
        ]
        for number, future in enumerate(futures):
            image = future.result()
            image.save(f"comfyui-{number}.png")
            print(
                f"comfyui-{number}.png: {image.metadata['prompt']}, seed {image.metadata['seed']}"
            )
