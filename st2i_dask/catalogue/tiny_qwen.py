"""Tokenizer and text encoder of tiny pipelines that have a Qwen model: bytes and a chat template."""

from __future__ import annotations

from typing import Any

_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def qwen_tokenizer(max_length: int = 2048) -> Any:
    """A Qwen2Tokenizer with 259 tokens, one for each byte and three special ones."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = sorted(ByteLevel.alphabet()) + special
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[],
        model_max_length=max_length,
        additional_special_tokens=special[1:],
        padding_side="right",
    )
    tokenizer.chat_template = _CHAT
    return tokenizer


def qwen_config() -> Any:
    """Of a Qwen3 model of two layers, 32 wide, for the tokenizer."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=262,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=2048,
    )
