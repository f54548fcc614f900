"""Tokenizes parsed requests, and checks their limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from handler.core.errors import AnswerTooLong, InvalidParameter, InvalidPayload, PromptTooLong
from handler.core.media import MediaSource, Medium, media_of
from handler.core.text import Prompt, check_ids, prompt_of_ids
from handler.core.values import Request
from handler.engines.base import EngineInfo, Tokenizer
from handler.engines.huggingface.pooling import encode_pooled
from handler.engines.structured_output.validator import StructuredOutputValidator
from handler.serving.labels import LabelEncoder
from handler.serving.media.loader import place_media

MAX_LOGITS = 1 << 20  # maximum numbers in a response: about 20 MB of JSON; SageMaker's limit is 25 MB
LONG = 1 << 18  # minimum characters or ids of a long prompt


class Encoder:
    """Encodes parsed requests for the engine. Thread-safe.

    Args:
        tokenizer: the tokenizer of the model.
        engine_info: function that returns the description of the engine, or None while the engine is loading.
        max_input_len: the maximum number of tokens in a prompt, or None if only the engine limits it.
        validator: validator of structured output, or None if no validation is needed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        engine_info: Callable[[], EngineInfo | None],
        max_input_len: int | None,
        validator: StructuredOutputValidator | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._labels = LabelEncoder(tokenizer)
        self._engine_info = engine_info
        self._max_input_len = max_input_len
        self.validator = validator

    def encode(self, request: Request, media: Sequence[Medium] = ()) -> tuple[Request, Prompt]:
        """Tokenize a request and check its limits.

        Returns:
            The request, without its prompt and with the final maximum number of new tokens; and the prompt, truncated
            if requested.

        Raises:
            InvalidPayload: the prompt exceeds a limit. Engines would truncate it silently, or fail later.
            InvalidParameter: a parameter exceeds a limit.
        """
        if request.pools_text:
            return encode_pooled(request, self._tokenizer, self._engine_info(), self._max_input_len)
        request, prompt = self._edited(request, media)
        if request.read_prompt is not None:
            request = request.read_prompt(request, prompt.text)
        if request.pooling is not None:
            request = self._labels.encode(request, prompt)
        self._check(request, prompt)
        return self._filled(request, prompt), prompt

    def tokenize(self, request: Request, media: Sequence[Medium] = ()) -> Prompt:
        """Return the prompt with its token ids and media, truncated if requested.

        Raises:
            InvalidPayload: a field is invalid. The message contains its name.
            InvalidParameter: a parameter is invalid. The message contains its name.
            PromptTooLong: the prompt is too long to be tokenized.
        """
        if request.pools_text:
            return encode_pooled(request, self._tokenizer)[1]
        return self._edited(request, media)[1]

    def _edited(self, request: Request, media: Sequence[Medium]) -> tuple[Request, Prompt]:
        """Return the request that the engine gets, and its prompt."""
        if request.edit is None:
            return request, self._tokenize(request, media)
        return request.edit(request, partial(self._tokenize_edited, request.media, media))

    def _tokenize_edited(self, sources: Sequence[MediaSource], media: Sequence[Medium], request: Request) -> Prompt:
        """Return the prompt of a request with some of the media of the original request, in their order."""
        if not media:
            return self._tokenize(request, ())
        edited = media_of(request.media, sources, media)
        assert edited is not None, "an edit adds no media"
        return self._tokenize(request, edited)

    def _tokenize(self, request: Request, media: Sequence[Medium]) -> Prompt:
        if request.prompt_ids is not None:
            prompt = prompt_of_ids(request, request.prompt_ids, self._tokenizer.vocabulary)
        else:
            try:
                if request.messages:
                    prompt = self._tokenizer.encode_chat(request.messages, request.tools, request.template)
                else:
                    prompt = self._tokenizer.encode(request.prompt)
            except PromptTooLong as error:
                raise error.named(request.names.prompt, self.max_tokens()) from None
            if media:
                return place_media(request, prompt, media, self._tokenizer.media_tokens)
        if request.truncation is None:
            return prompt
        most = request.truncation.most or self._room(request)
        return prompt if most is None else prompt._replace(ids=prompt.ids[-most:])

    def _room(self, request: Request) -> int | None:
        """Return the number of prompt tokens that leave room for the response, or None before an engine is loaded."""
        limit = self.max_tokens()
        if limit is None:
            return None
        return max(1, min(limit - request.num_needed, self._max_input_len or limit))

    def _check(self, request: Request, prompt: Prompt) -> None:
        num_prompt, names = len(prompt.ids), request.names
        if not num_prompt:
            raise InvalidPayload(f"'{names.prompt}' has no tokens")
        sampling, vocabulary = request.sampling, prompt.vocabulary
        check_ids(names.stop_token_ids, sampling.stop_token_ids, vocabulary)
        check_ids(names.bad_token_ids, sampling.bad_token_ids, vocabulary)
        check_ids(names.allowed_token_ids, sampling.allowed_token_ids, vocabulary)
        if sampling.logit_bias:
            check_ids(names.logit_bias, [id for id, _ in sampling.logit_bias], vocabulary)
        if sampling.return_context_logits or sampling.return_generation_logits:
            _check_logits(request, num_prompt, len(vocabulary))
        if (info := self._engine_info()) is not None:  # otherwise no engine was ever loaded: the host refuses requests
            self._check_length(request, num_prompt, info.max_total_tokens)

    def _check_length(self, request: Request, num_prompt: int, limit: int) -> None:
        most = min(limit - 1, self._max_input_len or limit)
        if num_prompt > most:
            raise PromptTooLong(request.names.prompt, num_prompt, most, limit=limit)
        if num_prompt + request.num_needed > limit:
            raise AnswerTooLong(request.names.max_new_tokens, num_prompt, request.num_needed, limit)

    def _filled(self, request: Request, prompt: Prompt) -> Request:
        if request.messages or request.media or request.tools:
            request = request._replace(messages=(), media=(), tools=(), edit=None)  # now part of the prompt
        limit, max_new_tokens = self.max_tokens(), request.sampling.max_new_tokens
        if limit is None or max_new_tokens <= (left := limit - len(prompt.ids)):
            return request
        return request._replace(sampling=request.sampling._replace(max_new_tokens=left))

    def max_tokens(self) -> int | None:
        """Return the maximum number of tokens in a prompt and its response, or None before an engine is loaded."""
        info = self._engine_info()
        return None if info is None else info.max_total_tokens


