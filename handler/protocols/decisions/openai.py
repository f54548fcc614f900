"""OpenAI's /v1/decisions.

Sources: openai 3.57, types/decision_create_params.py and types/decision.py; vllm/entrypoints/openai/decisions (0.33).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from handler.core.media import MediaSource
from handler.core.values import Request
from handler.protocols.decisions.api import (
    ChoiceDecision,
    DecisionUsage,
    OpenAiDecision,
    OpenAiDecisions,
    PredicateDecision,
    ScoreDecision,
    label_diagnostics,
)
from handler.protocols.decisions.dialect import TABLE, Counts, DecisionDialect, DecisionReply
from handler.protocols.decisions.formulas import Reading
from handler.protocols.decisions.requests import State, text_of
from handler.protocols.decisions.values import Kind, Option, Path, Question, check_name, check_type
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.dialect import Description, ParsedRequest
from handler.protocols.kernel.messages import check_taken, read_url
from handler.protocols.kernel.parameters import Parameter, Table, request_shape
from handler.protocols.kernel.readers import only, show, string, unread
from handler.protocols.kernel.schema import FLAG, TEXT, Shape, accepts, listing, nullable, record
from handler.protocols.openai.api import OpenAiError
from handler.protocols.openai.request import MODEL

MAX_QUESTIONS = 400
MAX_ITEMS = 1 << 17
MAX_PARTS = 1 << 14
"""Maximum number of items in `input`, and of parts in a message, as in vLLM."""

CHOICES = (2, 255)
LEVELS = (2, 10)
"""Minimum and maximum number of choices, and of levels."""

MAX_DATA_LEVELS, MAX_DATA_VALUES, MAX_DATA_BYTES = 32, 10_000, 1 << 18
"""OpenAI's limits for the data of an `input_json`."""

_MAX_IDENTIFIER = 128  # characters


@accepts(type="object", properties={"mode": {"enum": ["implicit", "explicit", None]}, "ttl": {"const": "30m"}})
def _prompt_cache_options(value: Any) -> None:
    """Read OpenAI's options of the prompt cache. They have no effect, because the engine decides what it caches."""
    if not isinstance(value, dict):
        raise ValueError("must be an object with 'mode', 'ttl' or both")
    only(value, "mode", "ttl")
    if value.get("mode") not in (None, "implicit", "explicit"):
        raise ValueError("'mode' must be implicit or explicit")
    if value.get("ttl") not in (None, "30m"):
        raise ValueError("'ttl' must be 30m")


@accepts(type="string", maxLength=_MAX_IDENTIFIER)
def _identifier(value: Any) -> None:
    if len(string(value)) > _MAX_IDENTIFIER:
        raise ValueError(f"must have at most {_MAX_IDENTIFIER} characters")


_TABLE = Table(
    {
        **TABLE.parameters,
        "prompt_cache_key": Parameter("", string),
        "prompt_cache_options": Parameter("", _prompt_cache_options),
        "safety_identifier": Parameter("", _identifier),
    }
)
_NO_EFFECT = frozenset({"prompt_cache_key", "prompt_cache_options", "safety_identifier", "user", "metadata"})

# -- parts of messages and of questions --------------------------------------------------------------------------------


