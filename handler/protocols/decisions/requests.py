"""The requests to the engine for the questions about a state: one for each question, with thinking switched off."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from handler.core.errors import InvalidParameter, InvalidPayload
from handler.core.media import MediaSource
from handler.core.values import FieldNames, Pooling, Request, TemplateOptions
from handler.protocols.assistant.reasoning_families import MESSAGES, Family, choose_family
from handler.protocols.assistant.template import read_template, reads
from handler.protocols.assistant.tools.request import AUTO, NONE
from handler.protocols.decisions.prompts import labels_for, question_text
from handler.protocols.decisions.values import Question
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.messages import check_number, media_part
from handler.protocols.kernel.path import Path
from handler.protocols.kernel.readers import show
from handler.protocols.kernel.special_tokens import any_of, without_special_tokens
from handler.protocols.kernel.texts import TooManyTexts

MAX_PROMPTS = 1 << 24
"""Maximum number of characters in all prompts of a request, because each question has the whole state before it."""

MAX_SHOWN = 256
"""Maximum number of images in all prompts of a request."""


class State(NamedTuple):
    """What the questions of a request are about.

    Attributes:
        field: the client's field that contains it.
        text: its text.
        media: the images before the text.
        placed: maps a string in texts to the image that replaces it.
        system: the text of a system message, or "" for none.
    """

    field: str
    text: str
    media: tuple[MediaSource, ...] = ()
    placed: Mapping[str, MediaSource] = MappingProxyType({})
    system: str = ""


def text_of(value: Any) -> str:
    """Return a JSON value as text. A string stays as it is."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def engine_requests(
    state: State,
    questions: Sequence[Question],
    template: TemplateOptions,
    context: ServerContext,
    version: int,
    **fields: Any,
) -> list[Request]:
    """Return a request for each question.

    Args:
        version: the version of the prompt.
        fields: further fields of all requests.

    Raises:
        InvalidPayload: the engine cannot decide, or the prompts are too long in total.
        InvalidField: a question has more options than the model has labels, or a placed image is not used.
    """
    if context.no_labels:
        raise InvalidPayload(
            f"'questions': the engine {context.engine} does not support decisions: {context.no_labels}"
        )
    if context.refuses_chats:
        raise InvalidPayload("'questions': the model has no chat template; set option.chat_template")
    family = _family(context)
    # The texts are data of a third party, and must not end the user's message.
    as_text = functools.partial(without_special_tokens, vocabulary=context.vocabulary)
    placed = state.placed
    state = state._replace(
        text=as_text(state.text),
        placed={as_text(name): source for name, source in placed.items()},
        system=as_text(state.system),
    )
    texts = []
    for question in questions:
        labels = labels_for(question, context.vocabulary, version)
        if len(labels.texts) < len(question.options):
            raise question.path.refused(
                f"has {len(question.options)} options; the model's vocabulary has labels for {len(labels.texts)}"
            )
        texts.append((labels.texts, as_text(question_text(question, labels))))
    _check_size(state, questions, [text for _, text in texts])
    requests = [
        _request(state, question, labels, text, context)._replace(
            template=template, read_prompt=functools.partial(_check_closed, family), **fields
        )
        for question, (labels, text) in zip(questions, texts, strict=True)
    ]
    _check_placed(placed, requests)
    return requests


def _request(state: State, question: Question, labels: tuple[str, ...], end: str, context: ServerContext) -> Request:
    text = f"{state.text}\n\n{end}"
    pieces = [*state.media, *question.media, *_pieces(text, state.placed)]
    media = tuple(piece for piece in pieces if isinstance(piece, MediaSource))
    check_number(media, context)
    system = ({"role": "system", "content": state.system},) if state.system else ()
    content = [_part(piece) for piece in pieces] if media else text
    last = pieces[-1] if isinstance(pieces[-1], str) else ""
    return Request(
        "",
        messages=(*system, {"role": "user", "content": content}),
        media=media,
        pooling=Pooling("labels", labels=labels, suffix=last[-len(end) :]),
        names=FieldNames(prompt=f"{state.field} with {question.path}"),
    )


def _part(piece: str | MediaSource) -> dict[str, Any]:
    return media_part(piece) if isinstance(piece, MediaSource) else {"type": "text", "text": piece}


