"""What a user wrote, as an error quotes it: never longer than a message may be.

>>> quoted("studio"), quoted(3)
("'studio'", '3')
>>> len(quoted("x" * 10_000))
200
"""

from __future__ import annotations

#: Characters of a quotation; paths of models are seldom longer.
MOST = 200


def quoted(value: object) -> str:
    """repr, of at most MOST characters: its beginning and its end when it is longer. Never raises."""
    if isinstance(value, str) and len(value) > MOST:
        value = value[:MOST] + value[-MOST:]  # not the repr of a text of any length
    try:
        text = repr(value)
    except Exception:  # Python writes no whole number of more than some thousand digits
        return f"<{type(value).__name__}>"
    if len(text) <= MOST:
        return text
    end = MOST // 4
    return f"{text[: MOST - end - 3]}...{text[-end:]}"
