"""The rules of `lmi conform`. Each has a sentence, its public source, a check, and the profiles it applies to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from proof.conform.dialects import PROFILES, text_of
from proof.conform.exchange import Answer

if TYPE_CHECKING:
    from proof.conform.server import Server

SAGEMAKER = ("sagemaker",)
LMI = ("lmi-0.28", "lmi-0.38")


class Source(NamedTuple):
    """Public document that states a rule; `url` is empty for this project's own rules."""

    title: str
    url: str


class Failed(Exception):
    """Failure of a rule.

    Attributes:
        expected: the expected answer.
        asked, got: the request and the answer, or "" if there was no request.
        late: whether the answer was not awaited beyond `--timeout`.
    """

    def __init__(self, expected: str, answer: Answer | None = None, *, asked: str = "", got: str = "") -> None:
        super().__init__(expected)
        self.wanted = expected
        self.asked = answer.asked if answer else asked
        self.got = answer.got if answer else got
        self.late = answer is not None and answer.late


class NotAsked(Exception):
    """Rule that cannot be checked on this server; the message says why."""


Check = Callable[["Server"], Awaitable[None]]


@dataclass(frozen=True)
class Rule:
    """Requirement of a contract, and its check.

    Attributes:
        id: name in reports, such as `stream.chunked`: a group, a dot and a name.
        sentence: the requirement in one sentence.
        last: whether the check stops the server, so that it must run after all others.
        check: returns if the server meets the requirement, otherwise raises `Failed` or `NotAsked`.
    """

    id: str
    sentence: str
    source: Source
    profiles: tuple[str, ...]
    check: Check
    last: bool = False


RULES: dict[str, Rule] = {}
"""Rules by id, in the order in which they are checked."""


def rule(
    id: str, sentence: str, source: Source, profiles: Iterable[str] = PROFILES, *, last: bool = False
) -> Callable[[Check], Check]:
    """Register the decorated function as the check of a rule."""

    def add(check: Check) -> Check:
        assert id not in RULES, id
        RULES[id] = Rule(id, sentence, source, tuple(profiles), check, last)
        return check

    return add


def expect(holds: object, expected: str, answer: Answer) -> None:
    """Raise `Failed` if `holds` is false."""
    if not holds:
        raise Failed(expected, answer)


def expect_fields(answer: Answer, value: Any, *fields: str) -> None:
    """Raise `Failed` if `value`, a part of the answer, is not an object with the wanted fields."""
    expect(isinstance(value, dict) and set(fields) <= set(value), f"the fields {', '.join(fields)}", answer)


def expect_answer(answer: Answer) -> Answer:
    """Return the answer, or raise `Failed` if it is not a complete answer with status 200."""
    expect(answer.ok, "a whole answer with status 200", answer)
    return answer


async def expect_details(server: Server, **parameters: Any) -> tuple[Answer, dict[str, Any]]:
    """Request an answer with `details`, as clients of LMI and TGI do; return the answer and its details."""
    answer = expect_answer(await server.generate(more={"parameters": {"details": True, **parameters}}))
    details = answer.object.get("details")
    expect(isinstance(details, dict), "details", answer)
    assert isinstance(details, dict)
    return answer, details


async def greedy(server: Server, tokens: int) -> Answer:
    """Return a greedy answer.

    Raises:
        NotAsked: a second answer to the same request has a different text.
    """
    answer, again = [expect_answer(await server.generate(tokens=tokens)) for _ in range(2)]
    if text_of(answer.value) != text_of(again.value):
        skip("two greedy answers differ")
    return answer


async def stop_word(server: Server) -> tuple[str, str]:
    """Return the text of a greedy answer, and its third word, to be used as a stop sequence.

    Raises:
        NotAsked: the answer has too few words, its third word also occurs before, or two greedy answers differ.
    """
    text = text_of((await greedy(server, 16)).value) or ""
    words = text.split()
    if len(words) < 4 or words[2] in "".join(words[:2]):
        skip(f"no word of the answer {text!r} can be used as a stop sequence")
    return text, words[2]


def skip(why: str) -> NoReturn:
    raise NotAsked(why)
