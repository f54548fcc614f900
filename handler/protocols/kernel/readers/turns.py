"""The turns of a chat whose messages come in pieces: those of one role in a row are one message."""

from __future__ import annotations

from typing import Any

from handler.core.media import MediaSource

_TEXTS = ("content", "reasoning_content")

Chat = list[dict[str, Any]]


def add_to_turn(chat: Chat, role: str, **parts: Any) -> None:
    """Add a text, a medium or a call to the last message if it is of the same role. `join_turns` comes at the end.

    A system message amid the others is the user's, between marks: most chat templates take one only as the first.
    """
    if role == "system" and chat and chat[-1]["role"] != "system":
        role, parts = "user", {"content": f"<system>\n{parts['content']}\n</system>"}
    if not chat or chat[-1]["role"] != role:
        chat.append({"role": role})
    for name, part in parts.items():
        chat[-1].setdefault(name, []).append(part)


def join_turns(chat: Chat) -> None:
    """Join the texts of each message with line ends; beside a medium they stay parts."""
    for message in chat:
        for name in _TEXTS:
            if not isinstance(parts := message.get(name), list):
                continue
            if any(isinstance(part, MediaSource) for part in parts):
                message[name] = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
            else:
                message[name] = "\n".join(parts)
        message.setdefault("content", "")
