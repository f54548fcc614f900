"""The table of rules: each with its check, its source, and the profiles that it applies to."""

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
    """A public document; or ourselves if there is none, with an empty `url`."""

    title: str
    url: str


class Failed(Exception):
    """The server breaks the rule.

    Attributes:
        wanted: the rule's requirement.
        asked, got: the request and its answer; empty: there was none.
    """

    def __init__(self, wanted: str, answer: Answer | None = None, *, asked: str = "", got: str = "") -> None:
        super().__init__(wanted)
        self.wanted = wanted
        self.asked = answer.asked if answer else asked
        self.got = answer.got if answer else got


class NotAsked(Exception):
    """The rule cannot be checked on this server; the message says why."""


Check = Callable[["Server"], Awaitable[None]]


@dataclass(frozen=True)
class Rule:
    """One promise.

    Attributes:
        id: its name in reports: a group, a dot, a name.
        sentence: the requirement.
        last: it ends the server, so it is checked after all others.
        check: returns if the server keeps the rule, otherwise raises `Failed` or `NotAsked`.
    """

    id: str
    sentence: str
    source: Source
    profiles: tuple[str, ...]
    check: Check
    last: bool = False


RULES: dict[str, Rule] = {}
"""All rules by id, in the order in which they are checked."""


def rule(
    id: str, sentence: str, source: Source, profiles: Iterable[str] = PROFILES, *, last: bool = False
) -> Callable[[Check], Check]:
    """Add the function to the table."""

    def add(check: Check) -> Check:
        assert id not in RULES, id
        RULES[id] = Rule(id, sentence, source, tuple(profiles), check, last)
        return check

    return add


def expect(holds: object, wanted: str, answer: Answer) -> None:
    """Raise `Failed` unless `holds` is true."""
    if not holds:
        raise Failed(wanted, answer)


def expect_answer(answer: Answer) -> Answer:
    """Return the answer if it is a whole one with status 200."""
    expect(answer.ok, "a whole answer with status 200", answer)
    return answer


async def expect_details(server: Server, **parameters: Any) -> tuple[Answer, dict[str, Any]]:
    """Ask for the details of an answer, as LMI's and TGI's clients do; return the answer and its details."""
    answer = expect_answer(await server.generate(more={"parameters": {"details": True, **parameters}}))
    details = answer.object.get("details")
    expect(isinstance(details, dict), "details", answer)
    assert isinstance(details, dict)
    return answer, details


async def greedy(server: Server, tokens: int) -> Answer:
    """Return a greedy answer.

    Raises:
        NotAsked: a second one has a different text.
    """
    answer, again = [expect_answer(await server.generate(tokens=tokens)) for _ in range(2)]
    if text_of(answer.value) != text_of(again.value):
        skip("two greedy answers differ")
    return answer


async def stop_word(server: Server) -> tuple[str, str]:
    """Return the text of a greedy answer, and its third word, for use as a stop word.

    Raises:
        NotAsked: it has too few words, the word is also among the first two, or two greedy answers differ.
    """
    text = text_of((await greedy(server, 16)).value) or ""
    words = text.split()
    if len(words) < 4 or words[2] in "".join(words[:2]):
        skip(f"no word of {text!r} can stop it")
    return text, words[2]


def skip(why: str) -> NoReturn:
    raise NotAsked(why)
