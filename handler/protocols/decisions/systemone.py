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
from handler.protocols.decisions.values import Kind, Option, Path, Question, check_name, check_type
from handler.protocols.kernel.body import decode
from handler.protocols.kernel.context import NO_REQUEST, RequestContext, ServerContext
from handler.protocols.kernel.dialect import Description, ParsedRequest
from handler.protocols.kernel.messages import check_taken, read_base64, read_url
from handler.protocols.kernel.parameters import Parameter, Table, request_shape, unsupported
from handler.protocols.kernel.readers import show, string, unread
from handler.protocols.kernel.schema import NULL, TEXT, Shape, listing, nullable, record
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

_QUESTION = record(
    {"type": {"enum": [kind.value for kind in Kind]}},
    {
        "instructions": {"type": ["string", "object", "array", "null"]},
        "criteria": {"type": ["object", "array", "null"]},
    },
)
FIELDS: Mapping[str, Shape] = {
    "state": {"description": "Any JSON value"},
    "questions": {
        "type": "object",
        "minProperties": 1,
        "maxProperties": MAX_QUESTIONS,
        "additionalProperties": _QUESTION,
    },
    "images": {"anyOf": [listing({"anyOf": [TEXT, record({"url": TEXT})]}), NULL]},
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
        images, assets = _read_images(body.get("images"), context, unknown), _read_assets(body.get("assets"), context)
        state, shown = _take_images(body["state"], context)
        return State("state", text_of(state), images + shown, assets, body.get("instructions") or "")

    def read_questions(
        self, body: Mapping[str, Any], context: ServerContext, unknown: dict[str, None]
    ) -> list[Question]:
        path, questions = Path(("questions",)), body.get("questions")
        must = "must be an object that maps the id of each question to the question"
        if "questions" not in body:
            raise path.missing(f"it {must}")
        if not isinstance(questions, dict):
            raise path.refused(must)
        if not questions:
            raise path.refused("must have at least one question")
        if len(questions) > MAX_QUESTIONS:
            raise path.refused(f"has {len(questions)} questions; the maximum is {MAX_QUESTIONS}")
        return [_read_question(question, id, path.at(id)) for id, question in questions.items()]

    def respond(self, requests: Sequence[Request], questions: Sequence[Question], model: str) -> ParsedRequest:
        head = OpenAiHead(*identity("decision"), model)
        reply = DecisionReply(questions, functools.partial(_render, head, questions))
        return ParsedRequest(requests, reply, self.errors, headers=lambda timing: ((REQUEST_ID, head.id),))


# -- questions ---------------------------------------------------------------------------------------------------------


def _read_question(value: Any, id: str, path: Path) -> Question:
    if not id.strip():
        raise path.refused("the id of a question must not be blank")
    if not isinstance(value, dict):
        raise path.refused("must be an object with 'type'")
    fields = ("type", "instructions", "criteria")
    path.only(value, fields, "is not a field of a question; use type, instructions and criteria")
    instructions, criteria = value.get("instructions"), value.get("criteria")
    if isinstance(instructions, int | float):
        raise path.at("instructions").refused("must be a string, an object, a list or null")
    text = "" if instructions is None else text_of(instructions)
    reason = "only vision models of TypeSafe return boxes" if value.get("type") == "box" else ""
    read = _READERS[check_type(value, _READERS, path, reason=reason)]
    return read(path, text if text.strip() else "", criteria)._replace(name=id)


def _read_noul(path: Path, instructions: str, criteria: Any) -> Question:
    if criteria is not None and not isinstance(criteria, dict):
        raise path.at("criteria").refused("must be an object with 'true' and 'false', or null")
    sent = criteria or {}
    names = ("true", "false")
    path.at("criteria").only(sent, names, "is not a criterion; use true and false")
    texts = ["" if sent.get(name) is None else text_of(sent[name]) for name in names]
    if not instructions and not any(map(str.strip, texts)):
        raise path.refused("needs instructions or criteria")
    return Question(path, None, Kind.NOUL, instructions, tuple(Option("", text) for text in texts))


def _read_choice(path: Path, instructions: str, criteria: Any) -> Question:
    at = path.at("criteria")
    if not isinstance(criteria, dict) or not criteria:
        raise at.refused("must be an object that maps the name of each option to its description or null")
    if len(criteria) > MAX_OPTIONS:
        raise at.refused(f"has {len(criteria)} options; the maximum is {MAX_OPTIONS}")
    names: dict[str, str] = {}
    for name in criteria:
        check_name(name, at.at(name))
        if (other := names.setdefault(name.strip(), name)) != name:
            raise at.at(name).refused(f"is the same option as {show(other)}")
    options = (
        Option(name, "" if description is None else text_of(description)) for name, description in criteria.items()
    )
    return Question(path, None, Kind.CHOICE, instructions, tuple(options), values=tuple(criteria))


def _read_score(path: Path, instructions: str, criteria: Any) -> Question:
    at = path.at("criteria")
    if not isinstance(criteria, list) or not criteria:
        raise at.refused("must be a list of levels, from the lowest to the highest")
    if len(criteria) > MAX_LEVELS:
        raise at.refused(f"has {len(criteria)} levels; the maximum is {MAX_LEVELS}")
    for index, level in enumerate(criteria):
        if not isinstance(level, str | dict | list) or not text_of(level).strip():
            raise at.at(index).refused("must be a non-empty string, an object or a list")
    options = tuple(Option(text_of(level)) for level in criteria)
    return Question(path, None, Kind.SCORE, instructions, options, values=tuple(criteria))


_READERS = {"noul": _read_noul, "choice": _read_choice, "score": _read_score}


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


def _read_images(value: Any, context: ServerContext, unknown: dict[str, None]) -> tuple[MediaSource, ...]:
    """Read `images`, which precede the state in each prompt, as in vLLM, SGLang and llama.cpp.

    Args:
        unknown: receives the paths of names that have no effect.
    """
    path = Path(("images",))
    if value is None:
        return ()
    if not isinstance(value, list):
        raise path.refused("must be a list of URLs")
    if value:
        check_taken("image", "image", "images", context)
    for item in value:
        unknown.update(unread(item, "images[]", ("url", "detail")))
    urls = [item.get("url") if isinstance(item, dict) else item for item in value]
    return tuple(read_url("image", url, str(path.at(index))) for index, url in enumerate(urls))


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