_TEXT_PARTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Maps the type of a part to the field that contains its text."""

_JSON, _IMAGE = "input_json", "input_image"
_FIELDS = {**_TEXT_PARTS, _JSON: "data", _IMAGE: "image_url"}
_DETAILS = ("low", "high", "auto", "original", None)
_BESIDE = ("prompt_cache_breakpoint", "annotations", "logprobs")
"""Known fields of parts that have no effect."""

_INPUT = ("input_text", _IMAGE, _JSON)
_ROLES: Mapping[str, Collection[str]] = {
    "user": _INPUT,
    "developer": ("input_text",),
    "system": ("input_text",),
    "assistant": ("output_text", "refusal"),
}
"""Maps a role to the types of parts in its messages."""

_OUTPUT = ("input_text", _IMAGE)


class DecisionPartReader(NamedTuple):
    """Reads the parts of messages, outputs and questions.

    Attributes:
        unknown: collects the paths of names that have no effect.
    """

    context: ServerContext
    unknown: dict[str, None]

    def read(self, value: Any, path: Path, kinds: Collection[str], media: list[MediaSource]) -> str:
        """Return the text of a string or of parts, which are joined with newlines.

        Args:
            kinds: the types of parts that are allowed.
            media: receives the images.

        Raises:
            InvalidField: a part is invalid.
        """
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise path.refused("must be a string or a list of parts")
        if len(value) > MAX_PARTS:
            raise path.refused(f"has {len(value)} parts; the maximum is {MAX_PARTS}")
        texts = [self._part(part, path.at(index), kinds, media) for index, part in enumerate(value)]
        return "\n".join([text for text in texts if text is not None])

    def _part(self, part: Any, path: Path, kinds: Collection[str], media: list[MediaSource]) -> str | None:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in kinds:
            prefix = "" if kind is None else f"{show(kind)} is not supported here: "
            raise path.refused(f"{prefix}the type must be {' or '.join(kinds)}")
        field = _FIELDS[kind]
        at, value = path.at(field), part.get(field)
        if kind == _IMAGE:
            media.append(self._image(part, path))
            return None
        self.unknown.update(unread(part, "input[].content[]", ("type", field, *_BESIDE)))
        if kind == _JSON:
            return _data_text(value, at)
        if not isinstance(value, str):
            raise at.refused("must be a string")
        return value

    def _image(self, part: Mapping[str, Any], path: Path) -> MediaSource:
        check_taken("image", _IMAGE, str(path), self.context)
        if part.get("file_id") is not None:
            raise path.at("file_id").refused("is not supported: files are not stored; send image_url")
        if part.get("detail") not in _DETAILS:
            raise path.at("detail").refused("must be low, high, auto or original")
        self.unknown.update(unread(part, "input[].content[]", ("type", "image_url", "detail", "file_id", *_BESIDE)))
        return read_url("image", part.get("image_url"), str(path.at("image_url")))


def _data_text(value: Any, path: Path) -> str:
    """Return the text of the data of an `input_json`."""
    is_list = isinstance(value, list) and all(isinstance(item, dict) for item in value)
    if not isinstance(value, dict) and not is_list:
        raise path.refused("must be an object or a list of objects")
    num_values, level = 0, [value]
    for _ in range(MAX_DATA_LEVELS):
        members = [item for parent in level for item in (parent.values() if isinstance(parent, dict) else parent)]
        num_values += len(members)
        level = [item for item in members if isinstance(item, dict | list)]
    if level:
        raise path.refused(f"has more than {MAX_DATA_LEVELS} levels")
    if num_values > MAX_DATA_VALUES:
        raise path.refused(f"has {num_values} values; the maximum is {MAX_DATA_VALUES}")
    text = text_of(value)
    if len(text.encode()) > MAX_DATA_BYTES:
        raise path.refused(f"has more than {MAX_DATA_BYTES} bytes")
    return text


# -- `input`: a conversation that the questions are about, as one text ------------------------------------------------


_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
"""Maps the type of a call to the field that contains its arguments."""

_ITEM_FIELDS: Mapping[str, Collection[str]] = {
    "message": ("type", "role", "content", "id", "status", "phase"),
    **{
        call: ("type", "id", "call_id", "name", "namespace", field, "status", "caller")
        for call, field in _CALLS.items()
    },
    **{f"{call}_output": ("type", "id", "call_id", "output", "status", "caller") for call in _CALLS},
}
_PHASES = (None, "commentary", "final_answer")


class DecisionInputReader:
    """Reads `input`, and converts it to text.

    Attributes:
        blocks: the text of each item, with what it is: the role of a message, or the type of an item with the name of
            the tool.
        media: the images.
    """

    def __init__(self, parts: DecisionPartReader) -> None:
        self._parts = parts
        self._calls: dict[tuple[str, str], str] = {}  # maps the type and the id of a call to the name of its tool
        self.blocks: list[tuple[str, str]] = []
        self.media: list[MediaSource] = []

    def read(self, value: Any) -> str:
        """Return the text of `input`.

        If all items are user messages, it contains only their texts. Otherwise each text follows the role of the
        message, or the type of the item and the name of the tool.

        Raises:
            InvalidField: an item is invalid.
        """
        path = Path(("input",))
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise path.refused("must be a string or a list of items")
        if len(value) > MAX_ITEMS:
            raise path.refused(f"has {len(value)} items; the maximum is {MAX_ITEMS}")
        for index, item in enumerate(value):
            self.blocks.append(self._item(item, path.at(index)))
        names = {name for name, _ in self.blocks} - {"user"}
        return "\n\n".join([f"{name}: {text}" if names else text for name, text in self.blocks])

    def _item(self, item: Any, path: Path) -> tuple[str, str]:
        if not isinstance(item, dict):
            raise path.refused("must be an object with 'role' and 'content', or with 'type'")
        kind = "message" if item.get("type") is None else item["type"]
        if not isinstance(kind, str) or kind not in _ITEM_FIELDS:
            raise path.at("type").refused(f"{show(kind)} is not supported: must be {' or '.join(_ITEM_FIELDS)}")
        self._parts.unknown.update(unread(item, "input[]", _ITEM_FIELDS[kind]))
        if kind == "message":
            return self._message(item, path)
        return self._call(kind, item, path) if kind in _CALLS else self._output(kind, item, path)

    def _message(self, item: Mapping[str, Any], path: Path) -> tuple[str, str]:
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise path.at("role").refused(f"must be {' or '.join(_ROLES)}")
        if item.get("phase") not in (_PHASES if role == "assistant" else (None,)):
            raise path.at("phase").refused("must be commentary or final_answer, and only in messages of the assistant")
        return role, self._parts.read(item.get("content"), path.at("content"), _ROLES[role], self.media)

    def _call(self, kind: str, item: Mapping[str, Any], path: Path) -> tuple[str, str]:
        field = _CALLS[kind]
        id, name, text = (_string(item, name, path) for name in ("call_id", "name", field))
        if item.get("namespace"):
            name = f"{_string(item, 'namespace', path)}.{name}"
        self._calls[kind, id] = name
        return f"{kind} {name}", text

    def _output(self, kind: str, item: Mapping[str, Any], path: Path) -> tuple[str, str]:
        id, call = _string(item, "call_id", path), kind.removesuffix("_output")
        if (call, id) not in self._calls:
            raise path.at("call_id").refused(f"no earlier {call} has the id {show(id)}")
        text = self._parts.read(item.get("output"), path.at("output"), _OUTPUT, self.media)
        return f"{kind} {self._calls[call, id]}", text


def _string(item: Mapping[str, Any], name: str, path: Path) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise path.at(name).refused("must be a string")
    return value


# -- `questions` -------------------------------------------------------------------------------------------------------


_TYPES: Mapping[str, tuple[str, ...]] = {"predicate": (), "choice": ("choices",), "score": ("levels",)}
"""Maps the type of a question to the fields that only this type has."""

_FALSE_TRUE = (Option("false"), Option("true"))
"""The options of a predicate. As in vLLM, letters label the options of all types of questions."""


class QuestionReader(NamedTuple):
    """Reads the questions of one request."""

    parts: DecisionPartReader

    def read(self, value: Any) -> list[Question]:
        """Read the questions in their order.

        Raises:
            InvalidField: a question is invalid.
        """
        path = Path(("questions",))
        if not isinstance(value, list) or not value:
            raise path.refused("must be a non-empty list of questions")
        if len(value) > MAX_QUESTIONS:
            raise path.refused(f"has {len(value)} questions; the maximum is {MAX_QUESTIONS}")
        questions = [self._question(item, path.at(index)) for index, item in enumerate(value)]
        indices: dict[str, int] = {}
        for index, item in enumerate(value):
            if (name := item.get("name")) is not None and indices.setdefault(name, index) != index:
                raise path.at(index, "name").refused(f"is also the name of questions[{indices[name]}]")
        return questions

    def _question(self, item: Any, path: Path) -> Question:
        if not isinstance(item, dict):
            raise path.refused("must be an object with 'type' and 'instructions'")
        kind = check_type(item, _TYPES, path)
        fields = ["type", "name", "instructions", *_TYPES[kind]]
        reason = f"is not a field of the question type {kind}; use {', '.join(fields[:-1])} and {fields[-1]}"
        path.only(item, fields, reason)
        if item.get("name") is not None and not _string(item, "name", path).strip():
            raise path.at("name").refused("must not be blank")
        media: list[MediaSource] = []
        text = self.parts.read(item.get("instructions"), path.at("instructions"), _INPUT, media)
        text = text if text.strip() else ""
        question = Question(path, item.get("name"), Kind.NOUL, text, _FALSE_TRUE, tuple(media), lettered=True)
        if kind == "predicate":
            if not question.instructions:
                raise path.at("instructions").refused("must not be blank")
            return question
        return _with_choices(question, item) if kind == "choice" else _with_levels(question, item)


def _with_choices(question: Question, item: Mapping[str, Any]) -> Question:
    path = question.path.at("choices")
    choices: Any = item.get("choices")
    values = [_member(choice, "value", path.at(index)) for index, choice in _listed(choices, path, CHOICES)]
    options, seen = [], set[tuple[type, str]]()
    for index, value in enumerate(values):
        at = path.at(index, "value")
        if not isinstance(value, str | bool):
            raise at.refused("must be a string or a boolean")
        if isinstance(value, str):
            check_name(value, at)
        key = type(value), str(value).strip()
        if key in seen:
            raise at.refused(f"{show(value)} is already a choice")
        seen.add(key)
        name = json.dumps(value, ensure_ascii=False)  # true is not "true"
        options.append(Option(name, _description(choices[index], path.at(index))))
    return question._replace(kind=Kind.CHOICE, options=tuple(options), values=tuple(values))


def _with_levels(question: Question, item: Mapping[str, Any]) -> Question:
    path, levels = question.path.at("levels"), item.get("levels")
    options = []
    for index, level in _listed(levels, path, LEVELS):
        at = path.at(index)
        label = _member(level, "label", at)
        if not isinstance(label, str):
            raise at.at("label").refused("must be a string")
        check_name(label, at.at("label"))
        options.append(Option(label, _description(level, at)))
    labels = tuple(option.name for option in options)
    return question._replace(kind=Kind.SCORE, options=tuple(options), values=labels)


def _listed(value: Any, path: Path, limits: tuple[int, int]) -> list[tuple[int, Any]]:
    least, greatest = limits
    if not isinstance(value, list):
        raise path.refused(f"must be a list of {least} to {greatest} objects")
    if not least <= len(value) <= greatest:
        raise path.refused(f"has {len(value)} objects; must be a list of {least} to {greatest} objects")
    return [*enumerate(value)]


def _member(value: Any, name: str, path: Path) -> Any:
    """Return the value that identifies an option, after checking the option's fields."""
    if not isinstance(value, dict) or name not in value:
        raise path.refused(f"must be an object with {name!r}")
    path.only(value, (name, "description"), f"is not a field of an option; use {name} and description")
    return value[name]


