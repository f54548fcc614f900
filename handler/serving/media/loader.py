"""Load the images of requests: fetches on one thread's event loop, decoding in a process within limits."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from handler.core.errors import InvalidPayload, Unavailable
from handler.core.event_loop import run_in_daemon_thread
from handler.core.media import Image, MediaSource
from handler.core.words import client_words
from handler.engines.process.sandbox import LimitExceeded, NotRun, Purpose, Sandbox
from handler.engines.process.sandbox_tasks import Job, Limits, Work
from handler.serving.media.image.headers import LargerThanRead, read_size
from handler.serving.media.rules import MediaRules
from handler.serving.turns import Flow, Quota, Turns, TurnThreads

if TYPE_CHECKING:
    from handler.serving.media.fetch import Fetcher

T = TypeVar("T")

MAX_MEDIA = 1024  # of all requests, that are fetched and decoded, or wait for that
MAX_MEMORY = 1 << 30  # bytes of files and pixels of all requests, until they end
_SPARE_MEDIA, _FEW_MEDIA = 1024, 4  # beyond that, for requests with few images
_SPARE_MEMORY, _LITTLE_MEMORY = 1 << 28, 1 << 25  # bytes beyond that, for requests that need little

FETCHES, _FETCHES_OF_HOST = 128, 32  # files fetched at a time
_FILES = "file:"  # host of files

DECODERS, _SLOW_DECODERS = 3, 2  # images decoded at a time, and those of them that may take long
_QUICK_PIXELS = 1 << 20
_QUICK_SECONDS, SECONDS = 0.5, 10.0  # of computing for an image
_PATIENCE = 60.0  # seconds by the clock
_MEMORY, _MEMORY_OF_PIXEL = 64 << 20, 16  # bytes, beside the file's
_COST = 1 << 18  # pixels that are decoded in the time that it takes to begin and end
_BYTES_OF_PIXEL = 3
_NICE = 5  # of images that may take long

_PURPOSE = Purpose("images", "are decoded")


class Reservation:
    """One request's part of the memory, until it is given back or nothing refers to it."""

    def __init__(self, memory: Quota) -> None:
        self._memory, self._size = memory, 0

    def take(self, size: int) -> None:
        """Raises Overloaded where there is too little; InvalidPayload where there never is so much."""
        if self._size + size > self._memory.most:
            raise InvalidPayload(f"the request's images have more than {self._memory.most} bytes of files and pixels")
        self._memory.take(size, self._size)
        self._size += size

    def give_back(self, size: int | None = None) -> None:
        """Give a part back, or all."""
        size = self._size if size is None else size
        self._size -= size
        self._memory.give_back(size)

    __del__ = give_back


class LoadedMedia(NamedTuple):
    """The images of one request, and their memory."""

    media: tuple[Image, ...]
    reservation: Reservation


