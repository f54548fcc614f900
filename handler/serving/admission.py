"""Find the dialect of a request's route; decode, parse and tokenize it without holding up the event loop."""

from __future__ import annotations

import asyncio
import functools
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

from handler.core.errors import InvalidPayload, Overloaded
from handler.core.media import Medium
from handler.core.text import Prompt
from handler.core.values import Request
from handler.plugins.formatter_thread import FormatterThread
from handler.protocols.kernel.body import decoded_size
from handler.protocols.kernel.dialect import NOTHING, Dialect, Recalled
from handler.serving.call import Decoded, Preprocessor, check_structured_output
from handler.serving.head import Head
from handler.serving.media.loader import MediaLoader, MediaRules, Reservation
from handler.serving.turns import LARGE, Share, TurnThreads, is_long

T = TypeVar("T")

TOKENIZER_THREADS = 2
MOST_TOKENIZING = 4 * TOKENIZER_THREADS
"""Maximum number of concurrent requests that only tokenize; those for answers need the same threads."""
_PARSE_INLINE = 1 << 16  # bytes of a body, from which on it is parsed off the event loop
_TOKENIZE_INLINE = 1 << 10  # bytes of a body, from which on it is tokenized off the event loop
_TOKENIZE_STEPPED = 1 << 13  # and off a stepped one, where a thread's result comes a step later

INVOKE = ("/invocations", "/predictions/{model}", "/predictions/{model}/{version}", "/models/{model}/invoke")
"""The configured dialect's routes."""


class InferenceRoutes:
    """The routes for inference of one model: path templates with `{model}` and `{version}`, each with its dialect.

    Args:
        model: the model's name.
        dialects: the other routes' dialects, by template.
    """

    def __init__(self, model: str, dialects: Mapping[str, Dialect]) -> None:
        self.dialects = dialects
        self._model = model
        templates: dict[str, Dialect | None] = {**dict.fromkeys(INVOKE), **dialects}
        names = (template for template in templates if "{version}" not in template)
        self._names = ", ".join(name.replace("{model}", model) for name in names)
        self._patterns = [(re.compile(_pattern(template)), dialect) for template, dialect in templates.items()]

    def has(self, path: str) -> bool:
        """Return whether a route for inference matches, whatever model the path names."""
        return any(pattern.fullmatch(path) for pattern, _ in self._patterns)

    def dialect(self, path: str) -> Dialect | None:
        """Return the dialect of a path; None is the configured one.

        Raises:
            InvalidPayload: there is no such route.
        """
        for pattern, dialect in self._patterns:
            match = pattern.fullmatch(path)
            if match is not None and self._is_served(match.groupdict()):
                return dialect
        raise InvalidPayload(self.refusal(path))

    def refusal(self, path: str) -> str:
        """Return the error for a path that is not a route for inference, with the routes that are."""
        return f"route={path[:64]} is not a route for inference; these are: {self._names}"

    def _is_served(self, names: Mapping[str, str]) -> bool:
        return names.get("model", self._model) == self._model and names.get("version", "1") == "1"


def _pattern(template: str) -> str:
    return re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", template)


