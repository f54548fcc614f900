"""Admit requests: find the dialect of the route, then decode, parse and tokenize without blocking the event loop."""

from __future__ import annotations

import asyncio
import functools
import re
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from handler.config.config import Config
from handler.core.errors import InvalidPayload, Overloaded
from handler.core.media import Medium
from handler.core.text import Prompt
from handler.core.values import Request
from handler.plugins.formatter_thread import FormatterThread
from handler.protocols import registry
from handler.protocols.kernel.body import inflate, value_size
from handler.protocols.kernel.dialect import Dialect
from handler.protocols.kernel.stored import NOTHING, Recalled
from handler.serving.encoder import check_structured_output, is_long
from handler.serving.head import Head
from handler.serving.large_bodies import LARGE
from handler.serving.media.loader import MediaLoader, media_rules
from handler.serving.preprocessor import Decoded, Preprocessor
from handler.serving.quota import BODY_MEMORY, Count, Quota, Share
from handler.serving.request.gate import BatchGate
from handler.serving.turns import Flow, TurnThreads

T = TypeVar("T")

Hold = Callable[[Callable[[], object]], None]
"""Type of a function that registers a callback for the end of a request (see `Life.hold`)."""

TOKENIZER_THREADS = 2
MOST_TOKENIZING = 4 * TOKENIZER_THREADS
"""Maximum number of concurrent requests that only tokenize. Requests for inference use the same threads."""
_PARSE_INLINE = 1 << 16  # bytes; larger bodies are parsed on a thread
_MEASURE_INLINE = 1 << 10  # lists and objects; the memory of a small body with more of them is only estimated
_TOKENIZE_INLINE = 1 << 10  # bytes; larger bodies are tokenized on a thread
_TOKENIZE_STEPPED = 1 << 13  # the same for a stepped loop, which sees a thread's result only in its next step
_ESTIMATED = 1 << 15  # bytes of memory; larger values are measured after they have been decoded

INVOKE = ("/invocations", "/predictions/{model}", "/predictions/{model}/{version}", "/models/{model}/invoke")
"""Routes that use the configured dialect."""

_SLASHES = re.compile("/{2,}")
_MODEL_IDS = re.compile("/+v1/+models/(?=/*[^/])")


def canonical_path(path: str) -> str:
    """Return a path without repeated slashes and without a slash at its end.

    Clients add such slashes when they join a base URL and a path. A redirect, as in Starlette, would lose the body or
    the key with some clients, and name the wrong scheme behind a proxy. In `/v1/models/{id}`, the ID keeps its slashes,
    because it may be a directory.
    """
    if not path.endswith("/") and "//" not in path:
        return path
    if ids := _MODEL_IDS.match(path):
        return f"/v1/models/{path[ids.end() :]}"
    return _SLASHES.sub("/", path).rstrip("/") or "/"


class InferenceRoutes:
    """The inference routes of one model: path templates that contain `{model}` and `{version}`, and their dialects.

    Args:
        models: names of the model, starting with its primary name.
        dialects: dialects of all routes except `INVOKE`, by path template.
    """

    def __init__(self, models: Sequence[str], dialects: Mapping[str, Dialect]) -> None:
        self.dialects = dialects
        self._models = models
        templates: dict[str, Dialect | None] = {**dict.fromkeys(INVOKE), **dialects}
        names = (template for template in templates if "{version}" not in template)
        self._names = ", ".join(name.replace("{model}", models[0]) for name in names)
        self._patterns = [(re.compile(_pattern(template)), dialect) for template, dialect in templates.items()]

    def has(self, path: str) -> bool:
        """Return whether the path matches an inference route, even if the model in the path is not served."""
        canonical = canonical_path(path)
        return any(pattern.fullmatch(canonical) for pattern, _ in self._patterns)

    def dialect(self, path: str) -> Dialect | None:
        """Return the dialect of a path, or None for the configured dialect.

        Raises:
            InvalidPayload: no route matches the path.
        """
        canonical = canonical_path(path)
        for pattern, dialect in self._patterns:
            match = pattern.fullmatch(canonical)
            if match is not None and self._is_served(match.groupdict()):
                return dialect
        raise InvalidPayload(self.refusal(path))

    def refusal(self, path: str) -> str:
        """Return the error message for a path that is not an inference route. It lists the routes without versions."""
        return f"route={path[:64]} is not a route for inference; available routes: {self._names}"

    def _is_served(self, names: Mapping[str, str]) -> bool:
        return names.get("model", self._models[0]) in self._models and names.get("version", "1") == "1"


