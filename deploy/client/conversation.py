"""A conversation with a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deploy.client.predictor import Predictor


class Conversation:
    """A conversation.

    Args:
        system: the system message; empty: none.
        parameters: parameters of every request: `max_tokens`, `temperature`, ...

    Attributes:
        turns: messages of the user and the model, in OpenAI's form.
    """

    def __init__(self, predictor: Predictor, system: str = "", parameters: Mapping[str, Any] | None = None) -> None:
        self._predictor = predictor
        self._parameters = dict(parameters or {})
        self.system = system
        self.turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.turns

    def reset(self) -> None:
        """Forget the turns; the system message stays."""
        self.turns.clear()

    def ask(self, text: str) -> Iterator[str]:
        """Yield the answer's pieces as they arrive.

        An interrupted answer is kept as far as it came. A failed one is not kept, so that the user can ask again.

        Raises:
            RequestFailed: the request failed.
        """
        turn = {"role": "user", "content": text}
        pieces: list[str] = []
        try:
            with self._predictor.chat([*self.messages, turn], stream=True, **self._parameters) as stream:
                for piece in stream.text():
                    pieces.append(piece)
                    yield piece
        except (KeyboardInterrupt, GeneratorExit):
            self._keep(turn, pieces)
            raise
        self._keep(turn, pieces)

    def _keep(self, turn: dict[str, str], pieces: list[str]) -> None:
        self.turns += [turn, {"role": "assistant", "content": "".join(pieces)}]
