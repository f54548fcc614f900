"""Admit requests: the routes of inference, the plan of stages, and the threads and memory that the stages use."""

from __future__ import annotations

import asyncio
import functools
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from handler.config.config import Config
from handler.core.errors import InvalidPayload
from handler.core.media import MediaSource
from handler.plugins.formatter_thread import FormatterThread
from handler.protocols import registry
from handler.protocols.kernel.dialect import Dialect
from handler.serving.custom_handle import CustomHandle
from handler.serving.large_bodies import LARGE, max_decoded
from handler.serving.media.loader import MediaLoader, media_rules
from handler.serving.preprocessor import Preprocessor
from handler.serving.quota import Quota
from handler.serving.request.gate import BatchGate
from handler.serving.request.stages import PARSE_INLINE, plan_of
from handler.serving.turns import Flow, TurnThreads

T = TypeVar("T")

TOKENIZER_THREADS = 2
_TOKENIZE_INLINE = 1 << 10  # bytes; larger bodies are tokenized on a thread
_TOKENIZE_STEPPED = 1 << 13  # the same for a stepped loop, which sees a thread's result only in its next step

INVOKE = ("/invocations", "/predictions/{model}", "/predictions/{model}/{version}", "/models/{model}/invoke")
"""Routes that use the configured dialect."""

_SLASHES = re.compile("/{2,}")
_MODEL_IDS = re.compile("/+v1/+models/(?=/*[^/])")

_OTHER_NAMES = {
    **{
        path: f"/v1{path}"
        for path in (
            "/chat/completions",
            "/chat/completions/input_tokens",
            "/responses",
            "/responses/input_tokens",
            "/audio/transcriptions",
        )
    },
    "/v1/health": "/health",
    "/reranking": "/rerank",
    "/v1/reranking": "/v1/rerank",
}
"""Maps llama-server's other names of routes to the names here. Its clients may have a base URL without /v1."""


