"""Requests and answers of the API, as its OpenAPI page shows them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Number = Annotated[float, Field(allow_inf_nan=False)]
Format = Literal["png", "jpeg", "webp"]
Delivery = Literal["b64_json", "url"]
Quality = Literal["auto", "low", "medium", "high", "xhigh", "max", "standard", "hd"]
SIZE = r"^(auto|[0-9]{1,5}x[0-9]{1,5})$"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Common(_Strict):
    """What generations and edits have in common. Fields that may be null mean their default then."""

    prompt: str = Field(min_length=1, max_length=32_000, description="What the picture shows.")
    model: str | None = Field(None, max_length=200, description="By default the first model.")
    n: int | None = Field(1, ge=1, le=10, description="Images; image i has the seed `seed + i`.")
    size: str | None = Field("auto", pattern=SIZE, description="WIDTHxHEIGHT in pixels, or auto.")
    quality: Quality | None = Field("auto", description="Taken and not used: steps decide.")
    output_format: Format | None = "png"
    output_compression: int | None = Field(
        None, ge=0, le=100, description="Quality of jpeg and webp, percent; by default 100."
    )
    response_format: Delivery | None = Field(
        "b64_json",
        description="url: a path here that nobody can guess, for a limited time; not with stream.",
    )
    background: Literal["auto", "opaque"] | None = Field("auto", description="Always opaque.")
    stream: bool | None = False
    partial_images: int | None = Field(
        0,
        ge=0,
        le=3,
        description="Previews, of latents between the steps: fewer where there are fewer steps; with "
        "stream, n=1.",
    )
    user: str | None = Field(None, max_length=512, description="Taken and not used.")
    safety_identifier: str | None = Field(None, max_length=512, description="Taken and not used.")
    seed: int | None = Field(
        None, ge=-(2**63), le=2**64 - 1, description="By default a random one; the answer has it."
    )
    num_inference_steps: int | None = Field(None, ge=1, le=1000)
    guidance_scale: Number | None = None
    true_cfg_scale: Number | None = None
    negative_prompt: str | None = Field(None, max_length=32_000)
    lora: Any = Field(
        None,
        description="Adapters that the operator has named: a name, an object with name and scale, "
        "or a list of these.",
    )
    detach: bool | None = Field(
        False,
        description="Answer at once with the request's id, and go on when the client leaves; "
        "GET /v1/requests/{id} has the images.",
    )


class GenerationRequest(_Common):
    """POST /v1/images/generations."""

    moderation: Literal["auto", "low"] | None = Field("auto", description="Taken and not used.")
    style: Literal["vivid", "natural"] | None = Field(None, description="Taken and not used.")
    parameters: dict[str, Any] | None = Field(
        None, description="Other parameters of the workflow, by name."
    )


def _of_text(value: Any) -> Any:
    """Form fields are text: JSON numbers and booleans in it, and empty for null."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text in ("", "null"):
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text) if len(text) < 40 else value
        except ValueError:
            continue
    return value


_Int = Annotated[int | None, BeforeValidator(_of_text)]
_Float = Annotated[Number | None, BeforeValidator(lambda v: _as_float(_of_text(v)))]
_Bool = Annotated[bool | None, BeforeValidator(_of_text)]


def _as_float(value: Any) -> Any:
    return float(value) if type(value) is int else value


class EditRequest(_Common):
    """The fields of POST /v1/images/edits beside its files."""

    n: _Int = Field(1, ge=1, le=10)
    output_compression: _Int = Field(None, ge=0, le=100)
    partial_images: _Int = Field(0, ge=0, le=3)
    seed: _Int = Field(None, ge=-(2**63), le=2**64 - 1)
    num_inference_steps: _Int = Field(None, ge=1, le=1000)
    guidance_scale: _Float = None
    true_cfg_scale: _Float = None
    stream: _Bool = False
    detach: _Bool = False
    input_fidelity: Literal["high", "low"] | None = Field(None, description="Taken and not used.")
    moderation: Literal["auto", "low"] | None = Field("auto", description="Taken and not used.")
    strength: _Float = None
    parameters: str | None = Field(
        None, max_length=10_000, description="Other parameters of the workflow: a JSON object."
    )


class WorkflowRequest(_Strict):
    """POST /v1/workflows."""

    id: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,99}$", description="The model's name from now on."
    )
    source: str = Field(
        min_length=1,
        max_length=500,
        description="A packaged model, or a path below the server's workflow root: a Diffusers "
        "folder, or FILE.py:WORKFLOW.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = None


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Every answer that is not 2xx."""

    error: ErrorBody


class TokenDetails(BaseModel):
    text_tokens: int = 0
    image_tokens: int = 0


class Usage(BaseModel):
    """Zeros: tokens are not what is counted here. The SDKs want the fields."""

    input_tokens: int = 0
    input_tokens_details: TokenDetails = TokenDetails()
    output_tokens: int = 0
    total_tokens: int = 0


class ImageAnswer(BaseModel):
    """One image. seed: what it was drawn with; None where the workflow takes none."""

    b64_json: str | None = None
    url: str | None = None
    revised_prompt: str | None = None
    seed: int | None = None


class ImagesAnswer(BaseModel):
    """The result. id: of the request, for GET /v1/requests/{id}."""

    id: str
    created: int
    model: str
    background: str = "opaque"
    output_format: Format
    quality: str
    size: str
    data: list[ImageAnswer]
    usage: Usage = Usage()


class Progress(BaseModel):
    """Model calls, of all images of the request."""

    done: int
    total: int


class RequestAnswer(BaseModel):
    """Where a request stands.

    queue_position: of requests that have not started, from 1, as fair shares have it now.
    estimated_wait_s: about how many seconds until the result.
    """

    id: str
    object: Literal["image.request"] = "image.request"
    status: Literal["queued", "running", "completed", "failed", "cancelled"]
    model: str
    n: int
    created: int
    queue_position: int | None = None
    estimated_wait_s: float | None = None
    progress: Progress
    result: ImagesAnswer | None = None
    error: ErrorBody | None = None


class RequestList(BaseModel):
    object: Literal["list"] = "list"
    data: list[RequestAnswer]


class ParameterAnswer(BaseModel):
    name: str
    kind: str
    about: str


class ModelAnswer(BaseModel):
    """One model. parameters: what its workflow takes."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "st2i"
    workflow: str
    parameters: list[ParameterAnswer]


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelAnswer]


class Health(BaseModel):
    status: Literal["ok", "reconnecting"]
    open_images: int