def _pieces(text: str, placed: Mapping[str, MediaSource]) -> list[str | MediaSource]:
    """Split a text at the placeholders of images."""
    if not placed:
        return [text]
    pieces = re.split(f"({any_of(placed)})", text)
    placeholders = [placed[piece] if index % 2 else piece for index, piece in enumerate(pieces)]
    return [piece for piece in placeholders if piece != ""]


def _check_size(state: State, questions: Sequence[Question], texts: Sequence[str]) -> None:
    """Raise TooManyTexts if the prompts of all questions are too long together."""
    num_shared = len(state.text) + len(state.system)
    total = num_shared * len(questions) + sum(map(len, texts))
    if total > MAX_PROMPTS:
        raise TooManyTexts(
            f"'{state.field}' and the questions have {total} characters, because the {num_shared} characters of "
            f"'{state.field}' count once for each of {len(questions)} questions; the maximum is {MAX_PROMPTS}"
        )
    shown = (len(state.media) + len(state.placed)) * len(questions) + sum(len(question.media) for question in questions)
    if shown > MAX_SHOWN:
        raise TooManyTexts(
            f"'questions': {shown} images are too many, because the images count once for each of {len(questions)} "
            f"questions; the maximum is {MAX_SHOWN}"
        )


def _check_placed(placed: Mapping[str, MediaSource], requests: Sequence[Request]) -> None:
    used = set(map(id, itertools.chain.from_iterable(request.media for request in requests)))
    for name, source in placed.items():
        if id(source) not in used:
            raise Path(("assets", name)).refused("no text of the request contains it")


# -- thinking: a label must be the first token of the reply ------------------------------------------------------------


_SWITCHES: Mapping[str, Any] = {
    "enable_thinking": False,
    "thinking": False,
    "thinking_mode": "disabled",  # MiniMax-M3
    "thinking_budget": 0,  # Seed-OSS
}
"""Maps the variables of chat templates that switch thinking off to their values."""
_EFFORT = "reasoning_effort"
_KNOWS_NONE = re.compile(r"""['"]none['"]""")


def template_without_thinking(
    values: Mapping[str, Any], context: ServerContext
) -> tuple[TemplateOptions, Sequence[str]]:
    """Return the options of the chat template, with its switch for thinking set to off.

    Args:
        values: the client's fields for the template that were read, such as `chat_template_kwargs`.

    Returns:
        The options, and the names of arguments that the template does not read.

    Raises:
        InvalidParameter: the client switches thinking on.
    """
    arguments = values.get("chat_template_kwargs") or {}
    for name, off in _SWITCHES.items():
        if arguments.get(name) and arguments[name] != off:
            raise _thinks(f"chat_template_kwargs.{name}={show(arguments[name])}")
    if arguments.get(_EFFORT, "none") not in (None, "none"):
        raise _thinks(f"chat_template_kwargs.{_EFFORT}={show(arguments[_EFFORT])}")
    options, unread = read_template({"chat_template_kwargs": arguments}, (), context)
    switches = {name: off for name, off in _SWITCHES.items() if reads(context.chat_template, name)}
    if reads(context.chat_template, _EFFORT) and _KNOWS_NONE.search(context.chat_template):
        switches[_EFFORT] = "none"
    return options._replace(arguments=tuple({**dict(options.arguments), **switches}.items())), unread


def _thinks(value: str) -> InvalidParameter:
    return InvalidParameter(f"{value}: must be off, because the model's next token must be the label of an option")


def _family(context: ServerContext) -> Family | None:
    """Return the family of a model that reasons, or None for other models.

    Raises:
        InvalidPayload: the model begins each reply with a header, after which it may think.
    """
    name = context.config.reasoning
    family = choose_family(AUTO if name in (NONE, "hf") else name, context.chat_template)
    if family is not None and family.name in MESSAGES:
        raise InvalidPayload(
            f"'questions': the model's replies begin with a header ({family.name}), so the next token is not a label"
        )
    has_switch = any(reads(context.chat_template, switch) for switch in _SWITCHES)
    return family._replace(thinks=False) if family is not None and has_switch else family


def _check_closed(family: Family | None, request: Request, prompt: str) -> Request:
    """Return the request if the reply to its prompt begins outside of reasoning.

    Raises:
        InvalidParameter: the prompt ends within reasoning, or the model always begins with it.
    """
    if family is not None:
        ends_open = family.ends_open(prompt)
        if ends_open or (ends_open is None and family.thinks):
            raise InvalidParameter(
                f"{request.names.prompt}: the model thinks before it replies, and its chat template cannot switch this "
                "off, so the next token is not a label"
            )
    return request
