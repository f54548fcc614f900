"""Audio clips in chats: OpenAI's part, and vLLM's with a URL; what is wrong with one names its field."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest

from handler.serving.media import fetch
from tests.app.media.clips import audio_url, clip_file, flac, tone
from tests.app.media.files import HOST, data_url, file_server, image_file
from tests.app.server import serve
from tests.servers import LiveServer, options

CHAT = "/v1/chat/completions"
TEXT = {"type": "text", "text": "one"}
DATA = base64.b64encode(clip_file()).decode()


class Served(NamedTuple):
    """A server, the URL of another one that has a clip, and that of a file."""

    server: LiveServer
    url: str
    file: str


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("clips")
    (folder / "a.mp3").write_bytes(clip_file(kind="MP3"))
    public = mock.patch.object(fetch, "is_public", lambda text: text == HOST)
    with file_server() as files, public:
        settings = (
            f"option.allowed_media_domains={files.domain}", f"option.allowed_local_media_path={folder}",
            "option.limit_mm_per_prompt=audio=2", "option.max_audio_bytes=60000", "option.max_audio_seconds=3",
        )  # fmt: skip
        with serve("--engine", "echo", *options(*settings)) as server:
            server.wait_ready()
            yield Served(server, files.url(""), f"file://{folder}/a.mp3")


def input_audio(data: Any = DATA, **more: Any) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, **more}}


def by_url(url: Any) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": url}}


def ask(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [*parts]}], "max_tokens": 8}


def test_a_chat_has_clips_and_an_image_in_their_places(served: Served) -> None:
    server, url, _ = served
    image = {"type": "image_url", "image_url": {"url": data_url(image_file())}}
    body = ask(TEXT, input_audio(format="wav"), image, {"type": "audio_url", "audio_url": f"{url}/clip.flac"})
    answer = server.post(body, CHAT).json()
    assert answer["choices"][0]["message"]["content"].startswith(" user: one <audio> <image> <audio> assistant:")
    assert answer["usage"]["prompt_tokens"] == 6


@pytest.mark.parametrize("path", [CHAT, "/invocations"])
def test_clips_come_from_a_body_a_file_and_a_server(served: Served, path: str) -> None:
    server, url, file = served
    for part in (input_audio(), *map(by_url, (audio_url(clip_file(kind="OGG"), "ogg"), f"{url}/clip.flac", file))):
        text = server.post(ask(TEXT, part), path).json()["choices"][0]["message"]["content"]
        assert text.startswith(" user: one <audio> assistant:")


LONG = base64.b64encode(clip_file(tone(3.01))).decode()
CASES: dict[str, tuple[Any, str]] = {
    "no object": ({"type": "input_audio", "input_audio": DATA}, ".input_audio must be an object with 'data'"),
    "no data": (input_audio(None), ".input_audio.data must be a string"),
    "not base64": (input_audio("%%%"), ".input_audio.data: the audio is not base64"),
    "empty": (input_audio(""), ".input_audio.data: the audio is empty"),
    "a format that is none": (
        input_audio(format="midi"), ".input_audio.format must be one of wav, mp3, flac, ogg, opus"),
    "a format of another type": (input_audio(format=["wav"]), ".input_audio.format must be one of"),
    "no audio": (input_audio(base64.b64encode(b"hello there").decode()), ".input_audio.data: it is not WAV, FLAC"),
    "too long": (input_audio(LONG), ".input_audio.data: the audio has 3.01 s; at most 3 s (option.max_audio_seconds)"),
    "8 hours": (
        input_audio(base64.b64encode(flac(8 * 3600 * 16_000)).decode()), ".input_audio.data: the audio has 28800 s"),
    "an image": (by_url(data_url(image_file())), ".audio_url: it is not WAV, FLAC, MP3 or Ogg"),
    "no URL": (by_url(3), ".audio_url must be a URL"),
    "FTP": (by_url("ftp://a/b.wav"), ".audio_url must be an http, https, file or data URL"),
    "a private host": (by_url("http://169.254.169.254/a.wav"), ".audio_url: its host is not among"),
    "a data URL without base64": (by_url("data:audio/wav,abc"), "a data URL must be data:audio/...;base64,..."),
    "outside of the folder": (by_url("file:///etc/passwd"), "it is not a file below option.allowed_local_media_path"),
    "video": ({"type": "video_url", "video_url": {"url": "http://a/"}}, "reads text, images and audio clips, no video"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_names_its_field(served: Served, name: str) -> None:
    part, words = CASES[name]
    answer = served[0].post(ask(TEXT, part), CHAT)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert message.startswith("messages[0].content[1]")
    assert words in message


def test_missing_and_long_files_of_a_server(served: Served) -> None:
    server, url, _ = served
    for path, words in (
        ("/none", "its server answers 404"),
        ("/long", "more than 60000 bytes (option.max_audio_bytes)"),
    ):
        assert words in server.post(ask(by_url(url + path)), CHAT).json()["error"]["message"]


def test_a_request_has_as_many_as_the_option_says(served: Served) -> None:
    answer = served[0].post(ask(*[input_audio()] * 3), CHAT)
    message = "messages[0].content[2].input_audio.data: a request may have 2 audio clips (option.limit_mm_per_prompt)"
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


def test_only_the_user_sends_clips(served: Served) -> None:
    answer = served[0].post(ask(TEXT, input_audio(), role="system"), CHAT)
    assert "'input_audio' is not supported: audio clips belong in messages of the user" in answer.text


def test_fields_without_effect_are_named(served: Served) -> None:
    answer = served[0].post(ask(TEXT, input_audio(format="wav", id="a")), CHAT)
    assert answer.headers["x-lmi-ignored-parameters"] == "messages[].content[].input_audio.id"