def check_structured_output(request: Request, reason: str) -> None:
    """Raise InvalidParameter if `why`, the result of validating the structured output, is not empty."""
    if reason:
        raise InvalidParameter(f"{request.names.structured_output}: the engine cannot apply it: {reason}")


def is_long(request: Request) -> bool:
    """Return whether a prompt takes so long to tokenize that other requests must not wait for it."""
    contents = (message["content"] for message in request.messages)
    return sum(map(_length, (request.prompt, request.pair or "", request.prompt_ids or (), *contents))) >= LONG


def _length(content: Sequence[Any]) -> int:
    """Return the length of a string, of a sequence of ids, or of the text parts of a message."""
    return len(content) if not isinstance(content, list) else sum(len(part.get("text", "")) for part in content)


def _check_logits(request: Request, num_prompt: int, num_ids: int) -> None:
    """Check that the logits of a response fit into memory.

    Args:
        num_prompt: number of prompt tokens.
        num_ids: number of ids in the vocabulary.

    Raises:
        InvalidParameter: there are too many logits.
    """
    sampling, names = request.sampling, request.names
    rows = num_prompt * sampling.return_context_logits
    rows += sampling.max_new_tokens * sampling.num_sequences * sampling.return_generation_logits
    if rows * num_ids > MAX_LOGITS:
        raise InvalidParameter(
            f"{names.logits}: {rows} rows of {num_ids} logits are too many for one response; at most "
            f"{MAX_LOGITS // num_ids} rows are allowed: shorten the prompt or reduce {names.max_new_tokens}"
        )
