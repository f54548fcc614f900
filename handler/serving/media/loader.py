"""Load the media of requests: fetches on one thread's event loop, decoding in a process within limits."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from handler.config.config import Config
from handler.core.errors import ConfigError, InvalidParameter, InvalidPayload, Unavailable, client_words
from handler.core.loop import run_in_daemon_thread
from handler.core.media import ALL_MEDIA, MEDIA, MediaSource, MediaTokens, Medium, SharedMedia, several
from handler.core.package import install
from handler.core.text import Prompt
from handler.core.values import Request
from handler.engines.huggingface.media import expand
from handler.engines.process.sandbox import Job, LimitExceeded, Limits, NotRun, Purpose, Sandbox
from handler.serving.media import audio, image
from handler.serving.media.decoder import Decoder, FileRules, LargerThanRead, Size
from handler.serving.turns import Flow, Quota, Share, Turns, TurnThreads

if TYPE_CHECKING:
    from handler.serving.media.fetch import Fetcher

DECODERS: dict[str, Decoder] = {"image": image.DECODER, "audio": audio.DECODER}

_FETCHING = ("aiohttp",)


def missing_packages(kind: str) -> str:
    """Name the packages to install for serving media of a kind; "" if none is missing."""
    decoder = DECODERS[kind]
    missing = [name for name in (*decoder.packages, *_FETCHING) if importlib.util.find_spec(name) is None]
    if not missing:
        return ""
    how = install(f"lmi-handler[{decoder.extra}]")
    return f"the server takes text only: {' and '.join(missing)} cannot be imported: {how}"


# -- rules for the media of requests: where they may come from, and how large they may be ------------------------------


ANY_HOST = "*"


class MediaRules(NamedTuple):
    """Rules for media, from the options.

    Attributes:
        domains: hosts, each `name` for the usual ports or `name:port`; `*` is any name with the usual ports.
        directory: of `file:` URLs, without symbolic links; None if files are not allowed.
        files: by kind.
    """

    files: Mapping[str, FileRules]
    domains: Collection[str] = ()
    directory: Path | None = None


def media_rules(config: Config) -> MediaRules:
    """Read the rules.

    Raises:
        ConfigError: there is no such directory.
    """
    given = config.allowed_local_media_path
    directory = None if given is None else Path(given).resolve()
    if directory is not None and not directory.is_dir():
        raise ConfigError(config.problem("option.allowed_local_media_path", given, "there is no such directory"))
    files = {kind: decoder.rules(config) for kind, decoder in DECODERS.items()}
    return MediaRules(files, config.allowed_media_domains or (), directory)


T = TypeVar("T")

MAX_MEDIA_LOADING = 1024  # of all requests, that are fetched and decoded, or wait for that
MAX_MEMORY = 1 << 30  # bytes of files and decoded data of all requests, until they end
_SPARE_MEDIA, _FEW_MEDIA = 1024, 4  # beyond that, for requests with few media
_SPARE_MEMORY, _LITTLE_MEMORY = 1 << 28, 1 << 25  # bytes beyond that, for requests that need little

FETCHES, _FETCHES_OF_HOST = 128, 32  # files fetched at a time
_FILES = "file:"  # host of files

THREADS, _SLOW_THREADS = 3, 2  # media decoded at a time, and those of them that may take long
_QUICK_UNITS = 1 << 20
_QUICK_SECONDS, SECONDS = 0.2, 10.0  # of computing for a medium; a photo of _QUICK_UNITS takes 0.03
_UNITS_PER_SECOND = 1 << 25  # of computing
_PATIENCE = 60.0  # seconds by the clock
_MEMORY = 64 << 20  # bytes, beside those of the file and of units
_BEGIN = 1 / 128  # seconds that it takes to begin and end
_NICE = 5  # of media that may take long


class Reservation(Share):
    """One request's share of the memory for media."""

    def __init__(self, memory: Quota, media: str) -> None:
        super().__init__(memory)
        self._media = media

    def take(self, amount: int) -> None:
        """Reserve memory. Raises Overloaded if too little is free, InvalidPayload if there will never be enough."""
        if self.size + amount > (most := self._quota.most):
            raise InvalidPayload(f"the request's {self._media} have more than {most} bytes of files and decoded data")
        super().take(amount)


class Load(NamedTuple):
    """A file to be decoded, with its units."""

    kind: str
    file: bytes
    units: int

    @property
    def data_size(self) -> int:
        """Bytes of the decoded data."""
        return DECODERS[self.kind].unit_bytes * self.units

    @property
    def memory(self) -> int:
        """Bytes that decoding may take."""
        return _MEMORY + DECODERS[self.kind].unit_memory * self.units + 2 * len(self.file)


