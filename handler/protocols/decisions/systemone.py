"""System One, TypeSafe's API for decisions, with the additions of vLLM.

Sources: typesafe-sdk 0.7.5, _schemas/models.py; vllm/entrypoints/generate/structured_decisions (0.33);
sglang/srt/entrypoints/openai/systemone (0.5.23).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from handler.core.errors import NotJson
from handler.core.framing import decoded_as_json
from handler.core.media import MediaSource, Upload
from handler.core.values import Adapter, Request
from handler.protocols.decisions.api import (
    REQUEST_ID,
    SYSTEMONE_ERRORS,
    ChoiceResult,
    NoulResult,
    ScoreResult,
    SystemOneError,
    SystemOneResponse,
    SystemOneResult,
    label_diagnostics,
)
from handler.protocols.decisions.dialect import TABLE, Counts, DecisionDialect, DecisionReply
from handler.protocols.decisions.formulas import Reading
from handler.protocols.decisions.requests import State, text_of
from handler.protocols.decisions.values import Kind, Option, Question, option_name
from handler.protocols.kernel.body import decode
from handler.protocols.kernel.context import NO_REQUEST, RequestContext, ServerContext
from handler.protocols.kernel.dialect import Description, ParsedRequest
from handler.protocols.kernel.messages import check_taken, read_base64, read_url
from handler.protocols.kernel.objects import (
    Declaration,
    Leaf,
    ListOf,
    MapOf,
    Obj,
    Optional,
    Placed,
    Scope,
    Variant,
    leaf,
)
from handler.protocols.kernel.parameters import Parameter, Table, request_shape, unsupported
from handler.protocols.kernel.path import Path
from handler.protocols.kernel.readers import show, string, unread
from handler.protocols.kernel.schema import NULL, TEXT, Shape, nullable, record
from handler.protocols.openai.request import MODEL, OpenAiHead, identity

MAX_QUESTIONS = 64
MAX_OPTIONS = 255
MAX_LEVELS = 10

_ALIASES = ("jev-latest", "strands-decider-latest")
"""The models that typesafe-sdk and Strands name by default. They are read as the server's model."""

_FORM = "request"  # the part of a form that contains the JSON document
_MAX_DOCUMENT = 1 << 20
"""Maximum size of this document, in bytes: it is decoded without the limits on memory and time of large JSON bodies."""

_TABLE = Table(
    {
        **TABLE.parameters,
        "instructions": Parameter("instructions", string),
        "joint": unsupported("the model reads each question on its own", False),
        "videos": unsupported("the engines read images only", []),
        "audio": unsupported("the engines read images only", []),
        "return_prompt_token_ids": unsupported("send the messages to /tokenize to see a prompt", False),
    }
)

_TEXT = Leaf(lambda value: "" if value is None else text_of(value), {})


def _read_instructions(value: Any) -> str:
    if isinstance(value, int | float):
        raise ValueError("must be a string, an object, a list or null")
    text = "" if value is None else text_of(value)
    return text if text.strip() else ""


def _read_id(value: str) -> None:
    if not value.strip():
        raise ValueError("the id of a question must not be blank")


def _read_level(value: Any) -> Any:
    if not isinstance(value, str | dict | list) or not text_of(value).strip():
        raise ValueError("must be a non-empty string, an object or a list")
    return value


_CRITERIA: Mapping[str, Declaration] = {
    "noul": Optional(
        Obj(
            {"true": _TEXT, "false": _TEXT},
            "must be an object with 'true' and 'false', or null",
            "is not a criterion; use true and false",
        )
    ),
    "choice": MapOf(
        _TEXT,
        "options",
        MAX_OPTIONS,
        "must be an object that maps the name of each option to its description or null",
        option_name,
    ),
    "score": ListOf(leaf(_read_level, type=["string", "object", "array"]), "levels", MAX_LEVELS, 1),
}
_INSTRUCTIONS = leaf(_read_instructions, type=["string", "object", "array", "null"])

