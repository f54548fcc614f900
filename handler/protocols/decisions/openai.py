"""OpenAI's /v1/decisions.

Sources: openai 3.57, types/decision_create_params.py and types/decision.py; vllm/entrypoints/openai/decisions (0.33).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

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
from handler.protocols.decisions.values import Kind, Option, Question, option_name
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.dialect import Description, ParsedRequest
from handler.protocols.kernel.messages import check_taken, read_url
from handler.protocols.kernel.objects import (
    IGNORED,
    Declaration,
    ListOf,
    Obj,
    Only,
    Optional,
    Placed,
    Scope,
    TextOr,
    Variant,
    among,
    leaf,
    members,
)
from handler.protocols.kernel.parameters import Parameter, Table, request_shape
from handler.protocols.kernel.path import Path
from handler.protocols.kernel.readers import show, string, string_up_to
from handler.protocols.kernel.schema import FLAG, TEXT, Shape
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


_prompt_cache_options = members(
    "must be an object with 'mode', 'ttl' or both",
    mode=among("implicit", "explicit", None),
    ttl=among("30m", None)._replace(shape={"const": "30m"}),
)
"""Reads OpenAI's options of the prompt cache. They have no effect, because the engine decides what it caches."""


_TABLE = Table(
    {
        **TABLE.parameters,
        "prompt_cache_key": Parameter("", string),
        "prompt_cache_options": Parameter("", _prompt_cache_options),
        "safety_identifier": Parameter("", string_up_to(_MAX_IDENTIFIER)),
    }
)
_NO_EFFECT = frozenset({"prompt_cache_key", "prompt_cache_options", "safety_identifier", "user", "metadata"})

# -- parts of messages and of questions --------------------------------------------------------------------------------


_STRING = leaf(string)
_BESIDE = dict.fromkeys(("prompt_cache_breakpoint", "annotations", "logprobs"), IGNORED)


def _read_image(url: Any, at: Path, scope: Scope) -> MediaSource:
    check_taken("image", "input_image", str(Path(at.keys[:-1])), scope.context)
    return read_url("image", url, str(at))


def _read_data(value: Any) -> str:
    """Return the text of the data of an `input_json`."""
    is_list = isinstance(value, list) and all(isinstance(item, dict) for item in value)
    if not isinstance(value, dict) and not is_list:
        raise ValueError("must be an object or a list of objects")
    num_values, level = 0, [value]
    for _ in range(MAX_DATA_LEVELS):
        members = [item for parent in level for item in (parent.values() if isinstance(parent, dict) else parent)]
        num_values += len(members)
        level = [item for item in members if isinstance(item, dict | list)]
    if level:
        raise ValueError(f"has more than {MAX_DATA_LEVELS} levels")
    if num_values > MAX_DATA_VALUES:
        raise ValueError(f"has {num_values} values; the maximum is {MAX_DATA_VALUES}")
    text = text_of(value)
    if len(text.encode()) > MAX_DATA_BYTES:
        raise ValueError(f"has more than {MAX_DATA_BYTES} bytes")
    return text


_PARTS = {
    "input_text": Obj({"text": _STRING, **_BESIDE}),
    "output_text": Obj({"text": _STRING, **_BESIDE}),
    "refusal": Obj({"refusal": _STRING, **_BESIDE}),
    "input_json": Obj({"data": leaf(_read_data), **_BESIDE}),
    "input_image": Obj(
        {
            "image_url": Placed(_read_image, TEXT),
            "detail": among("low", "high", "auto", "original", None),
            "file_id": Only("is not supported: files are not stored; send image_url"),
            **_BESIDE,
        }
    ),
}


def _content(*kinds: str) -> TextOr:
    parts = Variant("type", {kind: _PARTS[kind] for kind in kinds}, f"the type must be {' or '.join(kinds)}")
    return TextOr(ListOf(parts, "parts", MAX_PARTS))


_INSTRUCTIONS = _content("input_text", "input_image", "input_json")