def _description(value: Mapping[str, Any], path: Path) -> str:
    return "" if value.get("description") is None else _string(value, "description", path)


# -- the dialect -------------------------------------------------------------------------------------------------------


_PART = record({"type": {"enum": [*_FIELDS]}}, {"text": TEXT, "image_url": TEXT, "data": {}})
_CONTENT: Shape = {"anyOf": [TEXT, listing(_PART, minItems=1)]}
FIELDS: Mapping[str, Shape] = {
    "input": {
        "anyOf": [
            TEXT,
            listing(
                record(
                    {},
                    {
                        "type": {"enum": [*_ITEM_FIELDS, None]},
                        "role": {"enum": [*_ROLES]},
                        "content": _CONTENT,
                        "output": _CONTENT,
                        **dict.fromkeys(("call_id", "name", "arguments", "input"), TEXT),
                    },
                ),
                minItems=1,
            ),
        ]
    },
    "questions": listing(
        record(
            {"type": {"enum": [*_TYPES]}, "instructions": _CONTENT},
            {
                "name": nullable(TEXT),
                "choices": listing(
                    record({"value": {"anyOf": [TEXT, FLAG]}}, {"description": nullable(TEXT)}),
                    minItems=CHOICES[0],
                    maxItems=CHOICES[1],
                ),
                "levels": listing(
                    record({"label": TEXT}, {"description": nullable(TEXT)}), minItems=LEVELS[0], maxItems=LEVELS[1]
                ),
            },
        ),
        minItems=1,
        maxItems=MAX_QUESTIONS,
    ),
    **MODEL,
}


