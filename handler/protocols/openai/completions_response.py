"""OpenAI's text completions from tokens: text, columns of log-probabilities, the prompt on demand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from handler.core.framing import JSON, SSE_DONE, Framing
from handler.core.values import Delta, Finish, Request, Token
from handler.protocols.kernel.base import Reply
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.kernel.reply import SequenceOutput
from handler.protocols.openai.answers import (
    OpenAiTextAnswer,
    OpenAiTextChoice,
    OpenAiTextChunk,
    StreamUsage,
    TextLogprobs,
    TokenIds,
)
from handler.protocols.openai.errors import ERRORS
from handler.protocols.openai.response import REASONS, Choice, Head, Stream, Usage, WholeAnswer


class TextFormat(NamedTuple):
    """The options of text completions.

    Attributes:
        logprobs: the number of alternatives to each token; None: no log-probabilities.
        prompts: the text before each request's choices; "" unless `echo` asks for it.
        num_returned: choices of each request.
        token_ids: each choice has the ids of its new tokens, as vLLM's.
    """

    logprobs: int | None
    prompts: Sequence[str]
    num_returned: int = 1
    token_ids: bool = False

    def columns(self, prefill: Sequence[Token], tokens: Sequence[Token], at: int) -> TextLogprobs | None:
        """Render log-probabilities as columns; the text begins at character `at`.

        The prompt's first token has neither a probability nor alternatives.
        """
        if self.logprobs is None:
            return None
        offsets = []
        visible = [*prefill, *[token for token in tokens if token.id >= 0]]
        for token in visible:
            offsets.append(at)
            at += len(token.text)
        tops = [None] * len(prefill[:1]) + [self._top(token) for token in visible[len(prefill[:1]) :]]
        return {
            "tokens": [token.text for token in visible],
            "token_logprobs": [token.logprob for token in visible],
            "top_logprobs": tops if self.logprobs else None,
            "text_offset": offsets,
        }

    def ids(self, tokens: Sequence[Token]) -> TokenIds:
        """Render a choice's new ids, where they are asked for."""
        return {"token_ids": [token.id for token in tokens if token.id >= 0]} if self.token_ids else {}

    def _top(self, token: Token) -> dict[str, float | None]:
        """Map the texts of alternatives and the chosen token to log-probabilities; of equal texts the most likely."""
        logprobs: dict[str, float | None] = {}
        for alternative in (*token.top, token):
            logprobs.setdefault(alternative.text, alternative.logprob)
        return logprobs


class TextChoice(Choice):
    __slots__ = ("at", "prefill", "prompt")

    def __init__(self, index: int, prompt: str) -> None:
        super().__init__(index)
        self.prompt = prompt
        self.at = 0  # characters shown
        self.prefill: Sequence[Token] = ()  # the prompt's tokens, which its first part shows


class TextStream(Stream[TextChoice]):
    def __init__(
        self,
        head: Head,
        format: TextFormat,
        num_sequences: int,
        wanted: Usage,
        framing: Framing = SSE_DONE,
        errors: ErrorFormat = ERRORS,
    ) -> None:
        prompts = [prompt for prompt in format.prompts for _ in range(num_sequences)]
        choices = [TextChoice(index, prompt) for index, prompt in enumerate(prompts)]
        super().__init__(head, choices, wanted, len(format.prompts), framing, errors)
        self._format = format

    def _take(self, place: int, delta: Delta) -> None:
        super()._take(place, delta)
        self._choices[place].prefill = delta.prefill or ()

    def _value(self, choices: list[Any], counts: StreamUsage) -> Mapping[str, object]:
        chunk: OpenAiTextChunk = {**self._fields.value("text_completion"), "choices": choices, **counts}
        return chunk

    @property
    def _is_plain(self) -> bool:
        return self._format.logprobs is None and not self._format.token_ids

    def _text_part(self, choice: TextChoice, text: str) -> OpenAiTextChoice:
        return {"index": choice.index, "text": text, "logprobs": None, "finish_reason": None}

    def _part(self, choice: TextChoice, token: Token, finish: Finish | None) -> OpenAiTextChoice:
        prefill = () if choice.begun else choice.prefill
        text = token.text if choice.begun else choice.prompt + token.text
        at = choice.at if choice.begun or prefill else len(choice.prompt)
        choice.at += len(text)
        return {
            "index": choice.index,
            "text": text,
            "logprobs": self._format.columns(prefill, [token], at),
            "finish_reason": REASONS[finish],
            **self._format.ids([token]),
        }


class TextDocument(WholeAnswer):
    """The whole answer: the choices of each prompt in turn. `best_of` ranks them by mean log-probability."""

    def __init__(self, head: Head, format: TextFormat, num_sequences: int, framing: Framing = JSON) -> None:
        super().__init__(head, len(format.prompts), num_sequences, framing)
        self._format = format

    def _document(self) -> OpenAiTextAnswer:
        return {**self._head.value("text_completion"), "choices": self._choices(), "usage": self._usage()}

    def _choices(self) -> list[OpenAiTextChoice]:
        choices: list[OpenAiTextChoice] = []
        for number, prompt in enumerate(self._format.prompts):
            tries = self._sequences[number * self._each : (number + 1) * self._each]
            prefill = tries[0].prefill
            if self._format.num_returned < self._each:
                tries = sorted(tries, key=lambda sequence: sequence.mean_logprob, reverse=True)[
                    : self._format.num_returned
                ]
            choices += [
                self._choice(len(choices) + place, prompt, sequence, prefill) for place, sequence in enumerate(tries)
            ]
        return choices

    def _choice(self, index: int, prompt: str, sequence: SequenceOutput, prefill: Sequence[Token]) -> OpenAiTextChoice:
        at = 0 if prefill else len(prompt)
        return {
            "index": index,
            "text": prompt + sequence.text,
            "logprobs": self._format.columns(prefill, sequence.tokens, at),
            "finish_reason": REASONS[sequence.finish],
            **self._format.ids(sequence.tokens),
        }


def completion_of(request: Request, head: Head, *, streams: bool) -> Reply:
    """Return the reply that answers one prompt as a text completion, in whatever dialect the prompt came.

    `details` become log-probabilities, the full text is `echo`.
    """
    sampling = request.sampling
    prompt = request.prompt if request.full_text else ""
    format = TextFormat(1 if request.details else None, [prompt], sampling.n)
    if streams:
        return TextStream(head, format, sampling.num_sequences, Usage())
    return TextDocument(head, format, sampling.num_sequences)
