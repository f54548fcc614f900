"""Events of a streamed answer, from the JSON values of any schema.

LMI's lines, TGI's and Triton's events and OpenAI's chunks all become `Token`s and a `Finish`. Nothing is dropped: each
event has its JSON value, and any other value is `Raw`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from deploy.client.errors import ModelFailed


@dataclass(frozen=True)
class Token:
    """A piece of the answer's text, usually one token.

    Attributes:
        text: the text as it arrived.
        id: the token's number; None: the schema has none.
        logprob: natural logarithm of its probability; None: not requested.
        special: whether it is a special token.
        shown: whether `text` is part of the answer's text; TGI's special tokens are not.
        index: number of the answer, if several were requested.
        data: the JSON value.
    """

    text: str
    id: int | None = None
    logprob: float | None = None
    special: bool = False
    shown: bool = True
    index: int = 0
    data: Any = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Finish:
    """The end of an answer.

    Attributes:
        reason: in the schema's words (`length`, `eos_token`, `stop`, ...); None: the schema gives none.
        generated_text: the whole text; None: the schema does not repeat it.
        details: further fields of the end, under their names.
        index: number of the answer.
    """

    reason: str | None
    generated_text: str | None = None
    details: Mapping[str, Any] | None = None
    index: int = 0
    data: Any = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Raw:
    """Any other value: a part of tool calls, usage, a custom formatter's output, plain text."""

    data: Any


Event: TypeAlias = Token | Finish | Raw


def events_of(value: Any) -> list[Event]:
    """Return the events in one JSON value. A value of unknown form is `Raw`.

    Raises:
        ModelFailed: the value reports a failure of the model.
    """
    try:
        return list(_events(value))
    except (AttributeError, TypeError):  # a list where an object should be, and the like
        return [Raw(value)]


def _events(value: Any) -> Iterator[Event]:
    match value:
        case {"error": error} if error:
            raise _failure(error, value)
        case {"details": {"finish_reason": "error"}}:
            raise _failure("the model failed", value)
        case {"choices": [*choices]} if choices and all(isinstance(choice, dict) for choice in choices):
            for choice in choices:
                yield from _choice(choice, value)
        case {"token": {"text": str()}}:
            yield from _line(value)
        case {"text_output": str(text)}:
            logprob = value.get("output_log_probs")
            yield Token(text, logprob=logprob if isinstance(logprob, float) else None, data=value)
            if reason := value.get("finish_reason"):
                yield Finish(reason, data=value)
        case {"generated_text": str(text)}:
            details = value.get("details")
            yield Finish((details or {}).get("finish_reason"), text, details, data=value)
        case {"outputs": [*texts]} if texts and all(isinstance(text, str) for text in texts):
            yield Token("".join(texts), data=value)  # LMI's streams before 0.27
        case [*values] if values and all(isinstance(item, dict) and "generated_text" in item for item in values):
            for index, item in enumerate(values):  # TGI's whole answers
                details = item.get("details")
                yield Finish((details or {}).get("finish_reason"), item["generated_text"], details, index, item)
        case _:
            yield Raw(value)


def _line(value: Mapping[str, Any]) -> Iterator[Event]:
    """Yield the events of a line of LMI or TGI, which differ in two names."""
    token = value["token"]
    tgi = "logprob" in token
    special = bool(token.get("special" if tgi else "special_token", False))
    yield Token(
        token["text"],
        token.get("id"),
        token.get("logprob" if tgi else "log_prob"),
        special,
        shown=not (tgi and special),
        data=value,
    )
    text, details = value.get("generated_text"), value.get("details")
    if text is not None or details is not None:
        yield Finish((details or {}).get("finish_reason"), text, details, data=value)


def _choice(choice: Mapping[str, Any], value: Mapping[str, Any]) -> Iterator[Event]:
    """Yield the events of one of OpenAI's choices: of a chat or a completion, streamed or whole."""
    index, reason = choice.get("index", 0), choice.get("finish_reason")
    if not isinstance(index, int):
        raise TypeError(index)
    if (message := choice.get("message")) is not None:
        yield Finish(reason, message.get("content"), value.get("usage"), index, value)
        return
    delta = choice.get("delta")
    text = choice.get("text") if delta is None else delta.get("content")
    more = any(part is not None for name, part in (delta or {}).items() if name not in ("role", "content"))
    if text or (text is not None and not more):
        yield Token(text, logprob=_logprob(choice.get("logprobs")), index=index, data=value)
    elif more or reason is None:
        yield Raw(value)  # of tool calls, or of a model's thoughts
    if reason is not None:
        yield Finish(reason, None, value.get("usage"), index, value)


def _logprob(logprobs: Any) -> float | None:
    """Return the log-probability of a piece that is one token."""
    match logprobs:
        case {"content": [{"logprob": float(value_)}]} | {"token_logprobs": [float(value_)]}:
            return value_
    return None


def _failure(error: Any, value: Mapping[str, Any]) -> ModelFailed:
    match error:
        case {"message": str(message)}:
            text, status = message, error.get("code")
        case _:
            text, status = str(error), value.get("code")
    kind = value.get("error_type") or (error.get("type") if isinstance(error, dict) else None)
    return ModelFailed(
        f"the model failed while it answered: {text}" + (f" ({kind})" if kind else ""),
        original_status=status if isinstance(status, int) else None,
    )
