"""The tokenizer of tiny pipelines whose text encoder is a Qwen model: bytes and a chat template."""

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