class LoadedMedia(NamedTuple):
    """The media of one request, and their memory."""

    media: tuple[Medium, ...]
    reservation: Reservation


class MediaLoader:
    """Fetches and decodes. Its threads start with the first medium, the process of a kind with the first medium of
    the kind. Thread-safe.

    Owners take turns by the computing time that their media have taken; a request without an owner is its own. All of
    a request's units are reserved, as the files' headers give them, before any is decoded.
    """

    def __init__(self, rules: MediaRules) -> None:
        self._rules = rules
        full = f"{ALL_MEDIA} of other requests use all the memory reserved for them"
        self.memory = Quota(MAX_MEMORY, _SPARE_MEMORY, _LITTLE_MEMORY, full)
        many = f"too many {ALL_MEDIA} of other requests are being loaded"
        self._waiting = Quota(MAX_MEDIA_LOADING, _SPARE_MEDIA, _FEW_MEDIA, many)
        self._processes = {
            kind: Sandbox(decoder.make, Purpose(MEDIA[kind], "are decoded")) for kind, decoder in DECODERS.items()
        }
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fetcher: Fetcher | None = None
        self._fetches = Turns(FETCHES, lambda host: _FETCHES_OF_HOST)
        self._decoders = TurnThreads(THREADS, _SLOW_THREADS, "media")
        self._closed = False

    def load(self, sources: Sequence[MediaSource], owner: str = "") -> Future[LoadedMedia]:
        """Load the media of a request; cancelling the result ends the fetches.

        Args:
            owner: of the request; "" for none.

        Raises:
            Unavailable: too many wait. The result raises it too, and InvalidPayload; both name the field.
        """
        with self._lock:
            if self._closed:
                raise Unavailable("the server is stopping")
            self._waiting.take(len(sources))
            loop = self._loop or self._start()
        future = asyncio.run_coroutine_threadsafe(self._load(sources, owner or object()), loop)
        future.add_done_callback(lambda _: self._waiting.give_back(len(sources)))
        return future

    def close(self) -> None:
        """End threads and process; loading media are abandoned."""
        with self._lock:
            loop, self._loop, self._closed = self._loop, None, True
        for process in self._processes.values():
            process.close()
        self._decoders.shutdown()
        if loop is not None:
            asyncio.run_coroutine_threadsafe(self._stop(), loop)

    def _start(self) -> asyncio.AbstractEventLoop:
        self._loop = loop = asyncio.new_event_loop()

        def run() -> None:
            loop.run_forever()
            loop.close()

        threading.Thread(target=run, name="media-fetches", daemon=True).start()
        return loop

    async def _stop(self) -> None:
        loading = asyncio.all_tasks() - {asyncio.current_task()}
        for task in loading:
            task.cancel()
        await asyncio.gather(*loading, return_exceptions=True)
        if self._fetcher is not None:
            await self._fetcher.close()
        asyncio.get_running_loop().stop()

    # -- one request ---------------------------------------------------------------------------------------------

    async def _load(self, sources: Sequence[MediaSource], owner: Hashable) -> LoadedMedia:
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(_retrieve)  # a client that has left reads no error
        words = several(source.kind for source in sources)
        reservation, fetches, decoding = Reservation(self.memory, words), Flow(owner), Flow(owner)
        try:
            reservation.take(given := sum(len(source.data or b"") for source in sources))
            files = await _together(
                _named(source, partial(self._file, source, fetches, reservation)) for source in sources
            )
            loads = [self._measured(source, file) for source, file in zip(sources, files, strict=True)]
            reservation.take(sum(load.data_size for load in loads))
            media = await _together(
                _named(source, partial(self._decoded, load, decoding, reservation))
                for source, load in zip(sources, loads, strict=True)
            )
            reservation.give_back(sum(len(file) for file in files) - given)  # nothing refers to what was fetched
        except BaseException:
            reservation.give_back()
            raise
        return LoadedMedia(tuple(media), reservation)

    async def _file(self, source: MediaSource, flow: Flow, reservation: Reservation) -> bytes:
        if source.data is not None:
            file = source.data
        else:
            host = _host(source.url)
            async with self._fetches.turn(flow, 1.0, host):
                file = await self._fetch(source)
            reservation.take(len(file))
        if not file:
            raise InvalidPayload(f"the {source.kind} has no bytes")
        return file

    async def _fetch(self, source: MediaSource) -> bytes:
        from handler.serving.media.fetch import Fetcher, read_file  # aiohttp is loaded by the first URL

        if _host(source.url) == _FILES:
            return await run_in_daemon_thread(read_file, source.url, source.kind, self._rules)
        if self._fetcher is None:
            self._fetcher = Fetcher(self._rules, FETCHES)
        return await self._fetcher.fetch(source.url, source.kind)

    def _measured(self, source: MediaSource, file: bytes) -> Load:
        """Measure a medium by its header."""
        try:
            return self._load_of(source.kind, file, DECODERS[source.kind].read_size(file))
        except InvalidPayload as error:
            raise InvalidPayload(f"{source.name}: {error.message}") from None

    def _load_of(self, kind: str, file: bytes, size: Size) -> Load:
        return Load(kind, file, DECODERS[kind].units(size, self._rules.files[kind]))

    async def _decoded(self, load: Load, flow: Flow, reservation: Reservation) -> Medium:
        try:
            return await self._in_turn(load, flow)
        except LargerThanRead as larger:  # as a GIF whose first frame is larger than its screen
            found = self._load_of(load.kind, load.file, larger.args)
            reservation.take(found.data_size - load.data_size)
            return await self._in_turn(found, flow)

    async def _in_turn(self, load: Load, flow: Flow) -> Medium:
        """Decode a small medium within little time, so that each turn is short; decode others, and slow ones,
        separately. Until it is decoded, it is charged the time that its header implies; if that was too little, the
        maximum.
        """
        seconds = _BEGIN + load.units / _UNITS_PER_SECOND
        if load.units <= _QUICK_UNITS:
            with contextlib.suppress(LimitExceeded):
                return await self._turn(load, flow, seconds, slow=False)
            seconds = SECONDS
        try:
            return await self._turn(load, flow, seconds, slow=True)
        except LimitExceeded:
            raise InvalidPayload(f"the {load.kind} needs more than {SECONDS:g} s or {load.memory >> 20} MiB") from None

    async def _turn(self, load: Load, flow: Flow, seconds: float, *, slow: bool) -> Medium:
        limit, nice = (SECONDS, _NICE) if slow else (_QUICK_SECONDS, 0)
        job = Job(load.units, Limits(limit, load.memory, _PATIENCE, nice), len(load.file))
        decode = partial(self._decode, load, job, lambda spent: self._decoders.charge(flow, _BEGIN + spent - seconds))
        return await asyncio.wrap_future(self._decoders.submit(decode, seconds, slow=slow, flow=flow))

    def _decode(self, load: Load, job: Job, spent: Callable[[float], object]) -> Medium:
        try:
            (size, digest), *parts = self._processes[load.kind].run(job, load.file, spent)
        except NotRun as error:
            raise Unavailable(f"the {load.kind} cannot be decoded: {client_words(str(error))}") from None
        return Medium(load.kind, size, b"".join(parts), digest)