def canonical_path(path: str) -> str:
    """Return a path without repeated slashes, without a slash at its end, and with the route's name here.

    Clients add such slashes when they join a base URL and a path. A redirect, as in Starlette, would lose the body or
    the key with some clients, and name the wrong scheme behind a proxy. In `/v1/models/{id}`, the ID keeps its slashes,
    because it may be a directory.
    """
    if path.endswith("/") or "//" in path:
        if ids := _MODEL_IDS.match(path):
            return f"/v1/models/{path[ids.end() :]}"
        path = _SLASHES.sub("/", path).rstrip("/") or "/"
    return _OTHER_NAMES.get(path, path)


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
    """What the stages of all requests share. All methods must be called on the event loop thread.

    Args:
        gate: gate for dynamic batches, which requests must pass before submission, or None with rolling batches.
        stepped: whether the event loop runs only when its host steps it.

    Attributes:
        plan: stages of each request.
        routes: inference routes.
        memory: memory quota of all requests.
        tasks: tasks of open requests (`RequestTask`).
        handle: `handle` of model.py, or None without it.
        media: loader of images, audio and video.
        threads: threads for bodies and prompts.
        tokenize_inline: bytes of a body whose prompts are tokenized on the event loop.
    """

    def __init__(self, config: Config, preprocessor: Preprocessor, gate: BatchGate | None, *, stepped: bool) -> None:
        self.preprocessor = preprocessor
        dialects = registry.routes(config.root_schema, preprocessor.context.task)
        self.routes = InferenceRoutes(config.model_name, dialects)
        self.memory = memory_quota(config)
        self.tasks: weakref.WeakSet[Any] = weakref.WeakSet()
        self.gate = gate
        handle = preprocessor.formatters.handle
        self.handle = None if handle is None else CustomHandle(handle, config, self.memory)
        self.media = MediaLoader(media_rules(config))
        self.is_stepped = stepped
        self.tokenize_inline = _TOKENIZE_STEPPED if stepped else _TOKENIZE_INLINE
        self.threads = TurnThreads(TOKENIZER_THREADS, TOKENIZER_THREADS - 1, "tokenize")
        self._loop = asyncio.get_running_loop()
        self.plan = plan_of(self)

    @functools.cached_property
    def formatters(self) -> FormatterThread:
        """The thread that runs the formatters of model.py and of adapters. The first access starts it."""
        return FormatterThread(self._loop.call_soon_threadsafe)

    def run(self, size: int, use: Callable[[], T], owner: str) -> asyncio.Future[T]:
        """Call `use`, which processes a body of `size` bytes, on a thread for bodies of this size."""
        return self.submit(use, size, owner, apart=size >= LARGE)

    async def process(self, size: int, use: Callable[[], T], owner: str, *, apart: bool = True) -> T:
        """Call `use`, which processes `size` bytes, and return its result. Small values are processed on the loop.

        Args:
            apart: whether large values are processed on a thread for large bodies.
        """
        if size < PARSE_INLINE:
            return use()
        return await self.submit(use, size, owner, apart=apart and size >= LARGE)

    async def decode(self, body: bytes, hold: Callable[[int], object], owner: str, *, unique_keys: bool = True) -> Any:
        """Return the value of a JSON body that no plan decodes, in the same way: it is measured before it is decoded,
        and a large one is decoded in a separate process.

        Args:
            hold: called with the bytes of memory that the body and its value need.

        Raises:
            ServingError: the body is not valid JSON or contains too much data, or `hold` has raised the error.
        """
        size = len(body)
        hold(size + await self.process(size, functools.partial(max_decoded, body), owner))
        read = functools.partial(self.preprocessor.large_bodies.read, body, unique_keys=unique_keys)
        value, measured = await self.process(size, read, owner)
        if measured:
            hold(size + measured)
        return value

    async def check_media(self, sources: Sequence[MediaSource], owner: str) -> None:
        """Raise ServingError if media that a client has sent, and not only their address, cannot be decoded."""
        sent = [source for source in sources if source.data is not None]
        if sent:
            (await self.on_loop(self.media.load(sent, owner))).reservation.close()

    def write(self, feed: Callable[[], bytes], owner: str, *, keeps: bool) -> asyncio.Future[bytes] | None:
        """Run `feed`, which produces the end of a response, on a thread.

        If the loop runs in steps, return None. The caller must then call `feed` inline.

        Args:
            owner: owner of the request, or "" without an owner.
            keeps: whether `feed` also stores the response, which must happen before the client receives it.
        """
        if keeps and self.preprocessor.store is not None:
            return self.on_loop(self.preprocessor.store.write(owner, feed))
        return None if self.is_stepped else self.on_loop(self.threads.submit(feed, LARGE, slow=True, flow=Flow(owner)))

    def submit(self, call: Callable[[], T], size: int, owner: str, *, apart: bool) -> asyncio.Future[T]:
        """Submit a call to a thread pool. Owners take turns, and an owner's calls for small bodies go first.

        Args:
            apart: whether the call takes so long that it must run on a thread for large bodies.
        """
        if apart:
            return self.on_loop(self.preprocessor.large_bodies.submit(size, call, owner=owner))
        return self.on_loop(self.threads.submit(call, size, slow=size >= LARGE, flow=Flow(owner)))

    def on_loop(self, work: Future[T]) -> asyncio.Future[T]:
        """Wrap a future for the event loop, which may not be running yet when a request starts."""
        return asyncio.wrap_future(work, loop=self._loop)

    def close(self) -> None:
        self.threads.shutdown()
        self.media.close()
        self.preprocessor.close()
        if "formatters" in vars(self):
            self.formatters.close()


SMALL = 1 << 20  # bytes; a part of the memory is reserved for requests that need no more, as for 256 KiB of body


def memory_quota(config: Config) -> Quota:
    """Return a quota for the memory of all requests."""
    spare = config.requests_total_bytes // 4
    words = "all requests together need too much memory (option.requests_total_bytes)"
    return Quota(config.requests_total_bytes - spare, spare, SMALL, words, beside=spare)