class Admission:
    """Decodes, parses and tokenizes requests. Belongs to the event loop's thread, and tokenizes on others.

    Args:
        rules: for media.
        stepped: the loop runs in a host's steps only.
    """

    def __init__(self, preprocessor: Preprocessor, rules: MediaRules, *, stepped: bool) -> None:
        self.preprocessor = preprocessor
        self._media = MediaLoader(rules)
        self._num_tokenizing = 0
        self._stepped = stepped
        self._tokenize_inline = _TOKENIZE_STEPPED if stepped else _TOKENIZE_INLINE
        self._threads = TurnThreads(TOKENIZER_THREADS, TOKENIZER_THREADS - 1, "tokenize")
        self._loop = asyncio.get_running_loop()

    @functools.cached_property
    def formatters(self) -> FormatterThread:
        """Return the thread of model.py's and adapters' formatters; it starts with their first call."""
        return FormatterThread(self._loop.call_soon_threadsafe)

    async def decode(self, body: bytes, head: Head, memory: Share) -> Decoded:
        """Decode a body; a model.py's input formatter runs on its own thread.

        Args:
            memory: for the body and its decoded value.

        Raises:
            ServingError: as `Preprocessor.decode`, or there is no memory for it.
        """

        def decode() -> Decoded:
            memory.set(len(body) + decoded_size(body))
            return self.preprocessor.decode(body, head)

        if title := self.preprocessor.input_formatter(head):
            decoded: Decoded = await self._end(self.formatters.submit(title, decode))
            return decoded
        return await self.run(len(body), decode)

    async def recall(self, body: Decoded, size: int, head: Head) -> Recalled | None:
        """Load the stored answers that a body of `size` bytes refers to; None: it refers to none.

        Raises:
            ServingError: too many wait for them, or its own could not be kept.
        """
        store, dialect = self.preprocessor.store, self.preprocessor.dialect_of(head)
        if store is None or (wanted := await self.run(size, functools.partial(dialect.wanted, body.value))) is None:
            return None
        if wanted.keeps and size > store.most_bytes:
            raise InvalidPayload(
                f"the request has {size} bytes; at most {store.most_bytes} are stored (option.responses_max_bytes)"
            )
        owner = head.owner
        if wanted.keeps:
            store.check_calls()
        if wanted.keeps and store.may_be_full:
            await self._end(store.check_room(owner, size))
        if not wanted.previous and not wanted.items:
            return NOTHING
        return await self._end(store.recall(owner, wanted))

    async def encode(self, request: Request, size: int, head: Head) -> tuple[Request, Prompt]:
        """Load the media of a request of a body of `size` bytes, tokenize it, and check its structured output.

        Raises:
            ServingError: the prompt does not fit, a medium is not available, or the engine cannot follow the structured
                output.
        """
        media, reservation = await self._load_media(request, head)
        encoded = await self._tokenizing(self.preprocessor.encode, request, size, media)
        if reservation is not None and (placed := encoded[1].media) is not None:
            weakref.finalize(placed, reservation.give_back)  # they are copies
        if (trial := self.preprocessor.try_structured_output(request)) is not None:
            check_structured_output(request, await self._end(trial))
        return encoded

    async def tokenize(self, request: Request, size: int, head: Head, take: Callable[[Prompt], None]) -> None:
        """Hand the prompt to `take`, on the thread that tokenized it, however many tokens the model takes.

        Raises:
            Overloaded: as many as may are being tokenized.
            ServingError: the prompt cannot be tokenized.
        """
        media, _ = await self._load_media(request, head)  # they have limits of their own, and may take long
        if self._num_tokenizing >= MOST_TOKENIZING:
            raise Overloaded(f"{MOST_TOKENIZING} requests are being tokenized")
        self._num_tokenizing += 1
        try:
            use = functools.partial(self._tokenize_for, take)
            await self._tokenizing(use, request, size, media)
        finally:
            self._num_tokenizing -= 1

    def _tokenize_for(self, take: Callable[[Prompt], None], request: Request, media: Sequence[Medium]) -> None:
        take(self.preprocessor.tokenize(request, media))

    async def _load_media(self, request: Request, head: Head) -> tuple[Sequence[Medium], Reservation | None]:
        """Load a request's media; when the caller is cancelled, their fetches end."""
        if not request.media:
            return (), None
        return await self._end(self._media.load(request.media, head.owner))

    async def _tokenizing(
        self, use: Callable[[Request, Sequence[Medium]], T], request: Request, size: int, media: Sequence[Medium]
    ) -> T:
        """Call `use` on a request of a body of `size` bytes: inline, on a thread, or on one for long texts."""
        if size < self._tokenize_inline and not media:
            return use(request, media)
        call = functools.partial(use, request, media)
        size += sum(len(medium.data) for medium in media)  # they are copied
        return await self._end(self._submit(call, size, apart=is_long(request)))

    async def run(self, size: int, use: Callable[[], T]) -> T:
        """Call `use` on a body of `size` bytes: inline, on a thread, or on one for large bodies."""
        if size < _PARSE_INLINE:
            return use()
        return await self._end(self._submit(use, size, apart=size >= LARGE))

    def write(self, feed: Callable[[], bytes], *, keeps: bool) -> asyncio.Future[bytes] | None:
        """Write an answer's end on a thread; None if the loop runs in steps, which must not wait long.

        Args:
            keeps: the answer is stored, which must happen before the client gets it.
        """
        if keeps and self.preprocessor.store is not None:
            return self._end(self.preprocessor.store.write(feed))
        return None if self._stepped else self._end(self._threads.submit(feed, LARGE, slow=True))

    def _submit(self, call: Callable[[], T], size: int, *, apart: bool) -> Future[T]:
        """Make a call on a thread; those for small bodies go first. Long ones have threads of their own."""
        if apart:
            return self.preprocessor.large_bodies.submit(size, call)
        return self._threads.submit(call, size, slow=size >= LARGE)

    def _end(self, work: Future[T]) -> asyncio.Future[T]:
        """Return what to await. The loop is named, as it need not be running when a request begins."""
        return asyncio.wrap_future(work, loop=self._loop)

    def close(self) -> None:
        self._threads.shutdown()
        self._media.close()
        self.preprocessor.close()
        if "formatters" in vars(self):
            self.formatters.close()
