"""The form of POST /v1/images/edits: fields, images and a mask."""

from __future__ import annotations

from typing import Any

from PIL import Image
from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request

from .pictures import decode, mask_of, opaque
from .problems import ApiError, of_validation
from .schema import EditRequest
from .service import Service
from .wanted import extra_names

_FILE = {"type": "string", "format": "binary"}
#: The form, for the API's description.
EDIT_BODY: dict[str, Any] = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["prompt", "image"],
                "properties": {
                    "image": {"type": "array", "items": _FILE, "minItems": 1, "maxItems": 16},
                    "mask": _FILE,
                    **{name: {"type": "string"} for name in sorted(EditRequest.model_fields)},
                },
            }
        }
    },
}


async def read_edit(request: Request, service: Service) -> tuple[EditRequest, dict[str, Any]]:
    """The checked fields, and PIL images by name (image: one or a list; mask). ApiError 400."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise ApiError(
            400,
            f"content-type is {kind[:100]!r}; send multipart/form-data with image and prompt",
            code="invalid_content_type",
        )
    limits = service.limits
    async with (
        service.upload(),
        request.form(
            max_files=limits.uploads + 1, max_fields=64, max_part_size=limits.json_bytes
        ) as form,
    ):
        fields, images, mask = _parts(form)
        try:
            body = EditRequest.model_validate(fields)
        except ValidationError as error:
            raise of_validation(list(error.errors()), extra_names(service.models, fields)) from None
        if not 1 <= len(images) <= limits.uploads:
            raise ApiError(
                400,
                f"{len(images)} images came, wanted 1 to {limits.uploads} files called image or "
                "image[]",
                code="missing_required_parameter" if not images else "invalid_value",
                param="image",
            )
        return body, await service.decode(lambda: _decoded(images, mask, limits.image_pixels))


def _parts(form: FormData) -> tuple[dict[str, Any], list[UploadFile], UploadFile | None]:
    fields: dict[str, Any] = {}
    images: list[UploadFile] = []
    mask: UploadFile | None = None
    for name, value in form.multi_items():
        if name in ("image", "image[]", "mask"):
            if not isinstance(value, UploadFile):
                raise ApiError(
                    400, f"{name} is a text field; send it as a file", code="invalid_image",
                    param=name,
                )  # fmt: skip
            if name != "mask":
                images.append(value)
            elif mask is None:
                mask = value
            else:
                raise _twice(name)
        elif isinstance(value, UploadFile):
            raise ApiError(
                400, f"{name[:100]!r} is a file; files are called image or mask",
                code="unknown_parameter", param=name[:100],
            )  # fmt: skip
        elif name in fields:
            raise _twice(name)
        else:
            fields[name] = value
    return fields, images, mask


def _twice(name: str) -> ApiError:
    return ApiError(400, f"{name[:100]!r} is there twice", code="invalid_value", param=name[:100])


def _decoded(images: list[UploadFile], mask: UploadFile | None, most: int) -> dict[str, Any]:
    found: list[Image.Image] = []
    left = most  # of all together: they are held until the request is with the cluster
    for file in images:
        found.append(opaque(decode(file.file, "image", left)))
        left -= found[-1].width * found[-1].height
    uploads: dict[str, Any] = {"image": found[0] if len(found) == 1 else found}
    if mask is not None:
        uploads["mask"] = mask_of(decode(mask.file, "mask", most))
    return uploads