QUESTIONS = MapOf(
    Variant(
        "type",
        {
            kind: Obj(
                {"instructions": _INSTRUCTIONS, "criteria": criteria},
                extra="is not a field of a question; use type, instructions and criteria",
            )
            for kind, criteria in _CRITERIA.items()
        },
        "must be an object with 'type'",
        refused={"box": "only vision models of TypeSafe return boxes"},
    ),
    "questions",
    MAX_QUESTIONS,
    "must be an object that maps the id of each question to the question",
    _read_id,
    "must have at least one question",
)


def _read_image(value: Any, at: Path, scope: Scope) -> MediaSource:
    check_taken("image", "image", "images", scope.context)
    scope.unknown.update(unread(value, at.general, ("url", "detail")))
    return read_url("image", value.get("url") if isinstance(value, dict) else value, str(at))


IMAGES = ListOf(Placed(_read_image, {"anyOf": [TEXT, record({"url": TEXT})]}), "URLs")
"""The images before the state in each prompt, as in vLLM, SGLang and llama.cpp."""

FIELDS: Mapping[str, Shape] = {
    "state": {"description": "Any JSON value"},
    "questions": QUESTIONS.shape,
    "images": {"anyOf": [IMAGES.shape, NULL]},
    "assets": nullable(
        {
            "type": "object",
            "minProperties": 1,
            "additionalProperties": record({"type": {"const": "image"}}, {"format": TEXT, "data_base64": TEXT}),
        }
    ),
    **MODEL,
}


class SystemOneDialect(DecisionDialect):
    """The dialect of System One."""

    name = "systemone"
    errors = SYSTEMONE_ERRORS
    forms = "with the JSON document as the part 'request'"
    response_headers = (REQUEST_ID,)
    needed = "a JSON object with 'state' and 'questions'"
    table = _TABLE
    fields = FIELDS
    description = Description(
        title="System One",
        request="SystemOneRequest",
        request_shape=request_shape(FIELDS, _TABLE, "state", "questions"),
        error=SystemOneError,
        example={
            "state": "The package arrived broken.",
            "questions": {"complaint": {"type": "noul", "instructions": "Is this a complaint?"}},
        },
        response=SystemOneResponse,
        form=record(
            {_FORM: {**TEXT, "description": "The JSON document, whose assets name the parts with their images"}},
            additionalProperties={"type": "string", "format": "binary"},
        ),
    )

    def parse(self, body: Any, context: ServerContext, request_context: RequestContext = NO_REQUEST) -> ParsedRequest:
        if not isinstance(body, dict):
            raise Path().refused(f"the body must be {self.needed}")
        if isinstance(body.get(_FORM), str | Upload) and "questions" not in body:
            body = _document_of(body)
        return super().parse(body, context, request_context)

    def read_model(
        self, body: Mapping[str, Any], context: ServerContext, request_context: RequestContext
    ) -> tuple[str, Adapter | None]:
        if body.get("model") in _ALIASES and body["model"] not in context.model_names:
            body = {**body, "model": None}
        return super().read_model(body, context, request_context)

    def read_state(self, body: Mapping[str, Any], context: ServerContext, unknown: dict[str, None]) -> State:
        if "state" not in body:
            hint = "send a body with 'input' to /v1/decisions" if "input" in body else "it may be any JSON value"
            raise Path(("state",)).missing(hint)
        images = Optional(IMAGES, ()).read(body.get("images"), Path(("images",)), Scope(context, unknown))
        assets = _read_assets(body.get("assets"), context)
        state, shown = _take_images(body["state"], context)
        return State("state", text_of(state), (*images, *shown), assets, body.get("instructions") or "")

    def read_questions(
        self, body: Mapping[str, Any], context: ServerContext, unknown: dict[str, None]
    ) -> list[Question]:
        path = Path(("questions",))
        if "questions" not in body:
            raise path.missing(f"it {QUESTIONS.must}")
        questions = QUESTIONS.read(body["questions"], path, Scope(context, unknown))
        return [_question(item, path.at(id))._replace(name=id) for id, item in questions.items()]

    def respond(self, requests: Sequence[Request], questions: Sequence[Question], model: str) -> ParsedRequest:
        head = OpenAiHead(*identity("decision"), model)
        reply = DecisionReply(questions, functools.partial(_render, head, questions))
        return ParsedRequest(requests, reply, self.errors, headers=lambda timing: ((REQUEST_ID, head.id),))


