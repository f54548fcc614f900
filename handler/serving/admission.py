"""Decode, parse and tokenize requests without holding up the event loop: small bodies inline, others on threads."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from handler.core.text import Prompt
from handler.core.values import Request
from handler.engines.base import Tokenizer
from handler.plugins.formatter_thread import FormatterThread
from handler.protocols.base import ParsedRequest, Schema
from handler.serving.large_bodies import LARGE, is_long
from handler.serving.preprocess import Decoded, Headers, Preprocessor, check_guide

T = TypeVar("T")

TOKENIZER_THREADS = 2
_PARSE_INLINE = 1 << 16  # bytes of a body, from which on it is parsed off the event loop
_TOKENIZE_INLINE = 1 << 13  # bytes of a body, from which on it is tokenized off a stepped loop


class Admission:
    """Belongs to the event loop's thread, and uses the tokenizer on others.

    Args:
        stepped: the loop runs in a host's steps only, so tokens of small bodies are made inline: a thread's result
            would come a step later.
    """

    def __init__(self, preprocessor: Preprocessor, tokenizer: Tokenizer, *, stepped: bool) -> None:
        self.preprocessor = preprocessor
        self._tokenizer = tokenizer
        self._tokenize_inline = _TOKENIZE_INLINE if stepped else 0
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenize")
        self.formatters: FormatterThread | None = None
        if preprocessor.runs_model_py:
            self.formatters = FormatterThread(asyncio.get_running_loop().call_soon_threadsafe)

    async def decode(self, body: bytes, headers: Headers, schema: Schema | None = None) -> Decoded:
        """Decode a body; a model.py's input formatter runs on its own thread.

        Args:
            schema: the route's own dialect.

        Raises:
            ServingError: as `Preprocessor.decode`.
        """
        decode = functools.partial(self.preprocessor.decode, body, headers, schema)
        if schema is None and self.formatters is not None and (title := self.preprocessor.input_formatter):
            decoded: Decoded = await asyncio.wrap_future(self.formatters.submit(title, decode))
            return decoded
        return await self.run(len(body), decode)

    async def parse(self, decoded: Decoded, size: int, headers: Headers, schema: Schema | None = None) -> ParsedRequest:
        """Parse what was decoded of a body of `size` bytes.

        Raises:
            ServingError: what the dialect says of a body that it refuses.
        """
        return await self.run(size, functools.partial(self.preprocessor.parse, decoded, headers, schema))

    async def encode(self, request: Request, size: int) -> tuple[Request, Prompt]:
        """Tokenize a request of a body of `size` bytes, and try its structured output.

        Raises:
            ServingError: the prompt does not fit, or the engine cannot follow the structured output.
        """
        if size < self._tokenize_inline:
            encoded = self.preprocessor.encode(request)
        else:
            submit = self.preprocessor.large_bodies.submit if is_long(request) else self._threads.submit
            encoded = await asyncio.wrap_future(submit(self.preprocessor.encode, request))
        if (trial := self.preprocessor.try_guide(request)) is not None:
            check_guide(request, await asyncio.wrap_future(trial))
        return encoded

    async def run(self, size: int, use: Callable[[], T]) -> T:
        """Call `use` on a body of `size` bytes: inline, on a thread, or on one for large bodies."""
        if size < _PARSE_INLINE:
            return use()
        if size < LARGE:
            return await asyncio.get_running_loop().run_in_executor(self._threads, use)
        return await asyncio.wrap_future(self.preprocessor.large_bodies.submit(use))

    async def with_tokenizer(self, use: Callable[[Tokenizer], T]) -> T:
        """Call `use` with the tokenizer, on a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, use, self._tokenizer)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.preprocessor.close()
        if self.formatters is not None:
            self.formatters.close()
