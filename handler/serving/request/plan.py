"""The plan of a server: the ordered stages of its requests, which are chosen once when the server starts.

A feature that is not configured has no stage, so that requests do not pay for it. All hosts run the plan for their
requests: `ServedModel.open` calls the `head` hooks, `RequestTask.parse` the `body` and `parsed` hooks, and
`RequestTask.run` the `encode` and `queue` hooks. `courses.py` calls the `tokenize` hooks, and `http/custom.py` the
`call` hook. A stage that holds a resource beyond its own call passes it to `Life.hold`.

Three stages have no hook, because the host or the task does their work. They are in the plan so that the rule about the
client's time covers them: the host receives the body, `RequestTask.run` submits the requests to the engine, and the
host writes the response.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from handler.core.media import MediaSource, Medium
    from handler.core.text import Prompt
    from handler.core.values import Request
    from handler.plugins.handle import Result
    from handler.protocols.kernel.dialect import ParsedRequest
    from handler.protocols.kernel.stored import Recalled
    from handler.serving.head import Head
    from handler.serving.request.life import Life
    from handler.serving.request.task import RequestTask
    from handler.serving.stored_responses import OwnersKeeper


class Time(Enum):
    """Whose time a stage takes, and therefore whom it delays if it is slow."""

    LOOP = "the event loop's"
    THREAD = "a thread's turn"
    CLIENT = "the client's"


class Resource(Enum):
    """A resource that other requests wait for while a request holds it."""

    TURN = "a turn of the threads"
    GATE = "a dynamic batch"
    CALL = "the call of handle"
    SEQUENCE = "a sequence in the engine"


class Decoded(NamedTuple):
    """A decoded body.

    Attributes:
        value: decoded value, which the dialect parses.
        given: value returned by the input formatter of model.py.
        session_call: NEW_SESSION or CLOSE if the body opens or closes a session, otherwise "".
        size: memory that the value needs, in bytes, or 0 if this is unknown.
    """

    value: Any
    given: Any = None
    session_call: str = ""
    size: int = 0


class Intake:
    """A request from its body until it is parsed. The `body` hooks of the stages set its attributes.

    Attributes:
        body: the body, without its Content-Encoding after the stage that decompresses it.
        decoded: the decoded body, or None until it is decoded.
        size: memory of the decoded body and of the stored responses, in bytes.
        task: task of the request, whose `memory` is held for the body, its decoded value and stored responses.
        recalled: stored responses that the body refers to, or None if it neither uses nor stores responses.
        keeper: stores the response of the request, or None if it neither uses nor stores responses.
        parsed: the parsed request, or None until the body is parsed.
    """

    __slots__ = ("body", "decoded", "head", "keeper", "parsed", "recalled", "size", "task")

    def __init__(self, head: Head, body: bytes, task: RequestTask) -> None:
        self.head = head
        self.body = body
        self.task = task
        self.decoded: Decoded | None = None
        self.size = 0
        self.recalled: Recalled | None = None
        self.keeper: OwnersKeeper | None = None
        self.parsed: ParsedRequest | None = None

    @property
    def num_bytes(self) -> int:
        """The bytes of the body and of the stored responses, which decide whether a thread parses them."""
        return len(self.body) + (0 if self.recalled is None else self.recalled.size)


SharedMedia: TypeAlias = "list[tuple[Sequence[MediaSource], Sequence[Medium]]]"
"""Sources of media in a body, each with the decoded media."""


class Encoding:
    """A request to the engine until it is encoded. The `encode` hooks of the stages set its attributes.

    Attributes:
        request: the request, without its prompt once it is encoded.
        num_bytes: size of the body, in bytes.
        owner: owner of the request, or "" without an owner.
        hold: function that registers a callback for the end of the request (see `Life.hold`).
        take: function that receives the prompt of a request that needs only the prompt.
        media: the decoded media of the request.
        loaded: media that were loaded for other prompts of the same body.
        prompt: the prompt, or None until the request is encoded.
    """

    __slots__ = ("hold", "loaded", "media", "num_bytes", "owner", "prompt", "request", "take")

    def __init__(
        self,
        request: Request,
        num_bytes: int,
        owner: str,
        hold: Callable[[Callable[[], object]], None],
        loaded: SharedMedia | None = None,
        take: Callable[[Prompt], object] = bool,
    ) -> None:
        self.request = request
        self.num_bytes = num_bytes
        self.owner = owner
        self.hold = hold
        self.take = take
        self.media: Sequence[Medium] = ()
        self.loaded: SharedMedia = [] if loaded is None else loaded
        self.prompt: Prompt | None = None


Wait: TypeAlias = "Awaitable[object] | None"
"""What a request waits for at a stage, or None if the stage has done its work at once."""

HandleCall: TypeAlias = "Callable[[dict[str, bytes], dict[str, str], Life, str], Coroutine[Any, Any, Result]]"


@dataclass(frozen=True)
class Stage:
    """A stage of a request, with the hooks that it needs.

    Attributes:
        name: name of the stage in messages.
        time: whose time the stage takes.
        holds: resources that the stage holds during its own work.
        keeps: resources that the request keeps from this stage until it is finished.
        follows: whether the stage runs beside the request, which is finished without it, such as the writer.
        headers: names of request headers. If there are any, the hooks are called only for requests with one of them.
        head: reads headers before the body is received. It returns the head with the values that it has read.
        body: works on the body, until it is parsed.
        parsed: changes the parsed request, on the thread that parses. This requires `headers`; other stages change
            `Intake.parsed` in a `body` hook after the parse.
        encode: works on each request to the engine.
        tokenize: does the same for a request that needs only the prompt.
        queue: waits for the turn of the request and its owner, before it is submitted.
        call: calls the user's function `handle` for a request and its owner.
    """

    name: str
    time: Time
    holds: frozenset[Resource] = frozenset()
    keeps: frozenset[Resource] = frozenset()
    follows: bool = False
    headers: frozenset[str] = frozenset()
    head: Callable[[Head], Head] | None = None
    body: Callable[[Intake], Wait] | None = None
    parsed: Callable[[ParsedRequest, Head], ParsedRequest] | None = None
    encode: Callable[[Encoding], Wait] | None = None
    tokenize: Callable[[Encoding], Wait] | None = None
    queue: Callable[[Life, Sequence[Request], str], Wait] | None = None
    call: HandleCall | None = None


class Plan:
    """The stages of a server in order, and their hooks.

    Args:
        stages: the stages of each request. A request also passes the stages whose headers it has.

    Attributes:
        body: the `body` hooks for requests without special headers.
        encode: the `encode` hooks.
        tokenize: the `tokenize` hooks.
        queue: the `queue` hooks.
        call: the `call` hook, or None if model.py has no `handle`.

    Raises:
        ValueError: a stage on the client's time holds a resource that other requests need, or waits for the client
            while the request keeps such a resource. Or a stage without special headers has a `parsed` hook.
    """

    def __init__(self, stages: Iterable[Stage]) -> None:
        self.stages = tuple(stages)
        _check(self.stages)
        self._special = [stage for stage in self.stages if stage.headers]
        self._headers = frozenset[str]().union(*(stage.headers for stage in self._special))
        general = [stage for stage in self.stages if not stage.headers]
        self._head = [stage.head for stage in general if stage.head is not None]
        self.body = [stage.body for stage in general if stage.body is not None]
        self.encode = [stage.encode for stage in general if stage.encode is not None]
        self.tokenize = [stage.tokenize for stage in general if stage.tokenize is not None]
        self.queue = [stage.queue for stage in general if stage.queue is not None]
        self.call = next((stage.call for stage in general if stage.call is not None), None)

    def read_head(self, head: Head) -> Head:
        """Return the head with the values of its headers. Header errors are raised before the body is read.

        Raises:
            ServingError: a stage refuses the request.
        """
        if not self._headers.isdisjoint(head.headers):
            stages = tuple(stage for stage in self._special if not stage.headers.isdisjoint(head.headers))
            head = head._replace(stages=stages)
            for stage in stages:
                if stage.head is not None:
                    head = stage.head(head)
        for read in self._head:
            head = read(head)
        return head

    def body_of(self, head: Head) -> list[Callable[[Intake], Wait]]:
        """Return the `body` hooks for a request, which may have special headers."""
        return [
            stage.body
            for stage in self.stages
            if stage.body is not None and (not stage.headers or stage in head.stages)
        ]


def _check(stages: Iterable[Stage]) -> None:
    keeper: Stage | None = None
    for stage in stages:
        if stage.parsed is not None and not stage.headers:
            raise ValueError(f"the stage {stage.name!r} has a hook 'parsed', which is called only for special headers")
        if stage.time is not Time.CLIENT:
            if stage.keeps and keeper is None:
                keeper = stage
            continue
        for resource in stage.holds | stage.keeps:
            raise ValueError(f"the stage {stage.name!r} waits for the client: it must not hold {resource.value}")
        if keeper is not None and not stage.follows:
            resources = " and ".join(sorted(resource.value for resource in keeper.keeps))
            raise ValueError(
                f"the stage {stage.name!r} waits for the client: it must come before {keeper.name!r}, "
                f"which holds {resources} until the request is finished"
            )