class Decisions(DecisionDialect):
    """The dialect of OpenAI's decisions."""

    name = "openai_decisions"
    needed = "a JSON object with 'input' and 'questions'"
    table = _TABLE
    fields = FIELDS
    harmless = _NO_EFFECT
    description = Description(
        title="OpenAI decisions",
        request="OpenAiDecisionRequest",
        request_shape=request_shape(FIELDS, _TABLE, "input", "questions"),
        error=OpenAiError,
        example={
            "model": "",
            "input": "The package arrived broken.",
            "questions": [{"type": "predicate", "name": "complaint", "instructions": "This is a complaint."}],
        },
        response=OpenAiDecisions,
    )

    def read_state(self, body: Mapping[str, Any], context: ServerContext, unknown: dict[str, None]) -> State:
        if "input" not in body:
            is_systemone = "state" in body
            hint = (
                "send a body with 'state' to /v1/systemone"
                if is_systemone
                else "it must be a string or a list of items"
            )
            raise Path(("input",)).missing(hint)
        reader = DecisionInputReader(DecisionPartReader(context, unknown))
        text = reader.read(body.get("input"))
        return State("input", text, tuple(reader.media))

    def read_questions(
        self, body: Mapping[str, Any], context: ServerContext, unknown: dict[str, None]
    ) -> list[Question]:
        return QuestionReader(DecisionPartReader(context, unknown)).read(body.get("questions"))

    def respond(self, requests: Sequence[Request], questions: Sequence[Question], model: str) -> ParsedRequest:
        reply = DecisionReply(questions, functools.partial(_render, model, questions))
        return ParsedRequest(requests, reply, self.errors)


