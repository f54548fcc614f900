"""The courses of responses that the engine does not create by running each of their requests once."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from handler.core.errors import InternalError, serving_error
from handler.core.values import Delta
from handler.protocols.kernel.dialect import FollowUp, ParsedRequest, WithoutEngine
from handler.serving.request.plan import SharedMedia

if TYPE_CHECKING:
    from handler.serving.request.task import RequestTask


async def _without_engine(task: RequestTask, parsed: ParsedRequest, course: WithoutEngine, _: SharedMedia) -> bool:
    """Respond, and then stop the running requests of the same owner for which the client has set an id."""
    await task.encode(parsed.requests, task.admission.plan.tokenize, [], take=course.take)
    task.feed_and_flush(0, Delta(0, 0, ()))
    for other in [*task.admission.tasks] if course.stops else ():
        if other.is_of(course.stops, task.head.owner):
            other.stop()
    return False


async def _follow_up(task: RequestTask, parsed: ParsedRequest, course: FollowUp, loaded: SharedMedia) -> bool:
    """Begin the next request of the reply when the engine has finished the first one."""
    task.hold(loaded.clear)
    task.pause = lambda that: that.driver.soon(lambda: that.begin(_next(course, loaded, that)))  # after this step
    return True


async def _next(course: FollowUp, loaded: SharedMedia, task: RequestTask) -> None:
    """Encode and submit the next request of a reply, which may have the media of the first one."""
    if task.finished:
        return
    try:
        request = await task.admission.process(task.memory.body, course.next, task.head.owner)
        if request is None:
            raise InternalError("the reply is not finished, but has no further request")
        (encoding,) = await task.encode([request], task.admission.plan.encode, loaded)
        if not task.finished:
            put, prompt = functools.partial(task.feed, 1), task.start(1, encoding)
            id = task.driver.submit(encoding.request, prompt, put, owner=task.head.owner, follows=True)
            task.hold(functools.partial(task.driver.cancel, id))
    except Exception as error:  # one client's request must not stop the others
        task.fail(serving_error(error))


COURSES: Mapping[type, Callable[[RequestTask, ParsedRequest, Any, SharedMedia], Awaitable[bool]]] = {
    WithoutEngine: _without_engine,
    FollowUp: _follow_up,
}
"""Functions that begin a course, by its type. They return whether the engine runs the requests.

The last argument is the list of the media that are loaded for the requests.
"""