async def _together(parts: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently; the first that fails ends the others."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        raise


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


async def _named(source: MediaSource, load: Callable[[], Awaitable[T]]) -> T:
    try:
        return await load()
    except (InvalidPayload, Unavailable) as error:
        raise type(error)(f"{source.name}: {error.message}") from None


def _host(url: str) -> str:
    if url[:5].lower() == _FILES:
        return _FILES
    try:
        return urlsplit(url).netloc.lower()
    except ValueError:  # it is refused when it is fetched
        return ""


# -- put decoded media into a prompt -----------------------------------------------------------------------------------


def place_media(request: Request, prompt: Prompt, media: Sequence[Medium], tokens: Mapping[str, MediaTokens]) -> Prompt:
    """Return the prompt with its media, and with as many ids for each as the engine computes.

    Args:
        prompt: has one placeholder per medium.
        media: one for each of the request's sources.
        tokens: the model's, by kind.

    Raises:
        InvalidPayload: the model does not take these media here.
        InvalidParameter: the prompt would be cut.
    """
    for medium in media:
        if medium.kind not in tokens:
            raise InvalidPayload(f"'messages': the model takes no {MEDIA[medium.kind]}")
    if request.truncation is not None:
        kinds = several(medium.kind for medium in media)
        raise InvalidParameter(f"truncate_prompt_tokens: a prompt with {kinds} is not truncated")
    counts: dict[str, list[int]] = {}
    for source, medium in zip(request.media, media, strict=True):
        try:
            counts.setdefault(medium.kind, []).append(tokens[medium.kind].count(medium.size))
        except ValueError as error:
            raise InvalidPayload(f"{source.name}: {error}") from None
    try:
        ids = expand(prompt.ids, counts, tokens)
    except ValueError as error:
        raise InvalidPayload(f"'messages': {error}") from None
    return prompt._replace(ids=ids, media=SharedMedia(prompt.text, media))
