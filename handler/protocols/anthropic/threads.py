"""Threads: conversations that the server keeps, where it keeps any (`option.responses_store`).

Source: the types of Anthropic's Python package, 2.12.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from handler.core.errors import InvalidParameter, Unavailable
from handler.protocols.anthropic.api import Block, ThreadNotFound, ThreadsUnsupported
from handler.protocols.kernel.dialect import Keeping, ServerContext, Wanted, kept_items, too_long
from handler.protocols.kernel.readers import Named
from handler.protocols.kernel.schema import TEXT, Shape, nullable, record

_OWN = ("system", "tools")
"""What a thread is created with, and has until its end."""

THREAD: Shape = nullable(record({"type": {"enum": ["create", "continue"]}}, {"previous_message_id": TEXT}))
"""What `continued` reads."""


def read_wanted(body: Any, *, keeps: bool) -> Wanted | None:
    """Return what a body needs of the messages that are kept; what is wrong with it `continued` says."""
    thread = body.get("thread") if isinstance(body, dict) else None
    if not isinstance(thread, dict):
        return None
    previous = thread.get("previous_message_id")
    return Wanted("thread", keeps, previous if isinstance(previous, str) and thread.get("type") == "continue" else "")


def continued(body: Mapping[str, Any], context: ServerContext) -> Mapping[str, Any]:
    """Return a body with what its thread was created with; the messages before are in `context.recalled`.

    Raises:
        ThreadsUnsupported: nothing is kept.
        ThreadNotFound: the message before is not kept.
        InvalidParameter: `thread` is wrong, or the body has what only its thread has.
    """
    if (value := body.get("thread")) is None:
        return body
    if context.keeper is None and isinstance(value, dict):
        raise ThreadsUnsupported(
            "thread: is not supported: no conversations are kept (option.responses_store); send all messages"
        )
    thread = Named("thread", value)
    if not isinstance(value, dict) or value.get("type") not in ("create", "continue"):
        raise thread.refused("must be an object with a 'type' that is create or continue")
    names = {"type"} if value["type"] == "create" else {"type", "previous_message_id"}
    if value.keys() != names or not isinstance(value.get("previous_message_id", ""), str):
        raise thread.refused("to continue needs 'previous_message_id', a string, and to create nothing else")
    if value["type"] == "create":
        return body
    previous, state = Named("thread.previous_message_id", value["previous_message_id"]), context.recalled.state
    if state == "too_long":
        raise too_long(previous, "the messages before", context.config.max_request_size)
    if state != "found" or not previous.value:
        raise ThreadNotFound(f"{previous}: no such message is kept, or not all before it; send all messages")
    for name in _OWN:
        if body.get(name) is not None:
            raise InvalidParameter(f"{name}: a thread keeps what it was created with; leave it out, or create another")
    return {**body, **context.recalled.head}


class ThreadKeeping:
    """Keeps the answer of one request in a thread."""

    def __init__(self, keeping: Keeping, head: Mapping[str, Any]) -> None:
        self._keeping, self._head = keeping, head

    def end(self, id: str, content: Sequence[Block]) -> None:
        """Keep the message, which has ended. It blocks.

        Raises:
            Unavailable: it could not be kept, so the thread cannot be gone on with.
        """
        if not self._keeping.end(id, self._head, [{"role": "assistant", "content": content}] if content else []):
            raise Unavailable("the message could not be kept in its thread; send it again, or all messages")


def make_keeping(body: Mapping[str, Any], context: ServerContext) -> ThreadKeeping | None:
    """Return what keeps the answer to a body that was read; None where it is in no thread."""
    thread = body.get("thread")
    if thread is None or context.keeper is None:
        return None
    previous = thread.get("previous_message_id", "")
    head = {} if previous else {name: body[name] for name in _OWN if body.get(name) is not None}
    *given, _ = kept_items([*body["messages"], head])  # the head as well can be written
    return ThreadKeeping(Keeping(context.keeper, "thread", previous, given), head)
