"""Decoding as vLLM does, the memory that the images of all requests share, and the options."""

from __future__ import annotations

import functools
import gc
import io
import json
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import PIL.Image
import pytest
from PIL import PngImagePlugin

from handler.config.loader import read_config
from handler.core.errors import ConfigError, InvalidPayload, Overloaded, ServingError, Unavailable
from handler.core.framing import dumps
from handler.core.media import MediaSource, Medium
from handler.core.package import install
from handler.core.text import Prompt, Vocabulary
from handler.core.values import Request, Truncation
from handler.engines.process.sandbox import Job, LimitExceeded, Sandbox
from handler.protocols.kernel.context import ServerContext
from handler.serving.media import fetch, image_decoder
from handler.serving.media import loader as media
from handler.serving.media.decoder import FileRules, LargerThanRead
from handler.serving.media.fetch import is_public
from handler.serving.media.image import DECODER, read_size
from handler.serving.media.image_decoder import decode, without_ancillary
from handler.serving.media.loader import Load, MediaLoader, media_rules, missing_packages, place_media
from handler.serving.quota import Quota
from handler.serving.request.task import RequestTask
from handler.serving.turns import TurnThreads
from tests.app.media.files import data_url, file_server, image_file, png
from tests.doubles.steps import steps
from tests.limits import GIB, KIB, MIB, WORDS, undocumented
from tests.one_test import in_one_test
from tests.servers import PATIENCE, wait_for
from tests.stepped import Bench, benches

__all__ = ["benches"]