class MediaLoader:
    """Fetches and decodes. Its threads and its process begin with the first image. Thread-safe.

    Requests take turns. All of a request's pixels are reserved, as the files' headers give them, before any is decoded.
    """

    def __init__(self, rules: MediaRules) -> None:
        self._rules = rules
        full = "images of other requests take all the memory that there is for them"
        self.memory = Quota(MAX_MEMORY, _SPARE_MEMORY, _LITTLE_MEMORY, full)
        self._waiting = Quota(MAX_MEDIA, _SPARE_MEDIA, _FEW_MEDIA, "too many images of other requests are being loaded")
        self._process = Sandbox(_make, _PURPOSE)
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fetcher: Fetcher | None = None
        self._fetches = Turns(FETCHES, lambda host: _FETCHES_OF_HOST)
        self._decoders = TurnThreads(DECODERS, _SLOW_DECODERS, "images")
        self._closed = False

    def load(self, sources: Sequence[MediaSource]) -> Future[LoadedMedia]:
        """Have the images of a request loaded; to cancel the result ends the fetches.

        Raises:
            Unavailable: too many wait. The result raises it too, and InvalidPayload; both name the field.
        """
        with self._lock:
            if self._closed:
                raise Unavailable("the server is stopping")
            self._waiting.take(len(sources))
            loop = self._loop or self._start()
        future = asyncio.run_coroutine_threadsafe(self._load(sources), loop)
        future.add_done_callback(lambda _: self._waiting.give_back(len(sources)))
        return future

    def close(self) -> None:
        """End threads and process; what is being loaded is given up."""
        with self._lock:
            loop, self._loop, self._closed = self._loop, None, True
        self._process.close()
        self._decoders.shutdown()
        if loop is not None:
            asyncio.run_coroutine_threadsafe(self._stop(), loop)

    def _start(self) -> asyncio.AbstractEventLoop:
        self._loop = loop = asyncio.new_event_loop()

        def run() -> None:
            loop.run_forever()
            loop.close()

        threading.Thread(target=run, name="image-fetches", daemon=True).start()
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

    async def _load(self, sources: Sequence[MediaSource]) -> LoadedMedia:
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(_retrieve)  # a client that has left reads no error
        reservation, fetches, decoding = Reservation(self.memory), Flow(), Flow()
        try:
            reservation.take(given := sum(len(source.data or b"") for source in sources))
            files = await _together(
                _named(source, partial(self._file, source, fetches, reservation)) for source in sources
            )
            sizes = [self._pixels(source, file) for source, file in zip(sources, files, strict=True)]
            reservation.take(_BYTES_OF_PIXEL * sum(sizes))
            media = await _together(
                _named(source, partial(self._image, file, pixels, decoding, reservation))
                for source, file, pixels in zip(sources, files, sizes, strict=True)
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
                file = await self._fetch(source.url)
            reservation.take(len(file))
        if not file:
            raise InvalidPayload("the image has no bytes")
        return file

    async def _fetch(self, url: str) -> bytes:
        from handler.serving.media.fetch import Fetcher, read_file  # aiohttp is loaded by the first URL

        if _host(url) == _FILES:
            return await run_in_daemon_thread(partial(read_file, url, self._rules))
        if self._fetcher is None:
            self._fetcher = Fetcher(self._rules, FETCHES)
        return await self._fetcher.fetch(url)

    def _pixels(self, source: MediaSource, file: bytes) -> int:
        """Return how many an image has by its header."""
        try:
            return self._checked(*read_size(file))
        except InvalidPayload as error:
            raise InvalidPayload(f"{source.name}: {error.message}") from None

    def _checked(self, width: int, height: int) -> int:
        most = self._rules.max_pixels
        if width * height > most:
            limit = f"at most {most} in all (option.max_image_pixels)"
            raise InvalidPayload(f"the image has {width} × {height} pixels; {limit}")
        return width * height

    async def _image(self, file: bytes, pixels: int, flow: Flow, reservation: Reservation) -> Image:
        try:
            return await self._in_turn(file, pixels, flow)
        except LargerThanRead as larger:  # as a GIF whose first frame is larger than its screen
            found = self._checked(*larger.args)
            reservation.take(_BYTES_OF_PIXEL * (found - pixels))
            return await self._in_turn(file, found, flow)

    async def _in_turn(self, file: bytes, pixels: int, flow: Flow) -> Image:
        """Decode a small image within little time, so that no turn at it takes long; others, and slow ones, apart."""
        if pixels <= _QUICK_PIXELS:
            with contextlib.suppress(LimitExceeded):
                return await self._turn(file, pixels, flow, slow=False)
        try:
            return await self._turn(file, pixels, flow, slow=True)
        except LimitExceeded:
            memory = _memory(file, pixels) >> 20
            raise InvalidPayload(f"the image needs more than {SECONDS:g} s or {memory} MiB") from None

    async def _turn(self, file: bytes, pixels: int, flow: Flow, *, slow: bool) -> Image:
        seconds, nice = (SECONDS, _NICE) if slow else (_QUICK_SECONDS, 0)
        decode = partial(self._decode, file, pixels, Limits(seconds, _memory(file, pixels), _PATIENCE, nice))
        return await asyncio.wrap_future(self._decoders.submit(decode, _COST + pixels, slow=slow, flow=flow))

    def _decode(self, file: bytes, pixels: int, limits: Limits) -> Image:
        job = Job(pixels, limits, len(file))
        try:
            ((width, height, digest), *parts), _ = self._process.run(job, file)
        except NotRun as error:
            raise Unavailable(f"the image cannot be decoded: {client_words(str(error))}") from None
        return Image(width, height, b"".join(parts), digest)


async def _together(parts: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines at a time; the first that fails ends the others."""
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


def _memory(file: bytes, pixels: int) -> int:
    return _MEMORY + _MEMORY_OF_PIXEL * pixels + 2 * len(file)


def _make() -> Work:
    from handler.serving.media.image.decode import decode  # Pillow, in the process only

    return decode