def _text_in(content: str | Sequence[Mapping[str, Any]], media: list[MediaSource]) -> str:
    """Return the text of a string or of parts, which are joined with newlines. `media` receives the images."""
    if isinstance(content, str):
        return content
    media += [part["image_url"] for part in content if "image_url" in part]
    fields = ("text", "refusal", "data")
    return "\n".join([part[field] for part in content for field in fields if field in part])


# -- `input`: a conversation that the questions are about, as one text ------------------------------------------------


_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
"""Maps the type of a call to the field that contains its arguments."""

_OF_ITEMS = {"id": IGNORED, "status": IGNORED}
_OF_CALLS = {"call_id": _STRING, **_OF_ITEMS, "caller": IGNORED}
_NO_PHASE = Only("must be commentary or final_answer, and only in messages of the assistant")


def _message(*parts: str, phase: Declaration = _NO_PHASE) -> Obj:
    return Obj({"phase": phase, "content": _content(*parts), **_OF_ITEMS})


INPUT = TextOr(
    ListOf(
        Variant(
            "type",
            {
                "message": Variant(
                    "role",
                    {
                        "user": _message("input_text", "input_image", "input_json"),
                        "developer": _message("input_text"),
                        "system": _message("input_text"),
                        "assistant": _message(
                            "output_text", "refusal", phase=among("commentary", "final_answer", None)
                        ),
                    },
                ),
                **{
                    kind: Obj({"name": _STRING, field: _STRING, "namespace": Optional(_STRING), **_OF_CALLS})
                    for kind, field in _CALLS.items()
                },
                **{
                    f"{kind}_output": Obj({"output": _content("input_text", "input_image"), **_OF_CALLS})
                    for kind in _CALLS
                },
            },
            "must be an object with 'role' and 'content', or with 'type'",
            default="message",
        ),
        "items",
        MAX_ITEMS,
    )
)  # fmt: skip


def _blocks(items: Sequence[Mapping[str, Any]], media: list[MediaSource]) -> Iterator[tuple[str, str]]:
    """Yield the text of each item, after the role of a message, or the type of another item with the tool's name.

    Args:
        media: receives the images.

    Raises:
        InvalidField: no earlier call has the id of an output.
    """
    calls: dict[tuple[str, str], str] = {}  # maps the type and the id of a call to the name of its tool
    for index, item in enumerate(items):
        kind = item["type"]
        if kind == "message":
            yield item["role"], _text_in(item["content"], media)
        elif kind in _CALLS:
            name = f"{item['namespace']}.{item['name']}" if item["namespace"] else item["name"]
            calls[kind, item["call_id"]] = name
            yield f"{kind} {name}", item[_CALLS[kind]]
        else:
            call = kind.removesuffix("_output"), item["call_id"]
            if call not in calls:
                at = Path(("input", index, "call_id"))
                raise at.refused(f"no earlier {call[0]} has the id {show(item['call_id'])}")
            yield f"{kind} {calls[call]}", _text_in(item["output"], media)


def _text_of_input(value: str | Sequence[Mapping[str, Any]], media: list[MediaSource]) -> str:
    """Return the text of `input`. If all items are user messages, it contains only their texts."""
    if isinstance(value, str):
        return value
    blocks = [*_blocks(value, media)]
    names = {name for name, _ in blocks} - {"user"}
    return "\n\n".join([f"{name}: {text}" if names else text for name, text in blocks])


# -- `questions` -------------------------------------------------------------------------------------------------------


_DESCRIPTION = Optional(_STRING)


def _read_value(value: Any) -> str | bool:
    if not isinstance(value, str | bool):
        raise ValueError("must be a string or a boolean")
    return option_name(value) if isinstance(value, str) else value


def _option(name: str, reader: Callable[[Any], Any], shape: Shape) -> Obj:
    return Obj(
        {name: leaf(reader, **shape), "description": _DESCRIPTION},
        f"must be an object with {name!r}",
        f"is not a field of an option; use {name} and description",
    )


