"""Load the images of requests: fetches on one thread's event loop, decoding in a process within limits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from handler.core.errors import InvalidPayload, Overloaded, Unavailable
from handler.core.images import Image, ImageSource
from handler.engines.process.sandbox import LimitExceeded, NotRun, Purpose, Sandbox
from handler.engines.process.sandbox_tasks import Job, Limits, Work
from handler.serving.media.rules import ImageRules

if TYPE_CHECKING:
    from handler.serving.media.fetch import Fetcher

T = TypeVar("T")

DECODERS = 2  # images decoded at a time
FETCHES = 32  # files fetched at a time, which bounds the memory that they take
MAX_WAITING = 1024  # images of all requests that are fetched and decoded, or wait for that
MAX_MEMORY = 1 << 30  # bytes of files and pixels of all requests, until they end

SECONDS = 10.0  # of computing for an image
_PATIENCE = 60.0  # seconds by the clock
_MEMORY, _MEMORY_OF_PIXEL = 64 << 20, 16  # bytes, beside the file's
_NICE = 2

_PURPOSE = Purpose("images", "are decoded")


class Memory:
    """Bytes that the images of all requests may have. Thread-safe."""

    def __init__(self, most: int = MAX_MEMORY) -> None:
        self.most = most
        self._lock = threading.RLock()  # the collector may give bytes back while a thread takes some
        self.taken = 0

    def take(self, size: int) -> None:
        """Raises Overloaded where there are too few."""
        with self._lock:
            if self.taken + size > self.most:
                raise Overloaded("images of other requests take all the memory that there is for them")
            self.taken += size

    def give_back(self, size: int) -> None:
        with self._lock:
            self.taken -= size


class Reservation:
    """One request's part of the memory, until it is given back or nothing refers to it."""

    def __init__(self, memory: Memory) -> None:
        self._memory, self._size = memory, 0

    def take(self, size: int) -> None:
        """Raises Overloaded as `Memory.take`; InvalidPayload where there never are so many."""
        if self._size + size > self._memory.most:
            raise InvalidPayload(f"the request's images have more than {self._memory.most} bytes of files and pixels")
        self._memory.take(size)
        self._size += size

    def give_back(self) -> None:
        size, self._size = self._size, 0
        self._memory.give_back(size)

    __del__ = give_back


class LoadedImages(NamedTuple):
    """The images of one request, and their memory."""

    images: tuple[Image, ...]
    reservation: Reservation


class ImageLoader:
    """Fetches and decodes. Its threads and its process begin with the first image. Thread-safe."""

    def __init__(self, rules: ImageRules) -> None:
        self._rules = rules
        self.memory = Memory()
        self._decoders = ThreadPoolExecutor(DECODERS, thread_name_prefix="images")
        self._process = Sandbox(_make, _PURPOSE)
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fetcher: Fetcher | None = None
        self._fetches = asyncio.Semaphore(FETCHES)
        self._num_waiting, self._closed = 0, False

    def load(self, sources: Sequence[ImageSource]) -> Future[LoadedImages]:
        """Have the images of a request loaded; to cancel the result ends the fetches.

        Raises:
            Unavailable: too many wait. The result raises it too, and InvalidPayload; both name the field.
        """
        with self._lock:
            if self._closed:
                raise Unavailable("the server is stopping")
            if self._num_waiting + len(sources) > MAX_WAITING:
                raise Overloaded(f"{self._num_waiting} images of other requests are being loaded")
            self._num_waiting += len(sources)
            loop = self._loop or self._start()
        future = asyncio.run_coroutine_threadsafe(self._load(sources), loop)
        future.add_done_callback(lambda _: self._ended(len(sources)))
        return future

    def close(self) -> None:
        """End threads and process; what is being loaded is given up."""
        with self._lock:
            loop, self._loop, self._closed = self._loop, None, True
        self._process.close()
        self._decoders.shutdown(wait=False, cancel_futures=True)
        if loop is not None:
            asyncio.run_coroutine_threadsafe(self._stop(), loop)

    def _ended(self, count: int) -> None:
        with self._lock:
            self._num_waiting -= count

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

    async def _load(self, sources: Sequence[ImageSource]) -> LoadedImages:
        reservation, tasks = Reservation(self.memory), list[asyncio.Task[Image]]()
        try:
            reservation.take(sum(len(source.data or b"") for source in sources))
            tasks += [asyncio.create_task(self._load_one(source, reservation)) for source in sources]
            images = tuple(await asyncio.gather(*tasks))
        except BaseException:
            reservation.give_back()
            for task in tasks:
                task.cancel()
            raise
        return LoadedImages(images, reservation)

    async def _load_one(self, source: ImageSource, reservation: Reservation) -> Image:
        try:
            if source.data is not None:
                image = await self._on_thread(self._decode, source.data)
            else:
                async with self._fetches:
                    image = await self._on_thread(self._decode, await self._fetch(source.url))
        except (InvalidPayload, Unavailable) as error:
            raise type(error)(f"{source.name}: {error.message}") from None
        reservation.take(len(image.rgb))  # now: the request's other images may take long
        return image

    async def _fetch(self, url: str) -> bytes:
        from handler.serving.media.fetch import Fetcher, read_file  # aiohttp is loaded by the first URL

        if url[:5].lower() == "file:":
            return await self._on_thread(read_file, url, self._rules)
        if self._fetcher is None:
            self._fetcher = Fetcher(self._rules, FETCHES)
        return await self._fetcher.fetch(url)

    async def _on_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._decoders, function, *arguments)

    def _decode(self, data: bytes) -> Image:
        if not data:
            raise InvalidPayload("the image has no bytes")
        memory = _MEMORY + _MEMORY_OF_PIXEL * self._rules.max_pixels + 2 * len(data)
        job = Job(self._rules.max_pixels, Limits(SECONDS, memory, _PATIENCE, _NICE), len(data))
        try:
            ((width, height, digest), *parts), _ = self._process.run(job, data)
        except LimitExceeded:
            raise InvalidPayload(f"the image needs more than {SECONDS:g} s or {memory >> 20} MiB") from None
        except NotRun as error:
            raise Unavailable(f"the image cannot be decoded: {error}") from None
        return Image(width, height, b"".join(parts), digest)


def _make() -> Work:
    from handler.serving.media.decode import decode  # Pillow, in the process only

    return decode
