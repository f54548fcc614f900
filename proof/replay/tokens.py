"""The generated tokens of an answer, where it has them, and whether two texts part at a near tie."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

NEAR = 0.25
"""Log-probabilities within this are nearly the same: other precisions and kernels move them by less than 0.1."""
RELATIVE_LOGPROB = 0.05
"""The same of very improbable tokens, as a share."""


class Token(NamedTuple):
    """Args:
    others: log-probabilities of tokens that stood to choice, by their text.
    """

    text: str
    logprob: float | None
    others: Mapping[str, float]


def tokens_by_choice(documents: list[Any]) -> dict[int, list[Token]]:
    """Return the generated tokens of each choice, where the answer has them."""
    found: dict[int, list[Token]] = {}
    for document in documents:
        for number, answer in enumerate(document if isinstance(document, list) else [document]):
            if isinstance(answer, dict):
                for choice, token in _tokens(answer):
                    found.setdefault(number + choice, []).append(token)
    return found


def _tokens(answer: Mapping[str, Any]) -> Iterator[tuple[int, Token]]:
    if isinstance(token := answer.get("token"), dict):  # a stream of LMI or TGI
        yield 0, _native(token, answer.get("top_tokens"))
        return
    details = answer.get("details")
    if isinstance(details, dict) and isinstance(tokens := details.get("tokens"), list):
        top = details.get("top_tokens")
        for at, token in enumerate(tokens):
            if isinstance(token, dict):
                yield 0, _native(token, top[at] if isinstance(top, list) and at < len(top) else None)
    choices = answer.get("choices")
    for place, choice in enumerate(choices if isinstance(choices, list) else ()):
        if not isinstance(choice, dict) or not isinstance(logprobs := choice.get("logprobs"), dict):
            continue
        index = choice.get("index")
        for token in _of_chat(logprobs) if "content" in logprobs else _of_completion(logprobs):
            yield index if isinstance(index, int) else place, token


def _native(token: Mapping[str, Any], top: Any) -> Token:
    return Token(str(token.get("text")), _logprob(token), _others(top))


def _of_chat(logprobs: Mapping[str, Any]) -> Iterator[Token]:
    content = logprobs["content"]
    for token in content if isinstance(content, list) else ():
        if isinstance(token, dict):
            yield Token(str(token.get("token")), _logprob(token), _others(token.get("top_logprobs")))


def _of_completion(logprobs: Mapping[str, Any]) -> Iterator[Token]:
    texts, numbers, tops = (logprobs.get(name) for name in ("tokens", "token_logprobs", "top_logprobs"))
    for at, text in enumerate(texts if isinstance(texts, list) else ()):
        number = numbers[at] if isinstance(numbers, list) and at < len(numbers) else None
        top = tops[at] if isinstance(tops, list) and at < len(tops) else None
        others = {name: value for name, value in top.items() if is_number(value)} if isinstance(top, dict) else {}
        yield Token(str(text), number if is_number(number) else None, others)


def _logprob(token: Mapping[str, Any]) -> float | None:
    value = token.get("logprob", token.get("log_prob"))
    return value if is_number(value) else None


def _others(top: Any) -> dict[str, float]:
    found = {}
    for other in top if isinstance(top, list) else ():
        if isinstance(other, dict) and (logprob := _logprob(other)) is not None:
            found[str(other.get("text", other.get("token")))] = logprob
    return found


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# -- ties -----------------------------------------------------------------------------------------------------------


class Parted(NamedTuple):
    """The place where two texts part: the tokens before, as both have them, and the two that differ; None: the end."""

    same: Sequence[tuple[Token, Token]]
    old: Token | None
    new: Token | None

    def is_tie(self, near: float) -> bool:
        """Return whether it is a near tie, of models that found the tokens before it nearly as probable as each
        other.
        """
        if self.old is None or self.new is None or not is_near_tie(self.old, self.new, near):
            return False
        return all(is_near(one.logprob, other.logprob, RELATIVE_LOGPROB, near) for one, other in self.same)


def parted_at(old: Sequence[Token], new: Sequence[Token]) -> Parted | None:
    """Return where two texts of one choice part; None: they do not."""
    for at, (one, other) in enumerate(zip_longest(old, new)):
        if one is None or other is None or one.text != other.text:
            return Parted(list(zip(old[:at], new[:at], strict=True)), one, other)
    return None


def is_near_tie(old: Token, new: Token, near: float) -> bool:
    """Return whether two models that differ by rounding could choose either of the two tokens.

    A side that tells the other's token among its alternatives says so itself. Without any, two tokens that are nearly
    as probable as each other have nearly the same log-probability, and less than about one half each.
    """
    if old.logprob is None or new.logprob is None:
        return False
    gaps = []
    if new.text in old.others:
        gaps.append(old.logprob - old.others[new.text])
    if old.text in new.others:
        gaps.append(new.logprob - new.others[old.text])
    if gaps:
        return all(gap <= near for gap in gaps)
    most = -math.log1p(math.exp(-near))
    return abs(old.logprob - new.logprob) <= near and max(old.logprob, new.logprob) <= most


def is_near(one: float | None, other: float | None, relative: float, absolute: float) -> bool:
    """Return whether two numbers are nearly equal; None is only so to itself."""
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=relative, abs_tol=absolute)