_OPTION_LISTS: Mapping[str, Mapping[str, Declaration]] = {
    "predicate": {},
    "choice": {
        "choices": ListOf(_option("value", _read_value, {"anyOf": [TEXT, FLAG]}), "objects", CHOICES[1], CHOICES[0])
    },
    "score": {"levels": ListOf(_option("label", option_name, TEXT), "objects", LEVELS[1], LEVELS[0])},
}
"""Maps the type of a question to the fields that only this type has."""


def _read_name(value: Any) -> str:
    if not string(value).strip():
        raise ValueError("must not be blank")
    return str(value)


def _question(kind: str) -> Obj:
    names = ["type", "name", "instructions", *_OPTION_LISTS[kind]]
    return Obj(
        {"name": Optional(leaf(_read_name, **TEXT)), "instructions": _INSTRUCTIONS, **_OPTION_LISTS[kind]},
        extra=f"is not a field of the question type {kind}; use {', '.join(names[:-1])} and {names[-1]}",
    )


QUESTIONS = ListOf(
    Variant(
        "type", {kind: _question(kind) for kind in _OPTION_LISTS}, "must be an object with 'type' and 'instructions'"
    ),
    "questions",
    MAX_QUESTIONS,
    1,
)

_FALSE_TRUE = (Option("false"), Option("true"))
"""The options of a predicate. As in vLLM, letters label the options of all types of questions."""


def _questions(items: Sequence[Mapping[str, Any]]) -> list[Question]:
    """Return the questions in their order.

    Raises:
        InvalidField: two questions have the same name, or two choices the same value, or a predicate is blank.
    """
    indices: dict[str, int] = {}
    for index, item in enumerate(items):
        if (name := item["name"]) is not None and indices.setdefault(name, index) != index:
            raise Path(("questions", index, "name")).refused(f"is also the name of questions[{indices[name]}]")
    return [_question_of(item, Path(("questions", index))) for index, item in enumerate(items)]


def _question_of(item: Mapping[str, Any], path: Path) -> Question:
    media: list[MediaSource] = []
    text = _text_in(item["instructions"], media)
    text = text if text.strip() else ""
    question = Question(path, item["name"], Kind.NOUL, text, _FALSE_TRUE, tuple(media), lettered=True)
    if item["type"] == "choice":
        return _with_choices(question, item["choices"])
    if item["type"] == "score":
        labels = tuple(level["label"] for level in item["levels"])
        options = tuple(Option(level["label"], level["description"] or "") for level in item["levels"])
        return question._replace(kind=Kind.SCORE, options=options, values=labels)
    if not text:
        raise path.at("instructions").refused("must not be blank")
    return question


def _with_choices(question: Question, choices: Sequence[Mapping[str, Any]]) -> Question:
    seen = set[tuple[type, str]]()
    for index, choice in enumerate(choices):
        key = type(choice["value"]), str(choice["value"]).strip()
        if key in seen:
            raise question.path.at("choices", index, "value").refused(f"{show(choice['value'])} is already a choice")
        seen.add(key)
    values = tuple(choice["value"] for choice in choices)
    names = [json.dumps(value, ensure_ascii=False) for value in values]  # true is not "true"
    options = tuple(Option(name, choice["description"] or "") for name, choice in zip(names, choices, strict=True))
    return question._replace(kind=Kind.CHOICE, options=options, values=values)


# -- the dialect -------------------------------------------------------------------------------------------------------


FIELDS: Mapping[str, Shape] = {"input": INPUT.shape, "questions": QUESTIONS.shape, **MODEL}


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
        media: list[MediaSource] = []
        text = _text_of_input(INPUT.read(body["input"], Path(("input",)), Scope(context, unknown)), media)
        return State("input", text, tuple(media))

    def read_questions(
        self, body: Mapping[str, Any], context: ServerContext, unknown: dict[str, None]
    ) -> list[Question]:
        return _questions(QUESTIONS.read(body.get("questions"), Path(("questions",)), Scope(context, unknown)))

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
