"""The rivals that stream a model's weights: Diffusers' group offloading and accelerate's CPU offload.

Where onload and offload device are both the CPU they copy nothing: `.to` gives the tensor itself, and
the model computes from the mapped file. So that they do what they do on a device, every `.to` of a load
is a copy here, and an offload puts the host tensor back without a copy, as theirs does with streams.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def group_offload(model: Any, *, copies: bool = True) -> None:
    """Diffusers' group offloading, a block at a time. copies: False leaves it as it is on a CPU."""
    from diffusers.hooks import apply_group_offloading

    apply_group_offloading(
        model,
        onload_device="cpu",
        offload_device="cpu",
        offload_type="block_level",
        num_blocks_per_group=1,
    )
    if not copies:
        return
    seen = set()
    for module in model.modules():
        registry = getattr(module, "_diffusers_hook", None)
        hook = registry.get_hook("group_offloading") if registry is not None else None
        if hook is not None and id(hook.group) not in seen:
            seen.add(id(hook.group))
            _group_on_a_device(hook.group)
    assert seen, "Diffusers keeps its groups elsewhere"


def cpu_offload(model: Any, *, copies: bool = True) -> None:
    """accelerate's CPU offload, a module with weights at a time. copies: as in `group_offload`."""
    import accelerate

    accelerate.cpu_offload(model, execution_device="cpu")
    if not copies:
        return
    found = 0
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        if hook is not None:
            hook.pre_forward = _copying(hook.pre_forward)
            found += 1
    assert found, "accelerate keeps its hooks elsewhere"


def _group_on_a_device(group: Any) -> None:
    tensors = [p for module in group.modules for p in (*module.parameters(), *module.buffers())]
    tensors += [*group.parameters, *group.buffers]
    host = [(tensor, tensor.data) for tensor in tensors]

    def offload() -> None:
        for tensor, data in host:
            tensor.data = data

    group.onload_ = _copying(group.onload_)
    group.offload_ = offload


def _copying(load: Callable[..., Any]) -> Callable[..., Any]:
    """The same, where `Tensor.to` always gives a new tensor."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Copying(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = dict(kwargs or {})
            # A Parameter has been moved before it is made; asked again it gives itself.
            if func is torch.Tensor.to and type(args[0]) is torch.Tensor:
                kwargs["copy"] = True
            return func(*args, **kwargs)

    def load_copies(*args: Any, **kwargs: Any) -> Any:
        with Copying():
            return load(*args, **kwargs)

    return load_copies
