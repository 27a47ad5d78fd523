"""What the front end takes at most. Every wait and every store has its bound here."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..errors import PolicyError

MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """PolicyError for a value that is not positive.

    Sizes: json_bytes, upload_bytes (bodies), header_bytes; image_pixels of all uploaded images of a request;
    output_pixels of one generated image; prompt_chars; images of one request.
    Counts: open_images that wait or run in all; connections; uploads of one request, and requests whose
    uploads are read and decoded at once; records of requests that are over.
    Seconds: header_s, body_s and write_s without which a connection is closed; request_s from
    arrival to result; keep_s that results and records of requests stay.
    results_bytes: of images that are kept.
    """

    json_bytes: int = 1 * MIB
    upload_bytes: int = 64 * MIB
    header_bytes: int = 64 * 1024
    image_pixels: int = 16_777_216
    output_pixels: int = 16_777_216
    prompt_chars: int = 32_000
    images: int = 10
    uploads: int = 16
    open_images: int = 1_000
    connections: int = 2_000
    records: int = 2_000
    uploads_at_once: int = 32
    results_bytes: int = 1024 * MIB
    header_s: float = 10.0
    body_s: float = 60.0
    write_s: float = 60.0
    request_s: float = 3_600.0
    keep_s: float = 3_600.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise PolicyError(f"{field.name} is {value!r}; give a number above 0")
