"""What has been generated so far for one sequence: ids in, shown tokens out."""

from __future__ import annotations

from collections.abc import Sequence

from handler.core import Finish, Sampling, Token
from handler.text import Detokenizer, Prompt, StopMatcher


class Generation:
    """Turns one sequence's ids into tokens with text, and notices its end.

    Stop strings are found here and not in the engines, so that they mean the same with all of them; when `feed`
    reports a STOP that the engine does not know of, the caller cancels the sequence there.

    Attributes:
        num_tokens: tokens generated, the ending one included.
        logprob: sum of the tokens' log-probabilities (0.0 for tokens that have none).
        text: everything shown so far.
    """

    def __init__(self, prompt: Prompt, sampling: Sampling) -> None:
        self._detokenizer = Detokenizer(prompt.vocabulary, skip_special=sampling.skip_special_tokens)
        self._special = prompt.vocabulary.special
        self._stops = StopMatcher(sampling.stop, include=sampling.include_stop) if sampling.stop else None
        self._ending = frozenset(sampling.stop_token_ids)
        self._show_ending = sampling.include_stop
        self._texts: list[str] = []
        self.num_tokens = 0
        self.logprob = 0.0

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def feed(
        self, ids: Sequence[int], logprobs: Sequence[float | None], finish: Finish | None
    ) -> tuple[list[Token], Finish | None]:
        """The tokens to show for `ids`, and why the sequence ended, if it did.

        Args:
            ids: newly generated ids, in order; may be empty when `finish` is set.
            logprobs: one for each id.
            finish: what the engine says of the sequence's end after these ids.
        """
        tokens: list[Token] = []
        for id, logprob in zip(ids, logprobs, strict=True):
            text = "" if id in self._ending and not self._show_ending else self._detokenizer.feed(id)
            if self._stops is not None:
                text = self._stops.feed(text)
            self.num_tokens += 1
            self.logprob += logprob or 0.0
            if text:
                self._texts.append(text)
            tokens.append(Token(id, text, logprob, id in self._special))
            if self._stops is not None and self._stops.matched:
                return tokens, Finish.STOP
        if finish is not None:
            self._flush(tokens)
        return tokens, finish

    def _flush(self, tokens: list[Token]) -> None:
        """Held-back text goes out with the last token: the tokens' texts always add up to `text`."""
        text = self._detokenizer.flush() + (self._stops.flush() if self._stops is not None else "")
        if not text:
            return
        self._texts.append(text)
        if tokens:
            tokens[-1] = tokens[-1]._replace(text=tokens[-1].text + text)
        else:  # the engine ended the sequence without a token: the text still has to arrive
            tokens.append(Token(-1, text, None, False))