# -- questions ---------------------------------------------------------------------------------------------------------


def _question(item: Mapping[str, Any], path: Path) -> Question:
    """Return a question.

    Raises:
        InvalidField: it asks nothing, or two options are the same.
    """
    instructions, criteria = item["instructions"], item["criteria"]
    if item["type"] == "noul":
        texts = (criteria or {}).values()
        if not instructions and not any(map(str.strip, texts)):
            raise path.refused("needs instructions or criteria")
        return Question(path, None, Kind.NOUL, instructions, tuple(Option("", text) for text in texts or ("", "")))
    if item["type"] == "score":
        options = tuple(Option(text_of(level)) for level in criteria)
        return Question(path, None, Kind.SCORE, instructions, options, values=tuple(criteria))
    names: dict[str, str] = {}
    for name in criteria:
        if (other := names.setdefault(name.strip(), name)) != name:
            raise path.at("criteria", name).refused(f"is the same option as {show(other)}")
    options = tuple(Option(name, text) for name, text in criteria.items())
    return Question(path, None, Kind.CHOICE, instructions, options, values=tuple(criteria))


# -- images ------------------------------------------------------------------------------------------------------------


def _document_of(form: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON document of a form. The data of its images replace the names of their parts.

    Raises:
        InvalidField: a part is missing or not used, or the document is invalid.
    """
    request = form[_FORM]
    data = request.data if isinstance(request, Upload) else request.encode()
    if len(data) > _MAX_DOCUMENT:
        raise Path((_FORM,)).refused(
            f"the document of a form has more than {_MAX_DOCUMENT} bytes; send it as application/json, with data_base64"
        )
    try:
        document = decode(data)
    except NotJson as error:
        raise Path((_FORM,)).refused(error.message) from None
    if not isinstance(document, dict):
        raise Path((_FORM,)).refused("must be a JSON object with 'state' and 'questions'")
    unused = form.keys() - {_FORM}
    assets = document.get("assets")
    for name, asset in assets.items() if isinstance(assets, dict) else ():
        if isinstance(asset, dict) and (part := asset.get("part")) is not None:
            upload = form.get(part) if isinstance(part, str) else None
            if not isinstance(upload, Upload) or part not in unused:
                raise Path(("assets", name, "part")).refused(
                    f"{show(part)} is not a file of the form, or is used twice"
                )
            unused -= {part}
            asset["part"] = upload
    if unused:
        raise Path((min(unused),)).refused("is not the part of an asset")
    return document


def _read_assets(value: Any, context: ServerContext) -> dict[str, MediaSource]:
    """Return the image that replaces each placeholder in a text."""
    path = Path(("assets",))
    if value is None:
        return {}
    if not isinstance(value, dict) or not value:
        raise path.refused("must be an object that maps placeholders to images")
    return {name: _read_asset(asset, path.at(name), context) for name, asset in value.items()}


def _read_asset(value: Any, path: Path, context: ServerContext) -> MediaSource:
    if not isinstance(value, dict) or value.get("type") != "image":
        raise path.refused("must be an object with the type image")
    if not str(path.keys[-1]).strip():
        raise path.refused("the placeholder of an image must not be blank")
    fields = ("type", "format", "data_base64", "part")
    path.only(value, fields, "is not a field of an asset; use type, format and data_base64")
    check_taken("image", "image", str(path), context)
    if value.get("format") not in (None, "png", "jpg", "jpeg"):
        raise path.at("format").refused("must be png, jpg or jpeg")
    part, data = value.get("part"), value.get("data_base64")
    if (part is None) == (data is None):
        raise path.refused("must have either data_base64 or part")
    if part is None:
        return read_base64("image", data, str(path.at("data_base64")))
    if not isinstance(part, Upload):
        raise path.at("part").refused("names a part of a form, but the body is not multipart/form-data")
    if not part.data:
        raise path.at("part").refused("the file is empty")
    return MediaSource("image", part.data, "", str(path.at("part")))


def _take_images(state: Any, context: ServerContext) -> tuple[Any, tuple[MediaSource, ...]]:
    """Return a state without the images of its messages, and these images, as llama.cpp does.

    A state has messages if it is a list of chat messages, or an object with the list `messages`. An image is a part
    with the type `image_url` and a data URL. Other URLs stay in the text, as in vLLM and SGLang.

    Source: llama.cpp b11434, tools/server/server-decision.cpp, parse_state.
    """
    path, is_wrapped = Path(("state",)), isinstance(state, dict)
    messages = state.get("messages") if is_wrapped else state
    if not isinstance(messages, list):
        return state, ()
    at = path.at("messages") if is_wrapped else path
    taken = [_take_from_message(message, at.at(index), context) for index, message in enumerate(messages)]
    images = tuple(image for _, media in taken for image in media)
    if not images:
        return state, ()
    rest = [message for message, _ in taken]
    return {**state, "messages": rest} if is_wrapped else rest, images


def _take_from_message(message: Any, path: Path, context: ServerContext) -> tuple[Any, list[MediaSource]]:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message, []
    parts, images = [], []
    for index, part in enumerate(content):
        url = _image_url(part)
        if url is None:
            parts.append(part)
            continue
        name = str(path.at("content", index, "image_url"))
        check_taken("image", "image_url", name, context)
        images.append(read_url("image", url, name))
    return {**message, "content": parts}, images


def _image_url(part: Any) -> str | None:
    """Return the data URL of an image in a message, or None for another part."""
    if not isinstance(part, dict) or part.get("type") != "image_url":
        return None
    value = part.get("image_url")
    url = value.get("url") if isinstance(value, dict) else value
    return url if isinstance(url, str) and url.startswith("data:image/") else None


# -- responses ---------------------------------------------------------------------------------------------------------


def _render(
    head: OpenAiHead, questions: Sequence[Question], readings: Sequence[Reading], counts: Counts
) -> SystemOneResponse:
    names = [question.name or "" for question in questions]
    results = {
        name: _result(question, reading) for name, question, reading in zip(names, questions, readings, strict=True)
    }
    return {
        "id": head.id,
        "object": "structured_decision",
        "created": head.created,
        "model": head.model,
        "answers": results,
        "usage": {"input_tokens": counts.prompt, "output_tokens": 0},
        "diagnostics": dict(zip(names, map(label_diagnostics, readings), strict=True)),
    }


def _result(question: Question, reading: Reading) -> SystemOneResult:
    probabilities, values = reading.probabilities, question.values
    if question.kind is Kind.NOUL:
        noul: NoulResult = {"type": "noul", "noul": probabilities[0]}
        return noul
    if question.kind is Kind.CHOICE:
        choice: ChoiceResult = {
            "type": "choice",
            "choice": values[reading.best],
            "probabilities": dict(zip(values, probabilities, strict=True)),
            "confidence": reading.choice_confidence,
        }
        return choice
    numbers = [str(index) for index in range(len(values))]
    score: ScoreResult = {
        "type": "score",
        "score": reading.score,
        "legend": dict(zip(numbers, map(decoded_as_json, values), strict=True)),
        "probabilities": dict(zip(numbers, probabilities, strict=True)),
        "confidence": reading.score_confidence,
    }
    return score
