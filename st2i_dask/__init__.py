"""Fair, fast text-to-image workflows on a shared Dask cluster.

    import st2i_dask as st2i

Compose model functions into workflows, submit prompts for a tenant, get the images that Diffusers
itself would make.
"""

from importlib.metadata import version as _version

from .catalogue import load
from .catalogue.paper import load_setting
from .cluster import attach, local_cluster
from .comfyui import from_comfyui
from .errors import (
    AttachError,
    ComposeError,
    LimitError,
    LoadError,
    NotFiniteError,
    OutputError,
    ParameterError,
    PolicyError,
    RegistrationError,
    St2iError,
)
from .fetch import fetch
from .glue import glue
from .image import GeneratedImage, to_image
from .model_fn import ModelFn
from .operate import data_plane, load_costs, models, save_costs, settings, tenants
from .parameters import Data, Static
from .pipelines import from_pipeline
from .progress import progress
from .rules import Multiple, OneOf, Prompt, Range
from .stream import stream
from .trace import later
from .updates import Update, updates
from .workflow import Workflow, workflow, workflows

__version__ = _version("st2i_dask")

__all__ = [
    "AttachError",
    "ComposeError",
    "Data",
    "GeneratedImage",
    "LimitError",
    "LoadError",
    "ModelFn",
    "Multiple",
    "NotFiniteError",
    "OneOf",
    "OutputError",
    "ParameterError",
    "PolicyError",
    "Prompt",
    "Range",
    "RegistrationError",
    "St2iError",
    "Static",
    "Update",
    "Workflow",
    "attach",
    "data_plane",
    "fetch",
    "from_pipeline",
    "from_comfyui",
    "glue",
    "later",
    "load",
    "load_costs",
    "load_setting",
    "local_cluster",
    "models",
    "progress",
    "save_costs",
    "settings",
    "stream",
    "tenants",
    "to_image",
    "updates",
    "workflow",
    "workflows",
]
