"""Images in every dialect of a chat, and those that a server must not fetch or decode."""

from __future__ import annotations

import base64
import json
import os
import re
import resource
import socket
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from handler.serving.media import fetch
from tests.app.media.files import HOST, SVG, FileServer, data_url, file_server, image_file, png
from tests.app.server import serve, short_drain
from tests.servers import PATIENCE, LiveServer, http, options, wait_for

# -- images in every dialect of a chat: by data URL, by HTTP, from a file ----------------------------------------------


PNG = image_file()
TEXT = {"type": "text", "text": "one"}


_real_public, _real_getaddrinfo = fetch.is_public, socket.getaddrinfo


def public_host() -> AbstractContextManager[Any]:
    """The address of `FileServer` counts as public too; in both fixtures alike, whichever is made last."""
    return mock.patch.object(fetch, "is_public", lambda text: text == HOST or _real_public(text))


class Urls(dict[str, str]):
    """By kind."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, Urls]]:
    folder = tmp_path_factory.mktemp("media")
    (folder / "a b.png").write_bytes(PNG)
    with file_server() as files, public_host():
        settings = (f"option.allowed_media_domains={files.domain}", f"option.allowed_local_media_path={folder}")
        with serve("--engine", "echo", *options(*settings)) as server:
            server.wait_ready()
            yield (
                server,
                Urls(
                    data=data_url(PNG),
                    http=files.url(),
                    redirect=files.url("/moved"),
                    file=f"file://{Path(folder)}/a%20b.png",
                ),
            )


def openai(url: str) -> list[Any]:
    return [{"role": "user", "content": [TEXT, {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}]}]


@pytest.mark.parametrize("kind", ["data", "http", "redirect", "file"])
def test_a_chat_has_images(served: tuple[LiveServer, Urls], kind: str) -> None:
    server, urls = served
    answer = server.post({"messages": openai(urls[kind]), "max_tokens": 3}, "/v1/chat/completions").json()
    assert answer["choices"][0]["message"]["content"] == " user: one <image>"
    assert answer["usage"]["prompt_tokens"] == 4


def test_images_keep_their_places(served: tuple[LiveServer, Urls]) -> None:
    server, urls = served
    image = {"type": "image_url", "image_url": urls["data"]}
    content = [image, TEXT, {**image, "image_url": {"url": urls["http"], "detail": "low"}}, {**TEXT, "text": "two"}]
    messages = [{"role": "system", "content": [TEXT, TEXT]}, {"role": "user", "content": content}]
    answer = server.post({"messages": messages, "max_tokens": 8}, "/v1/chat/completions")
    text = answer.json()["choices"][0]["message"]["content"]
    assert text == " system: one one user: <image> one <image> two"
    assert answer.headers["x-lmi-ignored-parameters"] == "messages[].content[].image_url.detail"


def test_lmi_takes_them_whole_and_as_a_stream(served: tuple[LiveServer, Urls]) -> None:
    server, urls = served
    ask = {"messages": openai(urls["data"]), "max_tokens": 3}
    assert server.post(ask).json()["choices"][0]["message"]["content"] == " user: one <image>"
    assert "<image>" in server.post({**ask, "stream": True}).text


def anthropic(url: str) -> dict[str, Any]:
    head, _, data = url.partition(",")
    if head.startswith("data:"):
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    return {"type": "image", "source": {"type": "url", "url": url}}


@pytest.mark.parametrize("kind", ["data", "http"])
def test_anthropics_blocks(served: tuple[LiveServer, Urls], kind: str) -> None:
    server, urls = served
    use = {"type": "tool_use", "id": "a", "name": "see", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [TEXT, anthropic(urls[kind])]}
    messages = [
        {"role": "user", "content": [anthropic(urls[kind]), {**TEXT, "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result, {**TEXT, "text": "two"}]},
    ]
    answer = server.post({"messages": messages, "max_tokens": 40}, "/v1/messages").json()
    text = answer["content"][0]["text"]
    assert text.startswith(" user: <image> one assistant: ")
    assert "<tool_response> one </tool_response> user: <image> two assistant:" in text
    count = http.post(f"{server.url}/v1/messages/count_tokens", json={"messages": messages[:1]})
    assert count.json() == {"input_tokens": 4}


@pytest.mark.parametrize("kind", ["data", "http"])
def test_a_responses_items(served: tuple[LiveServer, Urls], kind: str) -> None:
    server, urls = served
    image = {"type": "input_image", "image_url": urls[kind], "detail": "auto"}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "one"}, image]},
        {"type": "function_call", "call_id": "a", "name": "see", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": [image]},
    ]
    answer = server.post({"input": items, "max_output_tokens": 40}, "/v1/responses").json()
    text = answer["output"][0]["content"][0]["text"]
    assert text.startswith(" user: one <image> assistant: ")
    assert "</tool_response> user: <image> assistant:" in text


@pytest.mark.parametrize("stream", [False, True])
def test_images_are_loaded_once_for_a_summary_and_the_response_after_it(stream: bool) -> None:
    """Each address answers once. The newest message of the user keeps its images beside the summary."""

    def items(*urls: str) -> list[Any]:
        images = [{"type": "input_image", "image_url": url} for url in urls]
        return [
            {"role": "user", "content": [{"type": "input_text", "text": "one " * 300}, *images[:2]]},
            {"type": "function_call", "call_id": "a", "name": "see", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": [images[2]]},
            {"role": "user", "content": [images[3], {"type": "input_text", "text": "two"}, images[4]]},
        ]

    with file_server() as files, public_host():
        settings = (f"option.allowed_media_domains={files.domain}", "option.max_model_len=600")
        with serve("--engine", "echo", *options(*settings)) as server:
            managed = {"context_management": [{"type": "compaction", "compact_threshold": 5}]}
            answers = []
            for urls in ([files.url(f"/once.{number}.png") for number in range(4)], [data_url(PNG)] * 4):
                body = {"input": items(*urls, data_url(PNG)), "max_output_tokens": 30, "stream": stream, **managed}
                found = server.post(body, "/v1/responses")
                assert found.status_code == 200, found.text
                answers.append(json.loads(found.text.splitlines()[-2][6:])["response"] if stream else found.json())
            assert sorted(files.asked) == [f"/once.{number}.png" for number in range(4)]
            count = {"input": [items(*[data_url(PNG)] * 5)[-1], answers[0]["output"][0]]}
            after = server.post(count, "/v1/responses/input_tokens").json()["input_tokens"]
    fetched, inline = answers
    assert [item["type"] for item in fetched["output"]] == ["compaction", "message"], fetched
    assert fetched["usage"] == inline["usage"]
    assert after + 310 < fetched["usage"]["input_tokens"] < after + 400, "both prompts"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "system", "content": [{"type": "image_url"}]}]},
         "messages[0].content[0]: 'image_url' is not supported: images are allowed only in user messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "video_url"}]}]},
         "messages[0].content[0]: 'video_url' is not supported: the engine reads only text, images and audio clips"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "file"}]}]},
         "messages[0].content[0]: 'file' is not supported: the engine reads only text, images and audio clips"),
        ("/v1/chat/completions", {"messages": [{"role": "system", "content": [{"type": "input_audio"}]}]},
         "messages[0].content[0]: 'input_audio' is not supported: audio clips are allowed only in user messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
         "messages[0].content[0]: 'image' is not supported: send the image as an 'image_url'"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
         "input[0].content[0]: 'input_file' is not supported: the engine reads only text, images and audio clips"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "poem"}]}]},
         "input[0].content[0]: 'poem' is not supported: the type must be one of text, refusal, input_text"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": 1}]}]},
         "messages[0].content[0].image_url must be a URL"),
        ("/v1/messages", {"max_tokens": 1, "system": [anthropic("http://a/")], "messages": []},
         "system[0]: 'image' is not supported: images are allowed only in user messages and tool results"),
        ("/v1/messages", {"max_tokens": 1, "messages": [
            {"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}]},
         "messages[0].content[0].source: 'file' is not supported"),
        ("/v1/messages", {"max_tokens": 1, "messages": [
            {"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": "#"}}]}]},
         "messages[0].content[0].source.data: the image is not base64"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
         "input[0].content[0].file_id is not supported"),
        ("/v1/responses", {"input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": data_url(b"<svg/>")}]}]},
         "input[0].content[0].image_url: it is not JPEG, PNG, WebP or GIF"),
        ("/v1/chat/completions", {"truncate_prompt_tokens": 2, "messages": openai(data_url(PNG))},
         "truncate_prompt_tokens: a prompt with images cannot be truncated"),
    ],
)  # fmt: skip
def test_each_names_its_own_field(served: tuple[LiveServer, Urls], path: str, body: Any, message: str) -> None:
    answer = served[0].post(body, path)
    assert (answer.status_code, message in answer.json()["error"]["message"]) == (400, True), answer.text


def test_a_large_image_comes_in_the_body(served: tuple[LiveServer, Urls]) -> None:
    noise = base64.b64encode(image_file("PNG", (900, 900), compress_level=0)).decode()
    assert len(noise) > 1 << 20  # read by another process
    answer = served[0].post(
        {"messages": openai(f"data:image/png;base64,{noise}"), "max_tokens": 3}, "/v1/chat/completions"
    )
    assert answer.json()["choices"][0]["message"]["content"] == " user: one <image>"


def test_models_of_texts_refuse_images_by_name() -> None:
    with serve("--engine", "echo", *options("option.limit_mm_per_prompt=image=0")) as server:
        server.wait_ready()
        answer = server.post({"messages": openai("http://a/"), "max_tokens": 3}, "/v1/chat/completions")
        assert answer.json()["error"]["message"] == (
            "messages[0].content[1]: 'image_url' is not supported: option.limit_mm_per_prompt is 0"
        )


# -- images that a server must not fetch or decode: each is refused by its reason, and its neighbours go on ------------


CHAT = "/v1/chat/completions"
NOT_PUBLIC = "its host has an address that is not public"
NOT_LISTED = "its host is not in option.allowed_media_domains"
OUTSIDE = "it is not a file below option.allowed_local_media_path"
MANY_PIXELS = r"pixels; at most 1000000 in all \(option.max_image_pixels\)"
_NAMES = {"inside.example": ["10.1.2.3"], "both.example": ["93.184.216.34", "127.0.0.1"], "six.example": ["::1"]}


def _getaddrinfo(host: Any, port: Any, *more: Any, **others: Any) -> list[Any]:
    if host not in _NAMES:
        return list(_real_getaddrinfo(host, port, *more, **others))
    return [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (one, port, 0, 0))
        if ":" in one
        else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port))
        for one in _NAMES[host]
    ]


@pytest.fixture(scope="module")
def files() -> Iterator[FileServer]:
    """Its address counts as public."""
    with file_server() as server, public_host(), mock.patch.object(socket, "getaddrinfo", _getaddrinfo):
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home") / "media"
    (folder / "below").mkdir(parents=True)
    (folder / "below" / "ok.png").write_bytes(image_file())
    (folder.parent / "secret.png").write_bytes(image_file())
    (folder / "link.png").symlink_to(folder.parent / "secret.png")
    (folder / "up").symlink_to(folder.parent)
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "large.png").write_bytes(image_file() + bytes(1 << 20))
    os.mkfifo(folder / "pipe")
    return folder


@pytest.fixture(scope="module")
def server(files: FileServer, folder: Path) -> Iterator[LiveServer]:
    settings = options(
        f"option.allowed_media_domains=*,{files.domain}", f"option.allowed_local_media_path={folder}",
        "option.image_fetch_timeout=100", "option.max_image_bytes=1048576", "option.max_image_pixels=1000000",
        "option.limit_mm_per_prompt=image=3",
    )  # fmt: skip
    with serve("--engine", "echo", *settings) as server:
        server.wait_ready()
        yield server


def ask(*urls: str, **more: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "what"}, *parts]}], **more}


def reason(server: LiveServer, *urls: str) -> str:
    answer = server.post(ask(*urls), CHAT)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    name = f"messages[0].content[{len(urls)}].image_url"
    assert message.startswith(name)
    return str(message.removeprefix(name).lstrip(": "))


ADDRESSES = (
    "127.0.0.1", "127.9.9.9", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:a9fe:a9fe]", "[64:ff9b::7f00:1]",
    "[64:ff9b::a9fe:a9fe]", "[64:ff9b:1::1]", "[2002:7f00:1::]", "[2001:0:7f00:1::]", "[fe80::1]", "[fe80::1%25lo]",
    "[fd00:ec2::254]", "[fec0::1]", "[ff02::1]", "[::127.0.0.1]", "169.254.169.254", "169.254.170.2", "10.0.0.1",
    "172.31.255.255", "192.168.0.1", "100.64.0.1", "0.0.0.0", "224.0.0.1", "255.255.255.255", "198.18.0.1",
    "0x7f.1", "localhost", "inside.example", "both.example", "six.example",
)  # fmt: skip


@pytest.mark.parametrize("host", ADDRESSES)
def test_only_public_addresses_are_connected_to(server: LiveServer, host: str) -> None:
    assert reason(server, f"http://{host}/a.png") == NOT_PUBLIC


@pytest.mark.parametrize("host", ["2130706433", "0177.0.0.1", "127.1", "0", "\uff11\uff12\uff17.1"])
def test_numbers_that_only_the_system_reads_as_an_address(server: LiveServer, host: str) -> None:
    """Older versions of aiohttp take them for addresses, and ask no resolver."""
    with mock.patch("aiohttp.connector.is_canonical_ipv4_address", return_value=True, create=True):
        assert reason(server, f"http://{host}/") == "it is not a valid URL"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (f"http://{HOST}:22/", NOT_LISTED),
        ("http://example.com:6379/", NOT_LISTED),
        ("https://example.com:80/", NOT_LISTED),
        ("http://user:word@example.com/", "the URL must not contain a user or a password"),
        ("http://example.com\\@127.0.0.1/", "it is not a valid URL"),
        ("http://[::1/", "it is not a valid URL"),
        ("http://2130706433/", "it is not a valid URL"),
        ("http://0177.0.0.1/", "it is not a valid URL"),
        ("http://127.1/", "it is not a valid URL"),
        ("http://0/", "it is not a valid URL"),
        ("http:///a.png", "it must be an http, https, file or data URL"),
        ("ftp://example.com/a.png", "must be an http, https, file or data URL"),
        ("gopher://127.0.0.1:11211/x", "must be an http, https, file or data URL"),
        ("/etc/passwd", "must be an http, https, file or data URL"),
        ("http://example.com:6379/" + "a" * 8168, NOT_LISTED),
        ("http://example.com:6379/" + "a" * 8169, "has 8193 characters; a URL may have at most 8192"),
        ("file:///etc/passwd", OUTSIDE),
        ("file:///proc/self/environ", OUTSIDE),
        ("file://{folder}/../secret.png", OUTSIDE),
        ("file://{folder}/%2e%2e/secret.png", OUTSIDE),
        ("file://{folder}/link.png", OUTSIDE),
        ("file://{folder}/up/secret.png", OUTSIDE),
        ("file://{folder}/loop", OUTSIDE),
        ("file://{folder}/pipe", OUTSIDE),
        ("file://{folder}/below", OUTSIDE),
        ("file://{folder}", OUTSIDE),
        ("file://{folder}/none.png", OUTSIDE),
        ("file://{folder}/below/ok.png%00", OUTSIDE),
        ("file://example.com{folder}/below/ok.png", OUTSIDE),
        ("file://{folder}/large.png", "the file has more than 1048576 bytes (option.max_image_bytes)"),
    ],
)
def test_urls_stay_where_the_options_allow_them(server: LiveServer, folder: Path, url: str, message: str) -> None:
    assert reason(server, url.replace("{folder}", str(folder))) == message


_BROKE = "it could not be fetched: its server closed the connection, or does not speak HTTP"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/away", "its server redirects to another host, or away from HTTPS"),
        ("/inside", "its server redirects to another host, or away from HTTPS"),
        ("/file", "its server redirects to another host, or away from HTTPS"),
        ("/port", NOT_LISTED),
        ("/circle", "its server redirects more than 3 times"),
        ("/long", "the file has more than 1048576 bytes (option.max_image_bytes)"),
        ("/endless", "the file has more than 1048576 bytes (option.max_image_bytes)"),
        ("/zip", "its server sends a Content-Encoding, which is not accepted"),
        ("/short", _BROKE),
        ("/mute", _BROKE),
        ("/svg", "it is not JPEG, PNG, WebP or GIF"),
        ("/none", "its server responds with status 404"),
    ],
)
def test_servers_that_misbehave(server: LiveServer, files: FileServer, path: str, message: str) -> None:
    assert reason(server, files.url(path)) == message


def test_a_server_that_takes_too_long(files: FileServer) -> None:
    settings = options(f"option.allowed_media_domains={files.domain}", "option.image_fetch_timeout=0.2")
    with serve("--engine", "echo", *settings) as hasty:
        hasty.wait_ready()
        assert reason(hasty, files.url("/slow")) == "it could not be fetched within 0.2 s (option.image_fetch_timeout)"


NOISE = os.urandom(1 << 12)
BROKEN: dict[str, Callable[[], tuple[bytes, str]]] = {
    "a large size in the header": lambda: (
        png(100_000, 100_000, (b"IDAT", zlib.compress(b"x"))),
        "the image has .* pixels",
    ),
    "more pixels than allowed": lambda: (image_file(size=(1001, 1000)), f"the image has 1001 × 1000 {MANY_PIXELS}"),
    "a small WebP of many pixels": lambda: (
        image_file("WEBP", (4000, 4000), lossless=True),
        f"4000 × 4000 {MANY_PIXELS}",
    ),
    "a GIF's frame beyond its screen": lambda: (
        image_file("GIF").replace(b",\0\0\0\0\x08\0\x06\0", b",\0\0\0\0\xff\xff\xff\xff"),
        f".*{MANY_PIXELS}",
    ),
    "a text that unpacks to much": lambda: (
        png(1, 1, (b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 27)))),
        "the image is broken: .*",
    ),
    "a truncated JPEG": lambda: (image_file("JPEG", (200, 200))[:-300], "the image is broken: .*truncated.*"),
    "a truncated PNG": lambda: (image_file(size=(200, 200))[:-60], "the image is broken: .*"),
    "a truncated WebP": lambda: (
        image_file("WEBP")[:-10],
        "(the image is broken: .*|it is not JPEG, PNG, WebP or GIF)",
    ),
    "no pixels": lambda: (png(10, 10), "the image is broken: .*"),
    "an SVG": lambda: (SVG, "it is not JPEG, PNG, WebP or GIF"),
    "PostScript": lambda: (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "it is not JPEG, PNG, WebP or GIF"),
    "a BMP": lambda: (image_file("BMP"), "it is not JPEG, PNG, WebP or GIF"),
    "a TIFF": lambda: (image_file("TIFF"), "it is not JPEG, PNG, WebP or GIF"),
    "noise": lambda: (NOISE, "it is not JPEG, PNG, WebP or GIF"),
}
"""By name, what makes the file, and the refusal."""


@pytest.mark.parametrize("name", BROKEN)
def test_files_that_are_no_images(server: LiveServer, name: str) -> None:
    data, message = BROKEN[name]()
    found = reason(server, data_url(data))
    assert re.search(message, found), found


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png;base64,", "the image is empty"),
        ("data:image/png;base64,@@@@", "the image is not base64"),
        ("data:image/png;base64,AAAA=AAA", "the image is not base64"),
        ("data:image/png,abc", "a data URL must be data:image/...;base64,..."),
        ("data:", "a data URL must be data:image/...;base64,..."),
        ("", "must be a URL"),
    ],
)
def test_data_urls_that_are_wrong(server: LiveServer, url: str, message: str) -> None:
    assert reason(server, url) == message


def test_a_request_has_no_more_images_than_allowed(server: LiveServer) -> None:
    message = "a request may have at most 3 images (option.limit_mm_per_prompt)"
    assert reason(server, *[data_url(image_file())] * 4) == message


def test_without_options_nothing_is_fetched_or_read(echo_server: LiveServer) -> None:
    message = "images are not fetched: option.allowed_media_domains is not set; send a data URL"
    assert reason(echo_server, "https://example.com/a.png") == message
    assert reason(echo_server, "file:///etc/passwd") == (
        "file URLs are not allowed: option.allowed_local_media_path is not set"
    )


def test_a_name_is_resolved_once(server: LiveServer) -> None:
    """DNS rebinding: a second look-up would find another address."""
    asked = []

    def turn(host: Any, port: Any, *more: Any, **others: Any) -> list[Any]:
        if host != "turning.example":
            return list(_real_getaddrinfo(host, port, *more, **others))
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.3" if len(asked) == 1 else "127.0.0.1", port))]

    public = mock.patch.object(fetch, "is_public", lambda text: text == "127.0.0.3")
    with public, mock.patch.object(socket, "getaddrinfo", turn):
        assert reason(server, "http://turning.example/") == "it could not be fetched: its server cannot be reached"
    assert len(asked) == 1


def test_neighbours_go_on_and_memory_stays(files: FileServer) -> None:
    """While many wait for a server that does not answer, and large files are refused, other requests are served."""
    settings = options(f"option.allowed_media_domains={files.domain}", "option.image_fetch_timeout=600")
    bomb = data_url(png(100_000, 100_000, (b"IDAT", zlib.compress(b"x"))))
    with short_drain(0.1), ThreadPoolExecutor(20) as clients, serve("--engine", "echo", *settings) as server:
        server.wait_ready()
        reason(server, bomb)  # what decodes has started
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        waiting = [clients.submit(server.post, ask(files.url("/slow")), CHAT) for _ in range(8)]
        wait_for(lambda: files.asked.count("/slow") >= 8, PATIENCE, "the slow server was not asked")
        refused = [clients.submit(reason, server, url) for url in [bomb, files.url("/endless")] * 4]
        texts = [server.post(ask(max_tokens=4), CHAT) for _ in range(8)]
        images = [server.post(ask(data_url(image_file()), max_tokens=4), CHAT) for _ in range(8)]
        assert [answer.status_code for answer in (*texts, *images)] == [200] * 16
        assert all(message.result() for message in refused)
        assert not any(answer.done() for answer in waiting)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10  # KiB


def test_a_client_that_leaves_ends_the_fetch(files: FileServer) -> None:
    settings = options(f"option.allowed_media_domains={files.domain}", "option.image_fetch_timeout=600")
    with serve("--engine", "echo", *settings) as server:
        server.wait_ready()
        files.left.clear()
        asked = files.asked.count("/slow")
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            body = json.dumps(ask(files.url("/slow"))).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            wait_for(lambda: files.asked.count("/slow") > asked, PATIENCE, "nothing was fetched")
        assert files.left.wait(PATIENCE)


def test_a_slow_host_does_not_hold_all_fetches(files: FileServer) -> None:
    with short_drain(0.1), ThreadPoolExecutor(10) as clients, file_server() as other:
        settings = options(
            f"option.allowed_media_domains={files.domain},{other.domain}", "option.image_fetch_timeout=600"
        )
        with serve("--engine", "echo", *settings) as server:
            server.wait_ready()
            asked = files.asked.count("/slow")
            slow = [clients.submit(server.post, ask(*[files.url("/slow")] * 10), CHAT) for _ in range(10)]
            wait_for(lambda: files.asked.count("/slow") >= asked + 32, PATIENCE, "the slow server was not asked")
            assert server.post(ask(other.url(), max_tokens=1), CHAT).status_code == 200
            assert files.asked.count("/slow") == asked + 32
            assert not any(answer.done() for answer in slow)
