"""Loads the media in requests. An event loop on a thread fetches media, and sandboxed processes decode them."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
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
from handler.serving.quota import Quota, Share
from handler.serving.turns import Flow, Turns, TurnThreads

if TYPE_CHECKING:
    from handler.serving.media.fetch import Fetcher

DECODERS: dict[str, Decoder] = {"image": image.DECODER, "audio": audio.DECODER}

_FETCHING = ("aiohttp",)


def missing_packages(kind: str) -> str:
    """Return an error message if packages for a kind of media are missing, or "" if none are missing."""
    decoder = DECODERS[kind]
    missing = [name for name in (*decoder.packages, *_FETCHING) if importlib.util.find_spec(name) is None]
    if not missing:
        return ""
    how = install(f"lmi-handler[{decoder.extra}]")
    return f"the server cannot import {' and '.join(missing)}: {how}"


# -- rules for media: allowed sources and sizes ------------------------------------------------------------------------


ANY_HOST = "*"


class MediaRules(NamedTuple):
    """Rules for media, as set by the options.

    Attributes:
        files: limits for files, by kind.
        domains: allowed hosts, each either `name` for the default ports or `name:port`. `*` allows all names with
            default ports.
        directory: directory for `file:` URLs, with symbolic links resolved, or None if `file:` URLs are not allowed.
    """

    files: Mapping[str, FileRules]
    domains: Collection[str] = ()
    directory: Path | None = None


def media_rules(config: Config) -> MediaRules:
    """Return the rules from the options.

    Raises:
        ConfigError: the directory for files does not exist.
    """
    allowed_path = config.allowed_local_media_path
    directory = None if allowed_path is None else Path(allowed_path).resolve()
    if directory is not None and not directory.is_dir():
        raise ConfigError(config.problem("option.allowed_local_media_path", allowed_path, "there is no such directory"))
    files = {kind: decoder.rules(config) for kind, decoder in DECODERS.items()}
    return MediaRules(files, config.allowed_media_domains or (), directory)


T = TypeVar("T")

MAX_MEDIA_LOADING = 1024  # media of all requests that are being loaded or wait to be loaded
MAX_MEMORY = 1 << 30  # bytes of files and decoded data of all requests
SPARE_MEDIA, FEW_MEDIA = 1024, 4  # additional media, for requests with few media
SPARE_MEMORY, LITTLE_MEMORY = 1 << 28, 1 << 25  # additional bytes, for requests that need little memory

FETCHES, FETCHES_OF_HOST = 128, 32  # maximum concurrent fetches: in total, and from one host
_FILES = "file:"  # stands for the host of `file:` URLs

THREADS, _SLOW_THREADS = 3, 2  # media that are decoded concurrently: in total, and those that may take a long time
_QUICK_UNITS = 1 << 20  # maximum units of a medium that is first decoded with the short time limit
_QUICK_SECONDS, SECONDS = 0.2, 10.0  # CPU time limits for a medium; a photo of _QUICK_UNITS takes 0.03 s
UNITS_PER_SECOND = 1 << 25  # expected units per second of CPU time
_PATIENCE = 60.0  # limit of wall-clock seconds
_MEMORY = 64 << 20  # bytes, in addition to those of the file and its units
_BEGIN = 1 / 128  # seconds for the start and the end of decoding
_NICE = 5  # niceness of the process for media that may take a long time


class Reservation(Share):
    """The share of the media memory that a request has reserved."""

    def __init__(self, memory: Quota, media: str) -> None:
        super().__init__(memory)
        self._media = media

    def take(self, amount: int) -> None:
        """Reserve memory.

        Raises:
            Overloaded: too little memory is free now.
            InvalidPayload: the request needs more than the total memory for media.
        """
        if self.size + amount > (most := self._quota.most):
            raise InvalidPayload(
                f"the request's {self._media} need more than {most} bytes, including their decoded data"
            )
        super().take(amount)


class Load(NamedTuple):
    """A media file to decode, and its number of units."""

    kind: str
    file: bytes
    units: int

    @property
    def data_size(self) -> int:
        """The size of the decoded data, in bytes."""
        return DECODERS[self.kind].unit_bytes * self.units

    @property
    def memory(self) -> int:
        """The maximum memory for decoding, in bytes."""
        return _MEMORY + DECODERS[self.kind].unit_memory * self.units + 2 * len(self.file)


class LoadedMedia(NamedTuple):
    """The decoded media of a request, and the memory reserved for them."""

    media: tuple[Medium, ...]
    reservation: Reservation


class MediaLoader:
    """Fetches and decodes media. Thread-safe.

    The threads start when the first media file is loaded, and each decoding process when the first file of its kind is
    decoded.

    Owners take turns according to the CPU time that their media have used. A request without an owner is treated as a
    separate owner. Memory for all media of a request is reserved according to the file headers before any of them is
    decoded.
    """

    def __init__(self, rules: MediaRules) -> None:
        self._rules = rules
        full = f"{ALL_MEDIA} of other requests use all the memory reserved for them"
        self.memory = Quota(MAX_MEMORY, SPARE_MEMORY, LITTLE_MEMORY, full)
        many = f"too many {ALL_MEDIA} of other requests are being loaded"
        self._waiting = Quota(MAX_MEDIA_LOADING, SPARE_MEDIA, FEW_MEDIA, many)
        self._processes = {
            kind: Sandbox(decoder.make, Purpose(MEDIA[kind], "are decoded")) for kind, decoder in DECODERS.items()
        }
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fetcher: Fetcher | None = None
        self._fetches = Turns(FETCHES, lambda host: FETCHES_OF_HOST)
        self._decoders = TurnThreads(THREADS, _SLOW_THREADS, "media")
        self._closed = False

    def load(self, sources: Sequence[MediaSource], owner: str = "") -> Future[LoadedMedia]:
        """Load the media of a request. Cancelling the returned future also cancels the downloads.

        The future raises Unavailable or InvalidPayload if a media file cannot be loaded. The message contains the field
        name, unless all files together need too much memory.

        Args:
            owner: owner of the request, or "" without an owner.

        Raises:
            Unavailable: too many media are being loaded, or the server is stopping.
        """
        with self._lock:
            if self._closed:
                raise Unavailable("the server is stopping")
            waiting = self._waiting.of(owner)
            waiting.change(0, len(sources))
            loop = self._loop or self._start()
        future = asyncio.run_coroutine_threadsafe(self._load(sources, owner), loop)
        future.add_done_callback(lambda _: waiting.change(len(sources), 0))
        return future

    def close(self) -> None:
        """Stop all threads and processes. Media that are being loaded are abandoned."""
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

    async def _load(self, sources: Sequence[MediaSource], owner: str) -> LoadedMedia:
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(_retrieve)  # nobody reads the error if the client has disconnected
        words = several(source.kind for source in sources)
        reservation, turns = Reservation(self.memory.of(owner), words), owner or object()
        fetches, decoding = Flow(turns), Flow(turns)
        try:
            num_inline = sum(len(source.data or b"") for source in sources)
            reservation.take(num_inline)
            files = await _together(
                _named(source, partial(self._file, source, fetches, reservation)) for source in sources
            )
            loads = [self._measured(source, file) for source, file in zip(sources, files, strict=True)]
            reservation.take(sum(load.data_size for load in loads))
            media = await _together(
                _named(source, partial(self._decoded, load, decoding, reservation))
                for source, load in zip(sources, loads, strict=True)
            )
            num_bytes = sum(len(file) for file in files)
            reservation.give_back(num_bytes - num_inline)  # the fetched files are not used any more
        except BaseException:
            reservation.close()
            raise
        return LoadedMedia(tuple(media), reservation)

    async def _file(self, source: MediaSource, flow: Flow, reservation: Reservation) -> bytes:
        if source.data is not None:
            file = source.data
        else:
            host = _host(source.url)
            async with self._fetches.turn(flow, 1.0, host):
                file = await self._fetch(source, reservation.take)
        if not file:
            raise InvalidPayload(f"the {source.kind} is empty")
        return file

    async def _fetch(self, source: MediaSource, take: Callable[[int], object]) -> bytes:
        from handler.serving.media.fetch import Fetcher, read_file  # aiohttp is imported only for the first URL

        if _host(source.url) == _FILES:
            file = await run_in_daemon_thread(read_file, source.url, source.kind, self._rules)
            take(len(file))
            return file
        if self._fetcher is None:
            self._fetcher = Fetcher(self._rules, FETCHES)
        return await self._fetcher.fetch(source.url, source.kind, take)

    def _measured(self, source: MediaSource, file: bytes) -> Load:
        """Return a media file to decode, with the number of units according to its header."""
        try:
            return self._load_of(source.kind, file, DECODERS[source.kind].read_size(file))
        except InvalidPayload as error:
            raise InvalidPayload(f"{source.name}: {error.message}") from None

    def _load_of(self, kind: str, file: bytes, size: Size) -> Load:
        return Load(kind, file, DECODERS[kind].units(size, self._rules.files[kind]))

    async def _decoded(self, load: Load, flow: Flow, reservation: Reservation) -> Medium:
        try:
            return await self._in_turn(load, flow)
        except LargerThanRead as larger:  # for example a GIF whose first frame is larger than its screen
            load_of_kind = self._load_of(load.kind, load.file, larger.args)
            reservation.take(load_of_kind.data_size - load.data_size)
            return await self._in_turn(load_of_kind, flow)

    async def _in_turn(self, load: Load, flow: Flow) -> Medium:
        """Decode a media file. A small file is first tried with the short time limit, so that other files wait less.

        While the file is being decoded, its owner is charged for the time that is expected for its size. After a failed
        first try, the owner is charged for the maximum time.
        """
        seconds = _BEGIN + load.units / UNITS_PER_SECOND
        if load.units <= _QUICK_UNITS:
            with contextlib.suppress(LimitExceeded):
                return await self._turn(load, flow, seconds, slow=False)
            seconds = SECONDS
        try:
            return await self._turn(load, flow, seconds, slow=True)
        except LimitExceeded:
            limits = f"{SECONDS:g} s or {load.memory >> 20} MiB"
            raise InvalidPayload(f"the {load.kind} needs more than {limits} to be decoded") from None

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
    """Run coroutines concurrently. If one of them fails, cancel the others."""
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
    except ValueError:  # the fetch will refuse it
        return ""


# -- placement of decoded media in a prompt ----------------------------------------------------------------------------


def place_media(request: Request, prompt: Prompt, media: Sequence[Medium], tokens: Mapping[str, MediaTokens]) -> Prompt:
    """Return the prompt with its media. Each placeholder is repeated for every token of its image or audio.

    Args:
        prompt: prompt with one placeholder for each image or audio.
        media: media of the request, in the order of its sources.
        tokens: media tokens of the model, by kind.

    Raises:
        InvalidPayload: the model does not accept these media.
        InvalidParameter: the request asks to truncate the prompt.
    """
    for medium in media:
        if medium.kind not in tokens:
            raise InvalidPayload(f"'messages': the model does not accept {MEDIA[medium.kind]}")
    if request.truncation is not None:
        kinds = several(medium.kind for medium in media)
        raise InvalidParameter(f"truncate_prompt_tokens: a prompt with {kinds} cannot be truncated")
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
