"""Choice of a replica for a request: by its session, its conversation, else by the tokens that are to come."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from handler.core.text import Prompt
from handler.core.values import Request

_MOST_PROMPTS = 1024
_MOST_CHARACTERS = 1 << 24  # of all prompts that are remembered
_MOST_SESSIONS = 10_000
_TOLERANCE = 4  # the part of the slots by which a conversation's replica may be busier: a fourth

_OPEN_THOUGHT = re.compile(r"(?:<think>|</think>|\s)+$")
"""How a chat template may begin an answer; it leaves that out of later turns."""
_LONGEST_THOUGHT = 64  # characters that may match


class Load(NamedTuple):
    """What a replica that takes a request has to do.

    Attributes:
        replica: its number.
        num_sequences: those that it computes.
        num_tokens: that are to come, at most; a prompt that it has not begun counts too.
    """

    replica: int
    num_sequences: int
    num_tokens: int


class _Beginning(NamedTuple):
    """What the later turns of a conversation begin with: adapter, digests of images, text."""

    adapter: int
    media: tuple[str, ...]
    text: str

    def continues(self, earlier: _Beginning) -> bool:
        """Whether this begins with an earlier one."""
        return (
            self.adapter == earlier.adapter
            and self.text.startswith(earlier.text)
            and self.media[: len(earlier.media)] == earlier.media
        )


class Router:
    """Chooses, and remembers what it has chosen.

    1. A session stays on its replica.
    2. A prompt that begins with an earlier one goes where the longest such prompt went, as its KV cache may be there:
       it is a conversation's next turn. It moves if that replica runs more sequences than the idlest one, by over a
       fourth of the slots. A text to embed or to compare has no next turn.
    3. All else goes where the fewest tokens are to come; of equal ones, where the last request came longest ago.

    Args:
        slots: sequences that a replica computes at once.
        follows_prompts: rule 2 holds.
    """

    def __init__(self, slots: int, *, follows_prompts: bool = True) -> None:
        self._tolerance = slots // _TOLERANCE
        self._follows_prompts = follows_prompts
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._prompts: OrderedDict[_Beginning, int] = OrderedDict()  # replica by beginning, oldest first
        self._num_characters = 0
        self._order: dict[int, int] = {}  # replica -> number of its last request
        self._num_chosen = 0

    def choose(self, request: Request, prompt: Prompt, loads: Sequence[Load]) -> int:
        """Return the number of one of the replicas.

        Args:
            loads: those of the replicas that take the request; at least one.
        """
        start = _beginning(prompt) if self._follows_prompts and request.pooling is None else ""
        key = None  # all begin with nothing
        if start:
            digests = prompt.media.digests if prompt.media else ()
            key = _Beginning(request.adapter.id if request.adapter else 0, digests, start)
        replica = self._of_session(request.session, loads)
        if replica is None and key is not None:
            replica = self._of_prompt(key, loads)
        if replica is None:
            replica = min(loads, key=lambda load: (load.num_tokens, self._order.get(load.replica, 0))).replica
        self._num_chosen += 1
        self._order[replica] = self._num_chosen
        if request.session:
            self._sessions[request.session] = replica
            self._sessions.move_to_end(request.session)
            if len(self._sessions) > _MOST_SESSIONS:
                self._sessions.popitem(last=False)
        if key is not None:
            self._remember(key, replica)
        return replica

    def _of_session(self, session: str, loads: Sequence[Load]) -> int | None:
        replica = self._sessions.get(session)
        return replica if any(load.replica == replica for load in loads) else None

    def _of_prompt(self, prompt: _Beginning, loads: Sequence[Load]) -> int | None:
        least = min(load.num_sequences for load in loads)
        near = {load.replica for load in loads if load.num_sequences <= least + self._tolerance}
        earlier = (
            (len(start.text), replica)
            for start, replica in self._prompts.items()
            if replica in near and prompt.continues(start)
        )
        return max(earlier, default=(0, None))[1]

    def _remember(self, key: _Beginning, replica: int) -> None:
        if key not in self._prompts:
            self._num_characters += len(key.text)
        self._prompts[key] = replica
        self._prompts.move_to_end(key)
        while len(self._prompts) > _MOST_PROMPTS or self._num_characters > _MOST_CHARACTERS:
            start, _ = self._prompts.popitem(last=False)
            self._num_characters -= len(start.text)


def _beginning(prompt: Prompt) -> str:
    """Return what a later turn of the conversation begins with; of a prompt without text its ids, as characters."""
    text = prompt.text or "".join(map(chr, prompt.ids))
    return text[:-_LONGEST_THOUGHT] + _OPEN_THOUGHT.sub("", text[-_LONGEST_THOUGHT:])