def _pattern(template: str) -> str:
    return re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", template)


class Admission:
    """Decodes, parses and tokenizes requests. All methods must be called on the event loop thread.

    Args:
        gate: gate for dynamic batches, which requests must pass before submission, or None with rolling batches.
        stepped: whether the event loop runs only when its host steps it.

    Attributes:
        routes: inference routes.
        memory: memory quota of all requests.
        tasks: tasks of open requests (`RequestTask`).
    """

    def __init__(self, config: Config, preprocessor: Preprocessor, gate: BatchGate | None, *, stepped: bool) -> None:
        self.preprocessor = preprocessor
        dialects = registry.routes(config.root_schema, preprocessor.context.task)
        self.routes = InferenceRoutes(config.model_name, dialects)
        self.memory = _memory(config)
        self.tasks: weakref.WeakSet[Any] = weakref.WeakSet()
        self.gate = gate
        self._media = MediaLoader(media_rules(config))
        self._num_tokenizing = Count()
        self._stepped = stepped
        self._tokenize_inline = _TOKENIZE_STEPPED if stepped else _TOKENIZE_INLINE
        self._threads = TurnThreads(TOKENIZER_THREADS, TOKENIZER_THREADS - 1, "tokenize")
        self._loop = asyncio.get_running_loop()

    @functools.cached_property
    def formatters(self) -> FormatterThread:
        """The thread that runs the formatters of model.py and of adapters. The first access starts it."""
        return FormatterThread(self._loop.call_soon_threadsafe)

    async def inflate(self, body: bytes, head: Head, memory: Share) -> bytes:
        """Decompress a body on a thread, or return it unchanged if it is not compressed.

        Args:
            memory: share of the memory quota, which grows with each decompressed part.

        Raises:
            ServingError: the body cannot be decompressed (see `body.inflate`), or there is not enough memory.
        """
        if not head.encoding:
            return body
        limit = self.preprocessor.context.config.max_request_size
        call = functools.partial(inflate, body, limit, lambda size: memory.take(BODY_MEMORY * size))
        return await self._end(self._submit(call, len(body), head.owner, apart=False))

    async def decode(self, body: bytes, head: Head, memory: Share) -> Decoded:
        """Decode a body. An input formatter of model.py runs on its own thread.

        Args:
            memory: share of the memory quota for the body and its decoded value.

        Raises:
            ServingError: the body cannot be decoded (see `Preprocessor.decode`), or there is not enough memory.
        """

        def decode() -> Decoded:
            estimate = self.preprocessor.decoded_size(body, head)
            memory.set(len(body) + estimate)
            decoded = self.preprocessor.decode(body, head)
            if estimate > _ESTIMATED:
                most = _MEASURE_INLINE if len(body) < _PARSE_INLINE else sys.maxsize
                estimate = min(estimate, decoded.size or value_size(decoded.value, most))
            return decoded._replace(size=estimate)

        if title := self.preprocessor.input_formatter(head):
            decoded: Decoded = await self._end(self.formatters.submit(title, decode))
            return decoded
        return await self.run(len(body), decode, head.owner)

    async def recall(self, body: Decoded, size: int, head: Head, memory: Share) -> Recalled | None:
        """Load the stored responses that a body of `size` bytes refers to.

        Args:
            memory: share of the memory quota, which grows before a stored response is read.

        Returns:
            The stored responses, or None if the request neither uses stored responses nor stores its own response.

        Raises:
            ServingError: there is not enough memory, too many requests are waiting for stored responses, or there is no
                room to store the new response.
        """
        store, dialect = self.preprocessor.store, self.preprocessor.dialect_of(head)
        if store is None:
            return None
        wanted = await self.run(size, functools.partial(dialect.wanted, body.value), head.owner)
        if wanted is None:
            return None
        if wanted.keeps and size > store.most_bytes:
            raise InvalidPayload(
                f"the request has {size} bytes; at most {store.most_bytes} are stored (option.responses_max_bytes)"
            )
        owner = head.owner
        if wanted.keeps:
            store.check_calls(owner)
        if wanted.keeps and store.may_be_full:
            await self._end(store.check_room(owner, size))
        if not wanted.previous and not wanted.items:
            return NOTHING
        return await self._end(store.recall(owner, wanted, lambda num_bytes: memory.take(BODY_MEMORY * num_bytes)))

    async def encode(self, request: Request, size: int, head: Head, hold: Hold) -> tuple[Request, Prompt]:
        """Load the media of a request, tokenize its prompt, and check its structured output.

        Args:
            size: size of the request body, in bytes.
            hold: function that keeps the memory of the media reserved until the request has ended.

        Raises:
            ServingError: the prompt is too long, an image or audio cannot be loaded, or the engine does not support the
                structured output.
        """
        media = await self._load_media(request, head, hold)
        encoded = await self._tokenizing(self.preprocessor.encoder.encode, request, size, media, head.owner)
        if (trial := self.preprocessor.encoder.try_structured_output(request, head.owner)) is not None:
            check_structured_output(request, await self._end(trial))
        return encoded

    async def tokenize(
        self, request: Request, size: int, head: Head, take: Callable[[Prompt], None], hold: Hold
    ) -> None:
        """Tokenize a prompt of any length, and call `take` with it on the same thread.

        Args:
            size: size of the request body, in bytes.
            hold: function that keeps the memory of the media reserved until the request has ended.

        Raises:
            Overloaded: too many requests are being tokenized.
            ServingError: the prompt cannot be tokenized.
        """
        media = await self._load_media(request, head, hold)  # not counted: media have limits of their own
        if self._num_tokenizing.value >= MOST_TOKENIZING:
            raise Overloaded(f"too many requests are being tokenized: {MOST_TOKENIZING}")
        with self._num_tokenizing:
            await self._tokenizing(
                lambda *arguments: take(self.preprocessor.encoder.tokenize(*arguments)),
                request,
                size,
                media,
                head.owner,
            )

    async def _load_media(self, request: Request, head: Head, hold: Hold) -> Sequence[Medium]:
        """Load a request's media and hold their memory. If the caller is cancelled, the downloads are cancelled too."""
        if not request.media:
            return ()
        loaded = await self._end(self._media.load(request.media, head.owner))
        hold(loaded.reservation.close)
        return loaded.media

    async def _tokenizing(
        self,
        use: Callable[[Request, Sequence[Medium]], T],
        request: Request,
        size: int,
        media: Sequence[Medium],
        owner: str,
    ) -> T:
        """Call `use` with the request: inline, on a thread, or on a thread for long prompts.

        Args:
            size: size of the request body, in bytes.
        """
        if size < self._tokenize_inline and not media:
            return use(request, media)
        call = functools.partial(use, request, media)
        size += sum(len(medium.data) for medium in media)  # the media are copied
        return await self._end(self._submit(call, size, owner, apart=is_long(request)))

    async def run(self, size: int, use: Callable[[], T], owner: str) -> T:
        """Call `use`, which processes a body of `size` bytes, either inline or on a thread for bodies of this size."""
        if size < _PARSE_INLINE:
            return use()
        return await self._end(self._submit(use, size, owner, apart=size >= LARGE))

    def write(self, feed: Callable[[], bytes], owner: str, *, keeps: bool) -> asyncio.Future[bytes] | None:
        """Call `feed`, which produces the end of a response, on a thread. Return None if `feed` must be called
        inline, because the loop runs in steps.

        Args:
            owner: owner of the request, or "" without an owner.
            keeps: whether `feed` also stores the response, which must happen before the client receives it.
        """
        if keeps and self.preprocessor.store is not None:
            return self._end(self.preprocessor.store.write(owner, feed))
        return None if self._stepped else self._end(self._threads.submit(feed, LARGE, slow=True, flow=Flow(owner)))

    def _submit(self, call: Callable[[], T], size: int, owner: str, *, apart: bool) -> Future[T]:
        """Submit a call to a thread pool. Owners take turns, and an owner's calls for small bodies go first.

        Args:
            apart: whether the call takes so long that it must run on a thread for large bodies.
        """
        if apart:
            return self.preprocessor.large_bodies.submit(size, call, owner=owner)
        return self._threads.submit(call, size, slow=size >= LARGE, flow=Flow(owner))

    def _end(self, work: Future[T]) -> asyncio.Future[T]:
        """Wrap a future for the event loop, which may not be running yet when a request starts."""
        return asyncio.wrap_future(work, loop=self._loop)

    def close(self) -> None:
        self._threads.shutdown()
        self._media.close()
        self.preprocessor.close()
        if "formatters" in vars(self):
            self.formatters.close()


_SMALL = 1 << 20  # bytes; a part of the memory is reserved for requests that need no more, as for 256 KiB of body


def _memory(config: Config) -> Quota:
    """Return the memory quota of all requests."""
    spare = config.requests_total_bytes // 4
    words = "all requests together need too much memory (option.requests_total_bytes)"
    return Quota(config.requests_total_bytes - spare, spare, _SMALL, words, beside=spare)
