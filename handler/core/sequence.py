"""State of one sequence: turns generated ids into tokens with text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from handler.core.text import Detokenizer, Prompt, StopMatcher, Vocabulary
from handler.core.values import Finish, Sampling, Token, new_token


class _NoTexts(Sequence[None]):
    """The texts of a sequence whose ids all have to be pushed."""

    def __len__(self) -> int:
        return 0

    def __getitem__(self, id: Any) -> Any:
        return None


_NO_TEXTS = _NoTexts()


class SequenceState:
    """Turns one sequence's ids into tokens with text, and finds its end.

    Stop strings are found here, so that they mean the same with all engines. The caller cancels such a sequence in the
    engine. The texts of all tokens add up to the answer.

    Attributes:
        texts: the text of each id now; None where the id has to be pushed: each id has to while stop strings are
            looked for, or part of a character has come.
        special: ids that are control marks.
        stopped: a stop string has ended the sequence.
    """

    __slots__ = (
        "_detokenizer",
        "_ending",
        "_stops",
        "_vocabulary",
        "_watched",
        "special",
        "stopped",
        "texts",
    )

    def __init__(self, prompt: Prompt, sampling: Sampling) -> None:
        self._detokenizer = Detokenizer(
            prompt.vocabulary, skip_special=sampling.skip_special_tokens, marks=sampling.marks
        )
        self._vocabulary = prompt.vocabulary
        self.special = prompt.vocabulary.special
        self._stops = (
            StopMatcher(sampling.stop, include=sampling.include_stop, thoughts=sampling.thoughts)
            if sampling.stop
            else None
        )
        self._ending = frozenset() if sampling.include_stop else frozenset(sampling.stop_token_ids)
        self._watched = self._stops is not None or bool(self._ending)
        self.texts = self._texts()
        self.stopped = False

    def _texts(self) -> Sequence[str | None]:
        return _NO_TEXTS if self._watched or self._detokenizer.pending else self._detokenizer.texts

    def push(self, id: int, logprob: float | None) -> Token:
        """Add a token that is not the engine's last; `stopped` may become true."""
        text = "" if id in self._ending else self._detokenizer.feed(id)
        if self._stops is not None:
            text = self._stops.feed(text)
            self.stopped = self._stops.matched
        self.texts = self._texts()
        return new_token((id, text, logprob, id in self.special, ()))

    def feed(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float | None],
        finish: Finish | None,
        tops: Sequence[Sequence[tuple[int, float]]] | None = None,
    ) -> tuple[list[Token], Finish | None]:
        """Add tokens; return them with their texts, and why the sequence ended, if it did.

        Args:
            ids: new ids; may be empty with `finish`.
            logprobs: one for each id.
            finish: why the engine ended the sequence after these ids.
            tops: for each id the most likely alternatives.
        """
        tokens: list[Token] = []
        for index, (id, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            text = self.texts[id]
            token = self.push(id, logprob) if text is None else new_token((id, text, logprob, id in self.special, ()))
            tokens.append(token if tops is None else token._replace(top=alternatives(self._vocabulary, tops[index])))
            if self.stopped:
                return tokens, Finish.STOP
        if finish is not None:
            self._flush(tokens)
        return tokens, finish

    def _flush(self, tokens: list[Token]) -> None:
        """Add the text that was held back to the last token."""
        text = self._stops.flush() if self._stops is not None else ""
        if not text:
            return
        if tokens:
            tokens[-1] = tokens[-1]._replace(text=tokens[-1].text + text)
        else:  # the engine ended the sequence without a token
            tokens.append(Token(-1, text, None, False))


def alternatives(vocabulary: Vocabulary, top: Sequence[tuple[int, float]]) -> tuple[Token, ...]:
    """Make tokens of the most likely alternatives to one."""
    return tuple(Token(id, vocabulary.text(id), logprob, id in vocabulary.special) for id, logprob in top)


def prompt_tokens(
    prompt: Prompt, logprobs: Sequence[float | None], tops: Sequence[Sequence[tuple[int, float]]] | None
) -> list[Token]:
    """Make tokens of a prompt's ids.

    Args:
        logprobs: one for each id.
        tops: for each id the most likely alternatives.
    """
    vocabulary = prompt.vocabulary
    return [
        Token(id, vocabulary.text(id), logprob, id in vocabulary.special, alternatives(vocabulary, top))
        for id, logprob, top in zip(prompt.ids, logprobs, tops or [()] * len(prompt.ids), strict=True)
    ]