def _render(model: str, questions: Sequence[Question], readings: Sequence[Reading], counts: Counts) -> OpenAiDecisions:
    usage: DecisionUsage = {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts.prompt,
    }
    return {
        "model": model,
        "answers": [_decision(question, reading) for question, reading in zip(questions, readings, strict=True)],
        "usage": usage,
        "diagnostics": [*map(label_diagnostics, readings)],
    }


def _decision(question: Question, reading: Reading) -> OpenAiDecision:
    name, probabilities, values = question.name, reading.probabilities, question.values
    if question.kind is Kind.NOUL:
        predicate: PredicateDecision = {"type": "predicate", "name": name, "probability": probabilities[1]}
        return predicate
    if question.kind is Kind.CHOICE:
        choice: ChoiceDecision = {
            "type": "choice",
            "name": name,
            "choice": values[reading.best],
            "confidence": reading.choice_confidence,
            "probabilities": [
                {"value": value, "probability": probability}
                for value, probability in zip(values, probabilities, strict=True)
            ],
        }
        return choice
    score: ScoreDecision = {
        "type": "score",
        "name": name,
        "score": reading.score,
        "confidence": reading.score_confidence,
        "probabilities": [
            {"value": index, "label": label, "probability": probability}
            for index, (label, probability) in enumerate(zip(values, probabilities, strict=True))
        ],
    }
    return score
