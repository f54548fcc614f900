"""Fields of system messages within a conversation: how long a message is shown, and the effort that it sets.

Sources: "Mid-conversation system messages and tool changes" and "Per-message effort" in Anthropic's documentation, and
the types of its Python package 2.14.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from handler.core.errors import InvalidPayload
from handler.protocols.kernel.readers import NamedValue, only, show
from handler.protocols.kernel.schema import NULL, Shape, nullable, record

EFFORTS = ("low", "medium", "high", "xhigh", "max")

_NEXT_USER_MESSAGE = "next_user_message"
_CLEAR_AT = (None, _NEXT_USER_MESSAGE, "never")

SYSTEM_FIELDS: Mapping[str, Shape] = {
    "clear_at": {"enum": [*_CLEAR_AT]},
    "output_config": nullable(record({}, {"effort": {"enum": [*EFFORTS, None]}}, additionalProperties=NULL)),
}
"""The schemas of the fields that only system messages have."""


def hidden_messages(conversation: Sequence[Mapping[str, Any]], paths: Sequence[str]) -> set[int]:
    """Return the indices of the messages that the model does not see.

    These are the system messages that a later user message has cleared, and those that only set the effort.

    Args:
        conversation: all messages. Each has a valid role.
        paths: the path of each message, for error messages.

    Raises:
        InvalidPayload: one of the fields is invalid, or is in a message of another role.
        InvalidParameter: `output_config` is invalid.
    """
    roles = [message["role"] for message in conversation]
    last_user = max((index for index, role in enumerate(roles) if role == "user"), default=-1)
    hidden = set[int]()
    for index, (message, at) in enumerate(zip(conversation, paths, strict=True)):
        _check_role(message, at)
        sets_effort = NamedValue(f"{at}.output_config", message.get("output_config")).optional(_check_effort)
        if sets_effort and not message.get("content"):
            hidden.add(index)
        if _is_temporary(message, at):
            if roles[index + 1 : index + 2] == ["user"]:
                raise InvalidPayload(f"{at}.clear_at: the next message clears this one before the model sees it")
            if index < last_user:
                hidden.add(index)
    return hidden


def effort_of_messages(conversation: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the effort that system messages set for the response, or None if they set none.

    A message directly after new user input sets the effort for the response to this input. Elsewhere, it sets the
    effort from the next user input on. Tool results are not user input.
    """
    effort = next_effort = None
    follows_input = False
    for message in conversation:
        if message["role"] == "system":
            next_effort = (message.get("output_config") or {}).get("effort") or next_effort
        else:
            follows_input = message["role"] == "user" and (follows_input or _has_input(message.get("content")))
        if follows_input:
            effort = next_effort
    return effort


def _check_role(message: Mapping[str, Any], at: str) -> None:
    for name in SYSTEM_FIELDS if message["role"] != "system" else ():
        if message.get(name) is not None:
            raise InvalidPayload(f"{at}.{name} is allowed only in messages with the role system")


def _check_effort(value: Any) -> bool:
    """Check `output_config` of a message, and return whether it sets the effort."""
    if not isinstance(value, dict):
        raise ValueError("must be an object with 'effort'")
    only(value, "effort")
    if value.get("effort") not in (None, *EFFORTS):
        raise ValueError(f"must have an 'effort' that is one of {', '.join(EFFORTS)}")
    return value.get("effort") is not None


def _is_temporary(message: Mapping[str, Any], at: str) -> bool:
    """Return whether the next user message clears a message. Such a message may contain only text."""
    clear_at = message.get("clear_at")
    if clear_at not in _CLEAR_AT:
        raise InvalidPayload(f"{at}.clear_at={show(clear_at)}: must be {_NEXT_USER_MESSAGE} or never")
    if clear_at != _NEXT_USER_MESSAGE:
        return False
    if message.get("output_config") is not None:
        raise InvalidPayload(f"{at}.output_config is not allowed with clear_at; send it in a separate message")
    content = message.get("content")
    blocks = content if isinstance(content, list) else []
    if any(not isinstance(block, dict) or block.get("type") != "text" for block in blocks):
        raise InvalidPayload(f"{at}.content: a message with clear_at must contain only text")
    return True


def _has_input(content: Any) -> bool:
    """Return whether a user message contains more than tool results."""
    if not isinstance(content, list):
        return bool(content)
    return any(not isinstance(block, dict) or block.get("type") != "tool_result" for block in content)
