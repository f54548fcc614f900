"""The rules of `lmi conform`. Each rule has a sentence, a public source, a check, and the profiles it applies to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from proof.conform.dialects import GENERATING, text_of
from proof.conform.exchange import Response

if TYPE_CHECKING:
    from proof.conform.server import Server

SAGEMAKER = ("sagemaker",)
LMI = ("lmi-0.28", "lmi-0.38")


class Source(NamedTuple):
    """The public document that states a rule. `url` is empty for rules of this project."""

    title: str
    url: str


class Failed(Exception):
    """A rule has failed.

    Attributes:
        expected: the expected response.
        request, got: the request and the response, or "" if there was no request.
        late: whether the response was ended by the time limit `--timeout`.
    """

    def __init__(self, expected: str, response: Response | None = None, *, request: str = "", got: str = "") -> None:
        super().__init__(expected)
        self.expected = expected
        self.request = response.request if response else request
        self.got = response.got if response else got
        self.late = response is not None and response.late


class NotAsked(Exception):
    """A rule cannot be checked on this server. The message contains the reason."""


Check = Callable[["Server"], Awaitable[None]]


@dataclass(frozen=True)
class Rule:
    """A requirement of a contract, and its check.

    Attributes:
        id: the ID of the rule in reports, such as `stream.chunked`: a group, a dot and a name.
        sentence: the requirement in one sentence.
        last: whether the check stops the server, so that it must run after all other checks.
        check: a function that returns if the server meets the requirement, and raises `Failed` or `NotAsked` otherwise.
        differs: servers that are documented to differ, and how they differ.
    """

    id: str
    sentence: str
    source: Source
    profiles: tuple[str, ...]
    check: Check
    last: bool = False
    differs: str = ""


RULES: dict[str, Rule] = {}
"""Maps IDs to rules, in the order in which the rules are checked."""


def rule(
    id: str,
    sentence: str,
    source: Source,
    profiles: Iterable[str] = GENERATING,
    *,
    last: bool = False,
    differs: str = "",
) -> Callable[[Check], Check]:
    """Register the decorated function as the check of a rule."""

    def add(check: Check) -> Check:
        assert id not in RULES, id
        RULES[id] = Rule(id, sentence, source, tuple(profiles), check, last, differs)
        return check

    return add


def expect(holds: object, expected: str, response: Response) -> None:
    """Raise `Failed` if `holds` is false."""
    if not holds:
        raise Failed(expected, response)


def expect_status(response: Response, status: int) -> None:
    """Raise `Failed` if the response has another status."""
    expect(response.status == status, f"status {status}", response)


def expect_refused(response: Response, remark: str = "") -> None:
    """Raise `Failed` if the server has not refused the request.

    Args:
        remark: the end of the expectation, with a space or comma before it.
    """
    expect(response.refused, f"a status of 400 to 499{remark}", response)


def expect_type(response: Response, name: str) -> None:
    """Raise `Failed` if the response has another content type."""
    expect(response.content_type == name, f"the content type {name}", response)


def expect_fields(response: Response, value: Any, *fields: str) -> None:
    """Raise `Failed` if `value`, which is part of the response, is not an object with these fields."""
    expect(isinstance(value, dict) and set(fields) <= set(value), f"the fields {', '.join(fields)}", response)


def expect_logprob(response: Response, value: Any) -> None:
    """Raise `Failed` if `value` is not a log-probability, which is null or at most 0."""
    is_possible = value is None or (isinstance(value, int | float) and not isinstance(value, bool) and value <= 0)
    expect(is_possible, f"a log-probability of at most 0, not {value!r}", response)


def expect_response(response: Response) -> Response:
    """Return the response, or raise `Failed` if it is not a complete response with status 200."""
    expect(response.ok, "a complete response with status 200", response)
    return response


async def succeeded(response: Awaitable[Response]) -> Response:
    """Wait for a response, such as that of `Server.generate`, and raise `Failed` if it is not complete."""
    return expect_response(await response)


async def expect_details(server: Server, **parameters: Any) -> tuple[Response, dict[str, Any]]:
    """Request a response with `details`, as clients of LMI and TGI do, and return the response and its details."""
    response = expect_response(await server.generate(more={"parameters": {"details": True, **parameters}}))
    details = response.object.get("details")
    expect(isinstance(details, dict), "details", response)
    assert isinstance(details, dict)
    return response, details


async def greedy(server: Server, tokens: int) -> Response:
    """Return a greedily decoded response.

    Raises:
        NotAsked: a second response to the same request has a different text.
    """
    response, again = [expect_response(await server.generate(tokens=tokens)) for _ in range(2)]
    if text_of(response.value) != text_of(again.value):
        skip("two greedy responses differ")
    return response


async def stop_word(server: Server) -> tuple[str, str]:
    """Return the text of a greedily decoded response, and its third word, which can be used as a stop sequence.

    Raises:
        NotAsked: the text has too few words, its third word also occurs earlier, or two greedy responses differ.
    """
    text = text_of((await greedy(server, 16)).value) or ""
    words = text.split()
    if len(words) < 4 or words[2] in "".join(words[:2]):
        skip(f"no word of the response {text!r} can be used as a stop sequence")
    return text, words[2]


def skip(reason: str) -> NoReturn:
    raise NotAsked(reason)
