"""Images in and out as bytes. Nothing is decoded before its header says that it is small enough."""

from __future__ import annotations

import io
import warnings
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from .problems import ApiError

_FORMATS = ("PNG", "JPEG", "WEBP")
_QUALITY = 100

MEDIA = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}


def encode(image: Any, output_format: str, compression: int | None = None) -> bytes:
    """A generated image as a file. PNG has its metadata as text chunks; `compression` is the others'
    quality, percent. ApiError if the workflow's result is no image."""
    if not isinstance(image, Image.Image):
        raise ApiError(
            500,
            f"the workflow gave a {type(image).__name__} and no image; register one that ends in a "
            "PIL image",
            code="generation_failed",
        )
    file = io.BytesIO()
    if output_format == "png":
        image.save(file, "PNG")
    else:
        quality = _QUALITY if compression is None else compression
        image.convert("RGB").save(file, output_format.upper(), quality=quality)
    return file.getvalue()


def decode(data: Any, name: str, max_pixels: int) -> Image.Image:
    """An uploaded file, decoded, upright, with its own mode. ApiError 400 for what is none.

    data: bytes or a binary file.
    """
    file = io.BytesIO(data) if isinstance(data, bytes) else data
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(file, formats=_FORMATS)
        if image.width * image.height > max_pixels:
            raise _too_large(name, max_pixels)
        if getattr(image, "n_frames", 1) != 1:
            raise _unreadable(name, "it is animated")
        image.load()
        return ImageOps.exif_transpose(image)
    except ApiError:
        raise
    except Image.DecompressionBombError:
        raise _too_large(name, max_pixels) from None
    except UnidentifiedImageError:
        raise _unreadable(name, "it is no png, jpeg or webp file") from None
    except (OSError, ValueError, SyntaxError, MemoryError) as error:
        raise _unreadable(name, str(error)[:200] or type(error).__name__) from None
    except Exception as error:  # a decoder on bytes that somebody made for it
        raise _unreadable(name, type(error).__name__) from None


def opaque(image: Image.Image) -> Image.Image:
    """As workflows take it: RGB, what is transparent over white."""
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def mask_of(image: Image.Image) -> Image.Image:
    """As workflows take it: grey, white where the picture is drawn anew.

    OpenAI's masks are transparent there. One without transparency is white there already.
    """
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        return ImageOps.invert(image.convert("RGBA").getchannel("A"))
    return image.convert("L")


def _too_large(name: str, max_pixels: int) -> ApiError:
    return ApiError(
        400,
        f"{name} has more than {max_pixels:,} pixels, what is left of the limit; send smaller ones",
        code="image_too_large",
        param=name,
    )


def _unreadable(name: str, why: str) -> ApiError:
    return ApiError(
        400,
        f"{name} cannot be read: {why}; send a whole png, jpeg or webp image",
        code="invalid_image",
        param=name,
    )
