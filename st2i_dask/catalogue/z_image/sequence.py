"""Sequence parallelism: one forward of Z-Image's transformer by several executors.

Every executor computes the embedders, the refiners of the text and the last layer; of the tokens in
the refiners of the image and in the main layers, each has its share. A layer is run token by token but
for its attention, for which all publish their tokens' keys and values and collect those of the others.

The forward is Diffusers' own. Hooks and attention processors are on the model only while it runs so;
other threads that run the same model meanwhile pass through them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from ...gang import Gang

#: Shares are multiples of so many tokens, as the sequences are: kernels then sum in the same order as
#: for the whole, on the CPUs that were tried.
UNIT = 32

_thread = threading.local()
_lock = threading.Lock()
# By transformer: how many run with it, and what takes everything off again.
_prepared: WeakKeyDictionary[Any, _Prepared] = WeakKeyDictionary()


@contextmanager
def shared_sequence(transformer: Any, gang: Gang) -> Iterator[None]:
    """In the body, forwards of the transformer in this thread compute the gang's share and give the
    whole result, on every executor. Without residuals of a ControlNet.

    The result is close to that of one executor. On the CPUs that were tried (float32 and bfloat16, 96
    to 2,144 tokens, gangs of 1 to 4) it was equal in every bit; no kernel promises that.
    """
    with _lock:
        prepared = _prepared.get(transformer)
        if prepared is None:
            prepared = _prepared[transformer] = _Prepared(transformer)
        prepared.users += 1
    before = getattr(_thread, "share", None)
    _thread.share = _Share(gang)
    try:
        yield
    finally:
        _thread.share = before
        with _lock:
            prepared.users -= 1
            if not prepared.users:
                del _prepared[transformer]
                prepared.restore()


def bounds(tokens: int, size: int) -> list[int] | None:
    """Where the shares of a sequence begin and end, size + 1 numbers; they differ by at most UNIT
    tokens. None: it is too short, everybody computes it."""
    units = tokens // UNIT
    if units < size:
        return None
    return [units * rank // size * UNIT for rank in range(size)] + [tokens]


class _Share:
    """This thread's part of a forward."""

    def __init__(self, gang: Gang):
        self.gang = gang
        #: Of the sequence that is being worked on, those computed here; None: all, by everybody.
        self.tokens: slice | None = None

    def split(self, x: Any) -> Any:
        """Of a whole sequence (images, tokens, dim), what is computed here."""
        edges = bounds(x.shape[1], self.gang.size)
        if edges is None:
            self.tokens = None
            return x
        self.tokens = slice(edges[self.gang.rank], edges[self.gang.rank + 1])
        return x[:, self.tokens].contiguous()

    def join(self, x: Any) -> Any:
        """Of the shares, the whole sequence again."""
        import torch

        if self.tokens is None:
            return x
        self.gang.publish(x)
        return torch.cat(self.gang.collect(), dim=1)


class _Prepared:
    """A transformer with hooks and processors on it that do nothing in threads without a share."""

    def __init__(self, transformer: Any):
        self.users = 0
        self._hooks = []
        self._processors = []
        for layers in (transformer.noise_refiner, transformer.layers):
            if len(layers):
                self._hooks.append(layers[0].register_forward_pre_hook(_split))
                self._hooks.append(layers[-1].register_forward_hook(_join))
            for layer in layers:
                attention = layer.attention
                self._processors.append((attention, attention.processor))
                attention.processor = SharedAttention(attention.processor)

    def restore(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for attention, processor in self._processors:
            attention.processor = processor


def _split(layer: Any, args: tuple[Any, ...]) -> Any:
    share = getattr(_thread, "share", None)
    return None if share is None else (share.split(args[0]), *args[1:])


def _join(layer: Any, args: Any, x: Any) -> Any:
    share = getattr(_thread, "share", None)
    return None if share is None else share.join(x)


class SharedAttention:
    """What `ZSingleStreamAttnProcessor` computes, for some of the queries.

    Mask and rotation are given for the whole sequence.
    """

    def __init__(self, alone: Any):
        self._alone = alone

    def __call__(
        self,
        attn: Any,
        hidden_states: Any,
        encoder_hidden_states: Any = None,
        attention_mask: Any = None,
        freqs_cis: Any = None,
    ) -> Any:
        share = getattr(_thread, "share", None)
        if share is None or share.tokens is None:
            return self._alone(
                attn, hidden_states, encoder_hidden_states, attention_mask, freqs_cis
            )
        import torch
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        freqs_cis = freqs_cis[:, share.tokens]
        key = attn.to_k(hidden_states).unflatten(-1, (attn.heads, -1))
        value = attn.to_v(hidden_states).unflatten(-1, (attn.heads, -1))
        if attn.norm_k is not None:
            key = attn.norm_k(key)
        share.gang.publish((_rotated(key, freqs_cis), value))
        # While the others' arrive.
        query = attn.to_q(hidden_states).unflatten(-1, (attn.heads, -1))
        if attn.norm_q is not None:
            query = attn.norm_q(query)
        query = _rotated(query, freqs_cis)
        keys, values = zip(*share.gang.collect(), strict=True)
        if attention_mask is not None and attention_mask.ndim == 2:
            attention_mask = attention_mask[:, None, None, :]
        attended = dispatch_attention_fn(
            query,
            torch.cat(keys, dim=1),
            torch.cat(values, dim=1),
            attn_mask=attention_mask,
            dropout_p=0.0,
            is_causal=False,
            backend=self._alone._attention_backend,
            parallel_config=self._alone._parallel_config,
        )
        attended = attended.flatten(2, 3).to(query.dtype)
        for module in attn.to_out:
            attended = module(attended)
        return attended


def _rotated(x: Any, freqs_cis: Any) -> Any:
    """Rotary positions of (images, tokens, heads, width), as the processor that it stands for does."""
    import torch

    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs_cis.unsqueeze(2)).flatten(3).type_as(x)
