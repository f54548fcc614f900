"""The courses of responses: how the response to a parsed request comes about."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from handler.core.errors import InternalError, serving_error
from handler.core.values import Delta, Request
from handler.plugins.formatter_thread import ThreadedReply
from handler.protocols.kernel.dialect import FollowUp, ParsedRequest, WithoutEngine
from handler.serving.request.life import SUBMIT
from handler.serving.request.plan import Encoding, SharedMedia, Wait

if TYPE_CHECKING:
    from handler.serving.request.task import RequestTask

Hooks = Sequence[Callable[[Encoding], Wait]]


async def generate(task: RequestTask, parsed: ParsedRequest, loaded: SharedMedia | None = None) -> None:
    """Tokenize the prompts, join a batch, and submit the requests to the engine."""
    plan, requests = task.admission.plan, parsed.requests
    if not requests:
        return await _without_engine(task, parsed, WithoutEngine())
    encodings = await _encode(task, requests, plan.encode, loaded)
    encoded = [encoding.request for encoding in encodings]
    if encoded != [*requests]:
        task.parsed = parsed = parsed._replace(requests=encoded)
    task.stats.note_encoded(parsed)
    for queue in plan.queue:
        if not task.finished and (waiting := queue(task, requests, task.head.owner)) is not None:
            await waiting
    if not task.finished:
        task.on(SUBMIT)
        for index, encoding in enumerate(encodings):
            _submit(task, parsed, index, encoding, task.stats.note_started)


async def _encode(
    task: RequestTask, requests: Sequence[Request], hooks: Hooks, loaded: SharedMedia | None = None, **more: Any
) -> list[Encoding]:
    size, owner = task.memory.body, task.head.owner
    loaded = [] if loaded is None else loaded
    encodings = [Encoding(request, size, owner, task.hold, loaded, **more) for request in requests]
    for encoding in encodings:
        for work in hooks:
            if (waiting := work(encoding)) is not None:
                await waiting
    return encodings


def _submit(
    task: RequestTask, parsed: ParsedRequest, index: int, encoding: Encoding, started: Callable[[], object] = bool
) -> None:
    """Submit a request to the engine, and hold its sequences."""
    prompt, reply = encoding.prompt, parsed.reply
    assert prompt is not None, "a stage tokenizes the prompt"
    task.stats.num_prompt_tokens += len(prompt.ids)
    reply.start(index, len(prompt.ids))
    put = functools.partial(reply.put if isinstance(reply, ThreadedReply) else task.feed, index)
    id = task.driver.submit(encoding.request, prompt, put, started, task.head.owner, follows=index > 0)
    task.hold(functools.partial(task.driver.cancel, id))


async def _without_engine(task: RequestTask, parsed: ParsedRequest, course: WithoutEngine) -> None:
    """Respond, and then stop the running requests of the same owner for which the client has set an id."""
    await _encode(task, parsed.requests, task.admission.plan.tokenize, take=course.take)
    task.feed_and_flush(0, Delta(0, 0, ()))
    for other in [*task.admission.tasks] if course.stops else ():
        if other.is_of(course.stops, task.head.owner):
            other.stop()


async def _follow_up(task: RequestTask, parsed: ParsedRequest, course: FollowUp) -> None:
    """Generate, and begin the next request of the reply when the engine has finished the first one."""
    loaded: SharedMedia = []
    task.hold(loaded.clear)
    task.pause = lambda that: that.driver.soon(lambda: that.begin(_next(course, loaded, that)))  # after this step
    await generate(task, parsed, loaded)


async def _next(course: FollowUp, loaded: SharedMedia, task: RequestTask) -> None:
    """Encode and submit the next request of a reply, which may have the media of the first one."""
    if task.finished:
        return
    try:
        request = await task.admission.process(task.memory.body, course.next, task.head.owner)
        if request is None:
            raise InternalError("the reply is not finished, but has no further request")
        (encoding,) = await _encode(task, [request], task.admission.plan.encode, loaded)
        if not task.finished and task.parsed is not None:
            _submit(task, task.parsed, 1, encoding)
    except Exception as error:  # one client's request must not stop the others
        task.fail(serving_error(error))


COURSES: Mapping[type, Callable[[RequestTask, ParsedRequest, Any], Awaitable[None]]] = {
    WithoutEngine: _without_engine,
    FollowUp: _follow_up,
}
"""The functions for courses other than `generate`, by the type of the course, which is their last argument."""