RULES = media_rules(read_config(environ={}).checked())
RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def saved(image: PIL.Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def decoded(data: bytes) -> Medium:
    (size, digest), *parts = decode(1 << 20, memoryview(data))
    return Medium("image", size, b"".join(parts), digest)


def pair(mode: str, left: Any, right: Any) -> PIL.Image.Image:
    """Two pixels beside each other."""
    image = PIL.Image.new(mode, (2, 1), left)
    image.putpixel((1, 0), right)
    return image


def turned() -> bytes:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # to be shown turned to the right
    return saved(pair("RGB", RED, BLUE), exif=exif)


XMP = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


def with_text(chunk: PngImagePlugin.PngInfo) -> bytes:
    return saved(pair("RGB", RED, BLUE), pnginfo=chunk, icc_profile=bytes(300))


def turned_by_xmp(more: str = "") -> bytes:
    info = PngImagePlugin.PngInfo()
    info.add_itxt("XML:com.adobe.xmp", XMP.decode() + more, zip=not more)
    return with_text(info)


def turned_by_imagemagick() -> bytes:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    info = PngImagePlugin.PngInfo()
    info.add_text("Raw profile type exif", f"\nexif\n{len(exif.tobytes()):8}\n{exif.tobytes().hex()}\n", zip=True)
    return with_text(info)


def palette() -> bytes:
    image = pair("RGB", RED, BLUE).convert("P", palette=PIL.Image.Palette.ADAPTIVE)
    return saved(image, transparency=image.getpixel((1, 0)))


def local_colours() -> bytes:
    """A GIF whose table of colours stands in its frame."""
    image = pair("P", 0, 1)
    image.putpalette((*RED, *BLUE))
    file = saved(image, "GIF")
    flags, table = file[10], file[13 : 13 + (6 << (file[10] & 7))]
    start = file.index(b",", 13 + len(table))
    frame, pixels = file[start : start + 9], file[start + 10 :]
    return file[:10] + b"\0" + file[11:13] + frame + bytes([flags & 0x87]) + table + pixels


CASES = {
    "RGB": (saved(pair("RGB", RED, BLUE)), (2, 1), (*RED, *BLUE)),
    "transparent": (saved(pair("RGBA", (*RED, 255), (0, 0, 0, 0))), (2, 1), (*RED, *WHITE)),
    "half transparent": (saved(pair("RGBA", (*RED, 255), (0, 0, 255, 51))), (2, 1), (*RED, 204, 204, 255)),
    "gray and transparent": (saved(pair("LA", (7, 255), (7, 0))), (2, 1), (7, 7, 7, *WHITE)),
    "palette": (palette(), (2, 1), (*RED, *WHITE)),
    "gray": (saved(pair("L", 7, 9)), (2, 1), (7, 7, 7, 9, 9, 9)),
    "black and white": (saved(pair("1", 0, 1)), (2, 1), (0, 0, 0, *WHITE)),
    "turned by EXIF": (turned(), (1, 2), (*RED, *BLUE)),
    "turned by XMP": (turned_by_xmp(), (1, 2), (*RED, *BLUE)),
    "turned by ImageMagick's profile": (turned_by_imagemagick(), (1, 2), (*RED, *BLUE)),
    "a JPEG turned by XMP": (saved(PIL.Image.new("L", (2, 1), 7), "JPEG", xmp=XMP), (1, 2), (7,) * 6),
    "much XMP": (turned_by_xmp(" " * 300_000), (1, 2), (*RED, *BLUE)),
    "a WebP's much XMP": (saved(PIL.Image.new("L", (2, 3)), "WEBP", xmp=XMP + bytes(1 << 20)), (3, 2), (0,) * 18),
    "a broken EXIF": (saved(pair("RGB", RED, BLUE), exif=b"Exif\0\0II*\0\xff\xff\xff\xff"), (2, 1), (*RED, *BLUE)),
    "WebP": (saved(pair("RGB", RED, BLUE), "WEBP", lossless=True), (2, 1), (*RED, *BLUE)),
    "the first frame": (
        saved(pair("RGB", RED, RED), "GIF", save_all=True, append_images=[pair("L", 7, 9)]), (2, 1), (*RED, *RED)
    ),
    "a transparent GIF": (
        saved(pair("P", 0, 1), "GIF", transparency=1), (2, 1), (0, 0, 0, *WHITE)
    ),
    "a GIF whose frame has the colours": (local_colours(), (2, 1), (*RED, *BLUE)),
    "CMYK": (saved(PIL.Image.new("CMYK", (2, 1)), "JPEG"), (2, 1), (*WHITE, *WHITE)),
}  # fmt: skip


@in_one_test("name", CASES)
def test_images_are_decoded_as_vllm_does(name: str) -> None:
    data, size, pixels = CASES[name]
    found = decoded(data)
    assert (found.size, tuple(found.data)) == (size, pixels)
    assert sorted(read_size(data)) == sorted(size)  # before it is turned


def chunks(number: int, name: bytes, head: bytes, unpacked: bytes = bytes(1 << 20)) -> bytes:
    """A PNG of one pixel with that many packed chunks of a MiB, before its pixels and after them."""
    packed, pixel = [(name, head + zlib.compress(unpacked))] * number, (b"IDAT", zlib.compress(bytes(4)))
    return png(1, 1, *packed, pixel, *packed)


def segments(number: int, marker: int, body: bytes) -> bytes:
    file = saved(PIL.Image.new("L", (1, 1)), "JPEG")
    return file[:2] + number * (struct.pack(">BBH", 0xFF, marker, 2 + len(body)) + body) + file[2:]


def scans(number: int) -> bytes:
    file = saved(PIL.Image.new("L", (1, 1)), "JPEG", progressive=True)
    return file[:-2] + number * file[file.rindex(b"\xff\xda") : -2] + file[-2:]


def extensions(number: int, extension: bytes) -> bytes:
    file = saved(PIL.Image.new("L", (1, 1)), "GIF")
    assert b",\0\0\0\0" in file
    return file.replace(b",\0\0\0\0", number * extension + b",\0\0\0\0", 1)


EXIF = b"Exif\0\0" + bytes(60_000)
LEFT_OUT = {
    "ICC profiles": chunks(150, b"iCCP", b"a\0\0"),
    "texts": chunks(30, b"zTXt", b"a\0\0"),
    "texts without a name": chunks(150, b"zTXt", b"\0\0"),
    "texts that are no UTF-8": chunks(150, b"iTXt", b"a\0\1\0\0\0", b"\xff" * (1 << 20)),
    "XMP more than once": chunks(150, b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0"),
    "private chunks": chunks(150, b"abCd", b""),
    "a JPEG's ICC profile": segments(200, 0xE2, b"ICC_PROFILE\0\1\xff" + bytes(60_000)),
    "Photoshop's resources": segments(200, 0xED, b"Photoshop 3.0\0" + b"8BIM\x04\x04\0\0\0\0\0\0" * 4000),
    "further images": segments(200, 0xE2, b"MPF\0" + bytes(60_000)),
    "comments": segments(200, 0xFE, bytes(60_000)),
    "empty segments": segments(4000, 0xE0, b""),
    "a GIF's comments": extensions(200, b"!\xfe" + 200 * (b"\xff" + bytes(255)) + b"\0"),
}
TOO_MANY = {
    "65536 chunks": png(1, 1, *[(b"abCd", b"")] * 65536, (b"IDAT", zlib.compress(bytes(4)))),
    "65536 chunks of pixels": png(1, 1, (b"IDAT", zlib.compress(bytes(4))), *[(b"IDAT", b"")] * 65536),
    "4096 segments": segments(4096, 0xE0, b""),
    "500 scans": scans(500),
    "65536 blocks": extensions(65537, b"!\x01\0"),
    "262145 bytes of Exif": png(1, 1, (b"eXIf", bytes(262145)), (b"IDAT", zlib.compress(bytes(4)))),
    "300050 bytes of Exif": segments(5, 0xE1, EXIF),
    "300024 bytes of Exif": saved(PIL.Image.new("L", (1, 1)), "WEBP", exif=EXIF * 5),
}


@in_one_test("name", LEFT_OUT)
def test_what_decides_no_pixel_is_left_out_before_it_is_unpacked(name: str) -> None:
    data = LEFT_OUT[name]
    with mock.patch.object(
        PngImagePlugin, "_safe_zlib_decompress", wraps=PngImagePlugin._safe_zlib_decompress
    ) as unpack:
        assert decoded(data).size == (1, 1)
    assert unpack.call_count <= 1
    assert len(without_ancillary(memoryview(data))) < 2000


@in_one_test("name", TOO_MANY)
def test_images_of_implausibly_many_parts_are_refused_unread(name: str) -> None:
    number = name.split()[0]
    with mock.patch.object(PIL.Image.Image, "getexif") as parse, pytest.raises(InvalidPayload, match=number):
        decoded(TOO_MANY[name])
    assert not parse.called


@in_one_test("cut", [0, 1, 7, 20, 100])
@in_one_test("name", CASES)
def test_what_is_left_of_a_broken_file_is_as_broken(name: str, cut: int) -> None:
    data = CASES[name][0]
    assert len(without_ancillary(memoryview(data[: len(data) - cut] if cut < len(data) else b""))) <= len(data)


def test_the_decoder_says_what_is_wrong_with_an_image() -> None:
    with pytest.raises(InvalidPayload, match=r"^it is not JPEG, PNG, WebP or GIF$"):
        decoded(b"what is this?")
    with pytest.raises(InvalidPayload, match=r"^the image is broken: \w"):
        decoded(image_file()[:-30])
    with mock.patch.object(PIL.Image, "open", side_effect=OSError), pytest.raises(InvalidPayload) as raised:
        decoded(image_file())
    assert raised.value.message == "the image is broken: it cannot be read"


def test_an_image_has_as_many_pixels_as_it_may() -> None:
    """By its header, or by the decoder's own look."""
    file = saved(pair("RGB", RED, BLUE))
    assert next(decode(2, memoryview(file)))[0] == (2, 1)
    for data in (file, saved(pair("RGB", RED, BLUE), "GIF").replace(b"a\x02\0\x01\0", b"a\x01\0\x01\0", 1)):
        with pytest.raises(LargerThanRead) as raised:
            next(decode(1, memoryview(data)))
        assert raised.value.args == (2, 1)


def test_as_many_parts_as_may_be_are_read() -> None:
    pixels = (b"IDAT", zlib.compress(bytes(4)))
    for file in (
        png(1, 1, *[(b"abCd", b"")] * 65_532, pixels),
        segments(4090, 0xE0, b""),
        scans(500 - scans(0).count(b"\xff\xda")),
        extensions(65_536, b"!\x01\0"),
        png(1, 1, (b"eXIf", bytes(262_138)), pixels),
    ):
        assert decoded(file).size == (1, 1)


def test_pixels_come_in_parts_of_a_mib() -> None:
    image = PIL.Image.effect_noise((1024, 512), 50).convert("RGB")
    _, *parts = decode(1 << 20, memoryview(saved(image)))
    assert [len(part) for part in parts] == [1 << 20, 1 << 19]
    assert b"".join(parts) == image.tobytes()


def test_equal_pixels_have_equal_digests() -> None:
    one = pair("RGB", RED, BLUE)
    webp, low, high = saved(one, "WEBP", lossless=True), saved(one, compress_level=0), saved(one, compress_level=9)
    assert len({decoded(data).digest for data in (webp, low, high)}) == 1
    column = PIL.Image.new("RGB", (1, 2), RED)
    column.putpixel((0, 1), BLUE)
    assert decoded(saved(column)).data == decoded(low).data
    others = [column, pair("RGB", RED, (0, 0, 254)), pair("RGB", BLUE, RED), one.resize((4, 1))]
    assert len({decoded(saved(image)).digest for image in (one, *others)}) == 5


@in_one_test(
    ("address", "public"),
    [("93.184.216.34", True), ("8.8.8.8", True), ("2606:2800:220:1::1", True), ("::ffff:8.8.8.8", True),
     ("64:ff9b::808:808", True), ("172.15.255.255", True), ("172.32.0.1", True), ("100.128.0.0", True),
     ("100.127.255.255", False), ("169.254.0.1", False), ("192.0.0.8", False), ("192.88.99.1", False),
     ("239.1.1.1", False), ("::ffff:10.0.0.1", False), ("64:ff9b::a00:1", False), ("fe80::1%eth0", False),
     ("2001:db8::1", False), ("2001:10::1", False), ("3fff::1", False), ("5f00::1", False), ("fc00::1", False)],
)  # fmt: skip
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) is public


@pytest.fixture
def images() -> Iterator[MediaLoader]:
    loader = MediaLoader(RULES)
    yield loader
    loader.close()


def source(data: bytes, name: str = "image") -> MediaSource:
    return MediaSource("image", data, "", name)


def refusal(loader: MediaLoader, *sources: MediaSource) -> ServingError:
    with pytest.raises(ServingError) as raised:
        loader.load(sources).result()
    return raised.value


def test_memory_is_given_back_when_nothing_refers_to_it(images: MediaLoader) -> None:
    png, jpeg = image_file(), image_file("JPEG")
    loaded = images.load([source(png), source(jpeg)]).result()
    assert images.memory.taken == len(png) + len(jpeg) + 2 * 8 * 6 * 3
    assert [image.size for image in loaded.media] == [(8, 6)] * 2
    del loaded
    gc.collect()
    assert images.memory.taken == 0


@functools.cache
def huge() -> bytes:
    return saved(PIL.Image.new("RGB", (5700, 5700)), "WEBP", lossless=True)


"""Some hundred bytes that become 97 MB."""


def test_a_request_with_too_many_pixels_is_refused_by_its_headers(images: MediaLoader) -> None:
    with mock.patch.object(Sandbox, "run", autospec=True, side_effect=Sandbox.run) as run:
        error = refusal(images, *[source(huge())] * 32)
        assert isinstance(error, InvalidPayload)
        assert "the request's images need more than" in error.message
        assert not run.called
    assert images.memory.taken == 0


def test_large_images_of_one_client_do_not_hold_up_a_neighbours_small_one(images: MediaLoader) -> None:
    """It waits neither for their decoding nor for their memory, of which three of them have nearly all."""
    images.memory = Quota(3 * 98_000_000, media.SPARE_MEMORY, media.LITTLE_MEMORY, "full")
    images.load([source(image_file())]).result()  # the process runs
    attack = [images.load([source(huge())] * 3) for _ in range(30)]
    wait_for(lambda: images.memory.taken > 3 * 97_000_000, PATIENCE, "the attack does not begin")
    with mock.patch.object(Sandbox, "run", autospec=True, side_effect=Sandbox.run) as run:
        assert images.load([source(image_file())]).result().media[0].size == (8, 6)
        assert run.call_count <= 3
    outcomes = [each.exception(timeout=PATIENCE) for each in attack]
    assert outcomes.count(None) >= 1
    assert all(isinstance(outcome, Overloaded) for outcome in outcomes if outcome is not None)


def test_a_file_takes_memory_while_it_arrives() -> None:
    config = read_config(overrides=["option.llm_engine=echo"], environ={}).checked()
    with file_server() as files, mock.patch.object(fetch, "is_public", return_value=True):
        loader = MediaLoader(media_rules(replace(config, allowed_media_domains=(files.domain,))))
        loading = loader.load([MediaSource("image", None, files.url("/slow"), "image")])
        wait_for(lambda: loader.memory.taken == 20, PATIENCE, "what has arrived does not count")
        loading.cancel()
        wait_for(lambda: loader.memory.taken == 0, PATIENCE, "the memory was not given back")
        loader.close()


def test_pixels_are_reserved_before_any_is_decoded(images: MediaLoader) -> None:
    png, go_on = image_file(), threading.Event()
    run = Sandbox.run

    def later(*given: Any) -> list[Any]:
        assert go_on.wait(PATIENCE)
        return run(*given)

    with mock.patch.object(Sandbox, "run", later):
        loading = images.load([source(png), source(png)])
        try:
            wait_for(lambda: images.memory.taken == 2 * (len(png) + 8 * 6 * 3), PATIENCE, "the pixels do not count")
        finally:
            go_on.set()
        assert loading.result().media[0] == loading.result().media[1]


def test_images_beyond_the_memory_wait_for_other_requests(images: MediaLoader) -> None:
    images.memory = Quota(3 * (len(image_file()) + 8 * 6 * 3), 0, 0, "full")
    two = [source(image_file())] * 2
    loaded = images.load(two).result()
    assert isinstance(refusal(images, *two), Overloaded)
    loaded.reservation.give_back()
    assert isinstance(refusal(images, *two, *two), InvalidPayload)
    assert len(images.load(two).result().media) == 2


def test_an_image_larger_than_its_header_is_decoded_at_its_known_size(images: MediaLoader) -> None:
    gif = image_file("GIF").replace(b"GIF87a\x08\0\x06\0", b"GIF87a\x01\0\x01\0")
    assert read_size(gif) == (1, 1)
    loaded = images.load([source(gif)]).result()
    assert loaded.media[0].size == (8, 6)
    assert images.memory.taken == len(gif) + 8 * 6 * 3


def test_an_image_that_is_small_and_slow_gets_its_time_apart(images: MediaLoader) -> None:
    with (
        mock.patch.object(media, "_QUICK_SECONDS", 1e-4),
        mock.patch.object(TurnThreads, "submit", autospec=True, side_effect=TurnThreads.submit) as turn,
    ):
        images.load([source(image_file("WEBP", (1000, 1000), lossless=True))]).result()
    assert [call.kwargs["slow"] for call in turn.call_args_list] == [False, True]
    told, taken = (call.args[2] for call in turn.call_args_list)
    assert told < 0.1
    assert taken > RULES.files["image"].max_units / media.UNITS_PER_SECOND  # the largest whose header says its size


def test_images_slower_than_announced_go_after_a_neighbours_large_one(images: MediaLoader) -> None:
    go_on, order = threading.Event(), list[tuple[int, bool]]()

    begun = threading.Event()

    def run(sandbox: Sandbox, job: Job, file: bytes, spent: object) -> list[Any]:
        begun.set()
        assert go_on.wait(PATIENCE)
        order.append((job.subject, job.limits.nice > 0))
        if not job.limits.nice:
            if len(order) == 5:  # the others wait for their second turn, beside the neighbour
                wait_for(lambda: submit.call_count == 10, PATIENCE, "they do not come again")
            raise LimitExceeded
        return [((1, 1), ""), bytes(3)]

    with (
        mock.patch.object(Sandbox, "run", run),
        mock.patch.object(images, "_decoders", TurnThreads(1, 1, "one")) as threads,
        mock.patch.object(threads, "submit", wraps=threads.submit) as submit,
    ):
        hostile = [images.load([source(image_file())]) for _ in range(5)]
        wait_for(lambda: begun.is_set() and submit.call_count == 5, PATIENCE, "the attack does not begin")
        large = images.load([source(huge())])
        wait_for(lambda: submit.call_count == 6, PATIENCE, "the neighbour does not wait")
        go_on.set()
        for each in (*hostile, large):
            each.result(PATIENCE)
        threads.shutdown()
    small = 8 * 6
    assert order == [(small, False)] * 5 + [(5700**2, True)] + [(small, True)] * 5


def test_60_requests_of_an_owner_delay_anothers_image_by_at_most_one(images: MediaLoader) -> None:
    """Their headers promise little. The meter is a stand-in's."""
    go_on, order = threading.Event(), list[bytes]()
    mine, neighbours = image_file(), image_file("WEBP", (900, 900))

    def run(sandbox: Sandbox, job: Job, file: bytes, spent: Callable[[float], object]) -> list[Any]:
        order.append(file)
        if len(order) == 5:
            assert go_on.wait(PATIENCE)
        spent(0.19 if file == mine else 0.03)
        return [((1, 1), ""), bytes(3)]

    with (
        mock.patch.object(Sandbox, "run", run),
        mock.patch.object(images, "_decoders", TurnThreads(1, 1, "one")) as threads,
        mock.patch.object(threads, "submit", wraps=threads.submit) as submit,
    ):
        hostile = [images.load([source(mine)] * 4, "hostile") for _ in range(60)]
        wait_for(lambda: len(order) == 5 and submit.call_count == 60 * 4, PATIENCE, "the attack does not begin")
        other = images.load([source(neighbours)], "other")
        wait_for(lambda: submit.call_count == 60 * 4 + 1, PATIENCE, "the neighbour does not wait")
        go_on.set()
        for each in (*hostile, other):
            each.result(PATIENCE)
        threads.shutdown()
    assert order.index(neighbours) == 5


@in_one_test("kind", ["PNG", "JPEG", "WEBP", "GIF"])
@in_one_test("options", [{}, {"lossless": True, "progressive": True}])
def test_headers_say_the_size(kind: str, options: dict[str, Any]) -> None:
    data = saved(PIL.Image.new("RGB", (300, 7)), kind, **options)
    assert read_size(data) == (300, 7)
    for end in range(len(data)):
        assert min(read_size(data[:end])) >= 0


def test_a_jpegs_size_is_not_searched_for_long() -> None:
    noise = PIL.Image.effect_noise((300, 7), 9).convert("RGB")
    photo = saved(noise, "JPEG", icc_profile=bytes(200_000), comment=b"x" * 60_000)
    assert read_size(photo) == (300, 7)
    assert read_size(photo[:2] + b"\xff" * 9 + photo[2:]) == (300, 7)
    for hostile in (b"\xff" * (20 << 20), b"\xff\xd0" * (10 << 20), b"\xff\xe0\0\2" * (5 << 20)):
        file = b"\xff\xd8" + hostile
        assert read_size(file) == (0, 0)
        assert steps(functools.partial(read_size, file)) < 5_000


def test_one_broken_image_refuses_the_request(images: MediaLoader) -> None:
    error = refusal(images, source(image_file(), "a"), source(b"x", "b"))
    assert error.message == "b: it is not JPEG, PNG, WebP or GIF"


def test_an_image_that_takes_too_much_memory_ends_its_own_decoding(images: MediaLoader) -> None:
    with mock.patch.object(Load, "memory", 1 << 20):
        error = refusal(images, source(image_file(size=(3000, 3000))))
    assert isinstance(error, InvalidPayload)
    assert len(images.load([source(image_file())]).result().media) == 1


def test_an_image_that_takes_too_long_ends_its_own_decoding(images: MediaLoader) -> None:
    with mock.patch.object(media, "SECONDS", 1e-3):
        error = refusal(images, source(image_file("WEBP", (3000, 3000), lossless=True)))
    assert error.message.startswith("image: the image needs more than 0.001 s")
    assert len(images.load([source(image_file())]).result().media) == 1


def test_too_many_that_wait_are_refused(images: MediaLoader) -> None:
    with mock.patch.object(images, "_waiting", Quota(1, 0, 0, "full")), pytest.raises(Overloaded):
        images.load([source(image_file())] * 2)


def test_a_closed_loader_loads_nothing() -> None:
    loader = MediaLoader(RULES)
    loader.load([source(image_file())]).result()
    loader.close()
    with pytest.raises(Unavailable):
        loader.load([source(image_file())])


def refused(*settings: str) -> str:
    return " ".join(problem.message for problem in read_config(overrides=settings, environ={}).problems)


@in_one_test(
    ("text", "hosts"),
    [("example.com, B.example:8443", ("example.com", "b.example:8443")), ("*", ("*",)),
     ('["a.example"]', ("a.example",)), ("[2606:2800::1]:8080", ("[2606:2800::1]:8080",)),
     ("https://example.com", None), ("a,,b", None), ("[1]", None)],
)  # fmt: skip
def test_hosts_are_names_perhaps_with_a_port(text: str, hosts: tuple[str, ...] | None) -> None:
    given = f"option.allowed_media_domains={text}"
    if hosts is None:
        assert "must be host names" in refused(given)
    else:
        assert read_config(overrides=[given], environ={}).checked().allowed_media_domains == hosts


def test_a_directory_that_is_not_there_stops_the_start() -> None:
    config = read_config(overrides=["option.allowed_local_media_path=/none"], environ={}).checked()
    with pytest.raises(ConfigError, match=r"option\.allowed_local_media_path=/none: there is no such directory"):
        media_rules(config)


def test_vllms_arguments_that_the_server_reads_are_refused_in_engine_args() -> None:
    args = 'option.engine_args={"allowed_media_domains": ["a.example"]}'
    assert "set option.allowed_media_domains" in refused("option.llm_engine=vllm", args)


def test_without_pillow_images_are_refused_by_its_name() -> None:
    cure = f"PIL and aiohttp: {install('lmi-handler[images]')}"
    with mock.patch("importlib.util.find_spec", return_value=None):
        assert missing_packages("image") == f"the server cannot import {cure}"
    assert missing_packages("image") == ""


def test_under_djl_images_load_between_steps_and_go_with_their_request() -> None:
    bench = Bench(context=ServerContext(engine="scripted", no_media={"image": ""}))
    told: list[RequestTask] = []
    task = bench.model.open({}, on_bytes=told.append)
    part = {"type": "image_url", "image_url": {"url": data_url(image_file())}}
    memory = bench.model.admission.media.memory
    with mock.patch.object(memory, "change_locked", wraps=memory.change_locked) as change:
        task.begin(task.run(dumps({"messages": [{"role": "user", "content": [part]}], "max_tokens": 2})))
        while not task.finished:
            bench.loop.wait(0.05)
    assert json.loads(task.take())["choices"][0]["message"]["content"] == " <image> assistant:"
    file, decoded = len(image_file()), 8 * 6 * 3
    assert [call.args for call in change.call_args_list][:2] == [(0, file), (file, file + decoded)]
    del task
    told.clear()
    gc.collect()
    assert memory.taken == 0


def may_load(loader: MediaLoader, number: int) -> bool:
    """Return whether a request with so many images, beside all that are being loaded, is accepted."""
    try:
        loader.load([source(b"")] * number).cancel()
    except Overloaded:
        return False
    return True


@pytest.mark.filterwarnings("error")
def test_a_client_that_leaves_while_its_images_fail_logs_nothing(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    loader = MediaLoader(RULES)
    for _ in range(50):
        sources = [source(b"", "a"), MediaSource("image", None, "ftp://a", "b"), source(b"x", "c")]
        loader.load(sources).cancel()
        with pytest.raises(InvalidPayload):
            loader.load(sources).result(PATIENCE)
    gc.collect()
    wait_for(lambda: may_load(loader, media.MAX_MEDIA_LOADING), PATIENCE, "some still count as loading")
    loader.close()
    assert (caplog.text, "never" in capfd.readouterr().err) == ("", False)
    assert loader.memory.taken == 0


def test_the_decoders_process_decodes_images_by_it() -> None:
    assert DECODER.make() is decode


# -- media in a prompt -------------------------------------------------------------------------------------------


class TokenOfTen(NamedTuple):
    """A token, 7, for each ten pixels of an image's width."""

    placeholder: int = 7
    text: str = ""

    def count(self, size: Sequence[int]) -> int:
        if size[0] > 100:
            raise ValueError("it is too wide")
        return size[0] // 10


def placed(ids: list[int], *media: Medium, truncation: Truncation | None = None) -> Prompt:
    sources = tuple(MediaSource(medium.kind, b"", "", f"messages[{index}]") for index, medium in enumerate(media))
    request = Request("", media=sources, truncation=truncation)
    prompt = Prompt("text", ids, Vocabulary([b"a"] * 10))
    return place_media(request, prompt, media, {"image": TokenOfTen()})


def picture(width: int) -> Medium:
    return Medium("image", (width, 1), bytes(3), f"of {width}")


def test_each_placeholder_becomes_the_tokens_of_its_image() -> None:
    prompt = placed([1, 7, 2, 7], picture(20), picture(30))
    assert list(prompt.ids) == [1, 7, 7, 2, 7, 7, 7]
    assert prompt.media is not None
    assert prompt.media.file.text == "text"


@pytest.mark.parametrize(
    ("ids", "medium", "truncation", "words"),
    [
        ([7], Medium("audio", (1,), b"", ""), None, "'messages': the model does not accept audio clips"),
        ([7], picture(10), Truncation(5), "truncate_prompt_tokens: a prompt with images cannot be truncated"),
        ([7], picture(101), None, "messages[0]: it is too wide"),
        ([7, 7], picture(10), None, "'messages': "),
    ],
)
def test_media_that_do_not_fit_a_prompt_are_refused_by_name(
    ids: list[int], medium: Medium, truncation: Truncation | None, words: str
) -> None:
    with pytest.raises(ServingError) as raised:
        placed(ids, medium, truncation=truncation)
    assert raised.value.message.startswith(words)


def test_the_limits_of_images_are_documented() -> None:
    assert not undocumented(
        "media.md",
        f"Decoding a file may take {media.SECONDS:g} s of CPU time",
        f"{media.FETCHES} files are fetched at a time, at most {media.FETCHES_OF_HOST} from one host",
        f"All requests together may load {media.MAX_MEDIA_LOADING:,} files and hold {media.MAX_MEMORY / GIB:g} GiB",
        f"another {media.SPARE_MEDIA:,} files for requests of at most {media.FEW_MEDIA}",
        f"Requests of at most {media.LITTLE_MEMORY / MIB:g} MiB have another {media.SPARE_MEMORY / MIB:g} MiB",
        f"more than {image_decoder.MAX_EXIF / KIB:g} KiB of Exif is refused",
        f"At most {WORDS[fetch.MAX_REDIRECTS]} redirects are followed",
    )


def jpeg(*segments: bytes) -> bytes:
    return b"\xff\xd8" + b"".join(segments) + b"\xff\xc0\0\x11\x08\0\x06\0\x08" + bytes(20)


def test_a_size_is_read_from_any_header() -> None:
    length = b"\xff\xe0\0\x04ab"
    for segments in (
        (),
        (length,),
        (b"\xff\xff\xff" + length[1:],),
        (b"\xff\x01", b"\xff\xd0", b"\xff\xd8"),
        (length,) * 255,
    ):
        assert read_size(jpeg(*segments)) == (8, 6)
    assert read_size(jpeg(*[length] * 256)) == (0, 0)
    assert read_size(jpeg(b"x")) == (0, 0)
    for marker in (0xC4, 0xC8, 0xCC):
        table = bytes([0xFF, marker, 0, 9]) + bytes(7)
        assert read_size(jpeg(table)) == (8, 6)
    for marker in (0xC1, 0xC2, 0xCF):
        assert read_size(jpeg().replace(b"\xff\xc0", bytes([0xFF, marker]))) == (8, 6)
    whole = jpeg()
    assert read_size(whole[:11]) == (8, 6)
    assert read_size(whole[:10]) == read_size(whole[:3]) == read_size(b"") == (0, 0)
    assert read_size(png(8, 6)[:24]) == (8, 6)
    assert read_size(b"GIF89a\x08\0\x06\x01") == (8, 262)


@pytest.mark.parametrize("lossless", [True, False])
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_a_webps_size_is_in_its_first_bytes(lossless: bool, mode: str) -> None:
    for size in ((1, 1), (300, 2), (2, 300)):
        file = saved(PIL.Image.new(mode, size), "WEBP", lossless=lossless)
        assert read_size(file[:30]) == size
    assert read_size(saved(PIL.Image.new("RGB", (300, 2)), "WEBP", xmp=b"a" * 9)[:30]) == (300, 2)


def test_an_image_may_have_as_many_pixels_as_the_option_says() -> None:
    known = FileRules(1, 48, 1.0)
    assert DECODER.units((8, 6), known) == 48
    with pytest.raises(InvalidPayload, match=r"^the image has 7 × 7 pixels; at most 48 in all \(option\.max_image_"):
        DECODER.units((7, 7), known)
