"""Audio clips in chats, transcriptions and translations: what is read, and what is wrong with one."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import httpx
import pytest

from handler.core.values import Request
from handler.protocols.kernel.context import ServerContext
from handler.protocols.openai.audio import Translations
from handler.serving.media import fetch
from tests.app.media.clips import audio_url, clip_file, flac, tone, wav
from tests.app.media.files import HOST, data_url, file_server, image_file
from tests.app.server import serve
from tests.servers import LiveServer, http, options

# -- audio clips in chats: OpenAI's part, and vLLM's with a URL; what is wrong with one names its field ----------------


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
    formats = [input_audio(), input_audio(format="x-wav"), input_audio(format="mpeg")]  # the file tells its own
    for part in (*formats, *map(by_url, (audio_url(clip_file(kind="OGG"), "ogg"), f"{url}/clip.flac", file))):
        text = server.post(ask(TEXT, part), path).json()["choices"][0]["message"]["content"]
        assert text.startswith(" user: one <audio> assistant:")


LONG = base64.b64encode(clip_file(tone(3.01))).decode()
CASES: dict[str, tuple[Any, str]] = {
    "no object": ({"type": "input_audio", "input_audio": DATA}, ".input_audio must be an object with 'data'"),
    "no data": (input_audio(None), ".input_audio.data must be a string"),
    "not base64": (input_audio("%%%"), ".input_audio.data: the audio is not base64"),
    "empty": (input_audio(""), ".input_audio.data: the audio is empty"),
    "a format of another type": (input_audio(format=["wav"]), ".input_audio.format must be a string"),
    "no audio": (input_audio(base64.b64encode(b"hello there").decode()), ".input_audio.data: it is not WAV, FLAC"),
    "too long": (input_audio(LONG), ".input_audio.data: the audio is 3.01 s long; at most 3 s (option.max_audio_s"),
    "8 hours": (
        input_audio(base64.b64encode(flac(8 * 3600 * 16_000)).decode()), ".input_audio.data: the audio is 28800 s"),
    "an image": (by_url(data_url(image_file())), ".audio_url: it is not WAV, FLAC, MP3 or Ogg"),
    "no URL": (by_url(3), ".audio_url must be a URL"),
    "FTP": (by_url("ftp://a/b.wav"), ".audio_url must be an http, https, file or data URL"),
    "a private host": (by_url("http://169.254.169.254/a.wav"), ".audio_url: its host is not in option"),
    "a data URL without base64": (by_url("data:audio/wav,abc"), "a data URL must be data:audio/...;base64,..."),
    "outside of the folder": (by_url("file:///etc/passwd"), "it is not a file below option.allowed_local_media_path"),
    "video": ({"type": "video_url", "video_url": {"url": "http://a/"}}, "reads only text, images and audio clips"),
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
        ("/none", "its server responds with status 404"),
        ("/long", "more than 60000 bytes (option.max_audio_bytes)"),
    ):
        assert words in server.post(ask(by_url(url + path)), CHAT).json()["error"]["message"]


def test_a_request_has_as_many_as_the_option_says(served: Served) -> None:
    answer = served[0].post(ask(*[input_audio()] * 3), CHAT)
    limit = "a request may have at most 2 audio clips (option.limit_mm_per_prompt)"
    message = f"messages[0].content[2].input_audio.data: {limit}"
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


def test_only_the_user_sends_clips(served: Served) -> None:
    answer = served[0].post(ask(TEXT, input_audio(), role="system"), CHAT)
    assert (
        "'input_audio' is not supported: audio clips are allowed only in user messages and tool results" in answer.text
    )


def test_fields_without_effect_are_named(served: Served) -> None:
    answer = served[0].post(ask(TEXT, input_audio(format="wav", id="a")), CHAT)
    assert answer.headers["x-lmi-ignored-parameters"] == "messages[].content[].input_audio.id"


# -- transcriptions ----------------------------------------------------------------------------------------------------
# OpenAI's transcriptions and translations: forms as its clients send them, JSON, and what is wrong with either.


TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
CLIP = clip_file(kind="MP3")
ECHO = "user: <audio> assistant: user: <audio>"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    settings = options(
        "option.task=transcription", "option.max_model_len=8", "option.max_audio_seconds=3",
        "option.max_audio_bytes=150000", "max_request_size=400000",
    )  # fmt: skip
    with serve("--engine", "echo", *settings) as server:
        server.wait_ready()
        yield server


def send(server: LiveServer, file: Any = CLIP, path: str = TRANSCRIPTIONS, **fields: Any) -> Any:
    return http.post(server.url + path, files={"file": ("a.mp3", file)}, data=fields)


@pytest.mark.parametrize("path", [TRANSCRIPTIONS, TRANSLATIONS, "/invocations"])
def test_a_form_is_answered(server: LiveServer, path: str) -> None:
    answer = send(server, path=path, model="model", language="en", prompt="names", temperature="0.0", stream="false")
    assert answer.status_code == 200, answer.text
    usage = {"type": "tokens", "input_tokens": 3, "output_tokens": 5, "total_tokens": 8}
    assert answer.json() == {"text": ECHO, "usage": usage}
    assert "x-lmi-ignored-parameters" not in answer.headers


def test_a_compressed_form_is_answered(server: LiveServer) -> None:
    plain = httpx.Request("POST", server.url + TRANSCRIPTIONS, files={"file": ("a.mp3", CLIP)}, data={"model": "model"})
    headers = {"content-type": plain.headers["content-type"], "content-encoding": "gzip"}
    answer = http.post(server.url + TRANSCRIPTIONS, content=gzip.compress(plain.read()), headers=headers)
    assert (answer.status_code, answer.json()["text"]) == (200, ECHO)


def test_raw_audio_is_refused_with_the_form_to_send(server: LiveServer) -> None:
    for path in (TRANSCRIPTIONS, TRANSLATIONS, "/invocations"):
        answer = http.post(server.url + path, content=CLIP, headers={"content-type": "audio/mpeg"})
        assert answer.status_code == 415
        assert "multipart/form-data, with the audio clip as the file 'file'" in answer.text


def test_the_model_reads_audio_only(server: LiveServer) -> None:
    model, _ = http.get(server.url + "/v1/models").json()["data"]
    assert model["input_modalities"] == ["audio"]


def test_json_has_the_file_in_base64(server: LiveServer) -> None:
    body = {"file": base64.b64encode(CLIP).decode(), "language": "en"}
    for path in (TRANSCRIPTIONS, "/invocations"):
        assert server.post(body, path).json()["text"] == ECHO


def test_the_text_alone(server: LiveServer) -> None:
    answer = send(server, response_format="text")
    assert (answer.text, answer.headers["content-type"]) == (ECHO, "text/plain; charset=utf-8")


def test_segments(server: LiveServer) -> None:
    fields = {"response_format": "verbose_json", "timestamp_granularities[]": "segment", "temperature": "0.5"}
    answer = send(server, **fields).json()
    (segment,) = answer.pop("segments")
    usage = {"type": "duration", "seconds": 1}
    assert answer == {"task": "transcribe", "language": "", "duration": 0.5, "text": ECHO, "usage": usage}
    assert (segment["start"], segment["end"], segment["text"].strip()) == (0.0, 0.5, ECHO)
    assert (segment["temperature"], segment["no_speech_prob"], len(segment["tokens"])) == (0.5, None, 5)
    assert send(server, path=TRANSLATIONS, **fields).json()["task"] == "translate"


def test_subtitles(server: LiveServer) -> None:
    srt = send(server, response_format="srt")
    assert (srt.text, srt.headers["content-type"]) == (
        f"1\n00:00:00,000 --> 00:00:00,500\n{ECHO}\n\n", "text/plain; charset=utf-8"
    )  # fmt: skip
    shown = ECHO.replace("<", "&lt;").replace(">", "&gt;")
    assert send(server, response_format="vtt").text == f"WEBVTT\n\n00:00:00.000 --> 00:00:00.500\n{shown}\n\n"


@pytest.mark.parametrize("path", [TRANSCRIPTIONS, TRANSLATIONS, "/invocations"])
def test_a_stream(server: LiveServer, path: str) -> None:
    answer = send(server, path=path, stream="True")
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, end = (line.removeprefix("data: ") for line in answer.text.splitlines() if line)
    assert end == "[DONE]"
    *deltas, done = map(json.loads, events)
    assert {event["type"] for event in deltas} == {"transcript.text.delta"}
    assert len(deltas) == 5
    assert "".join(event["delta"] for event in deltas) == done["text"] == ECHO
    usage = {"type": "tokens", "input_tokens": 3, "output_tokens": 5, "total_tokens": 8}
    assert (done["type"], done["usage"]) == ("transcript.text.done", usage)


def test_unknown_fields_are_named(server: LiveServer) -> None:
    assert send(server, colour="red").headers["x-lmi-ignored-parameters"] == "colour"


FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "speakers": ({"response_format": "diarized_json"}, "Whisper does not distinguish speakers"),
    "no format": ({"response_format": "poem"}, "must be json, text, srt, verbose_json or vtt"),
    "words": (
        {"response_format": "verbose_json", "timestamp_granularities[]": ["segment", "word"]},
        'is not supported: the engine reports timestamps of segments, not of words; use "segment"',
    ),
    "no times": ({"timestamp_granularities[]": "segment"}, "needs response_format=verbose_json"),
    "other times": ({"timestamp_granularities[]": "page"}, "must be segment, or a list that contains only segment"),
    "a stream of times": ({"stream": "true", "response_format": "srt"}, "a stream has no timestamps; use json"),
    "no flag": ({"stream": "perhaps"}, "must be true or false"),
    "scores": ({"include[]": "logprobs"}, "is not supported: log-probabilities of tokens are not returned"),
    "hot": ({"temperature": "7"}, "temperature"),
    "no number": ({"temperature": "warm"}, "must be a number"),
    "a long prompt": ({"prompt": "a" * 20_000}, "must be a string of at most 16384 characters"),
    "a long language": ({"language": "e" * 99}, "must be the code of a language, such as en"),
}


@pytest.mark.parametrize("name", FIELDS)
def test_wrong_fields(server: LiveServer, name: str) -> None:
    fields, words = FIELDS[name]
    answer = send(server, **fields)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]


FILES = {
    "empty": (b"", "file: the audio is empty"),
    "a text": (b"hello", "file: it is not WAV, FLAC, MP3 or Ogg (Vorbis, Opus)"),
    "8 hours": (flac(8 * 3600 * 16_000), "file: the audio is 28800 s long; at most 3 s (option.max_audio_seconds)"),
    "too long": (clip_file(tone(3.5)), "file: the audio is 3.5 s long; at most 3 s"),
    "no channel": (wav(bytes(99), channels=0), "file: the audio has 0 channels"),
    "cut": (clip_file()[:999], "file: the audio is broken"),
    "too many bytes": (CLIP + bytes(150_000), "bytes; the maximum is 150000 (option.max_audio_bytes)"),
}


@pytest.mark.parametrize("name", FILES)
def test_wrong_files(server: LiveServer, name: str) -> None:
    file, words = FILES[name]
    answer = send(server, file)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, "file", "invalid_request_error")
    assert words in error["message"]
    assert send(server).json()["text"] == ECHO


def form(*parts: str, boundary: str = "x") -> bytes:
    return "".join(f"--{boundary}\r\n{part}\r\n" for part in parts).encode() + f"--{boundary}--\r\n".encode()


NAMED = 'Content-Disposition: form-data; name="a"\r\n\r\n'
BODIES: dict[str, tuple[bytes, str, str]] = {
    "no boundary": (form(NAMED), "multipart/form-data", "needs a boundary of 1 to 70 characters"),
    "a long boundary": (form(NAMED), f"multipart/form-data; boundary={'x' * 99}", "needs a boundary"),
    "another boundary": (form(NAMED), "multipart/form-data; boundary=y", "is not valid multipart/form-data"),
    "is cut short": (form(NAMED + "abc")[:-9], "multipart/form-data; boundary=x", "is incomplete"),
    "no name": (form("A: b\r\n\r\nc"), "multipart/form-data; boundary=x", "a part of the form has no name"),
    "many parts": (form(*[NAMED] * 65), "multipart/form-data; boundary=x", "the form has more than 64 parts"),
    "long headers": (form("A: " + "b" * 9000 + "\r\n\r\n"), "multipart/form-data; boundary=x", "is incomplete"),
    "no file": (form(NAMED + "b"), "multipart/form-data; boundary=x", "'file' is required"),
    "a file without a name": (
        form('Content-Disposition: form-data; name="file"\r\n\r\n%%'), "multipart/form-data; boundary=x",
        "file: the audio is not base64"),
    "JSON without a file": (b"{}", "application/json", "'file' is required"),
    "a list": (b"[]", "application/json", "the body must be a form or a JSON object with 'file'"),
    "a number for a file": (b'{"file": 3}', "application/json", "'file' must be a file in a form, or a base64 string"),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_wrong_bodies_in_audio(server: LiveServer, name: str) -> None:
    body, content_type, words = BODIES[name]
    answer = http.post(server.url + TRANSCRIPTIONS, content=body, headers={"content-type": content_type})
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]


def test_a_form_longer_than_the_option_allows_is_refused_before_it_is_read(server: LiveServer) -> None:
    assert send(server, bytes(500_000)).status_code == 413


def test_other_routes_take_no_forms() -> None:
    with serve("--engine", "echo") as server:
        server.wait_ready()
        assert send(server, path="/v1/chat/completions").status_code == 415
        answer = send(server)
        assert answer.status_code == 404
        assert "it requires option.task=automatic-speech-recognition" in answer.json()["error"]["message"]


def test_language_task_and_temperature_reach_the_engine() -> None:
    context = ServerContext("openvino", no_media={"audio": ""})
    body = {"file": base64.b64encode(CLIP).decode(), "language": "DE", "prompt": "names", "temperature": "0.5"}
    (request,) = Translations().parse(body, context).requests
    assert isinstance(request, Request)
    assert dict(request.template.arguments) == {"task": "translate", "language": "de", "prompt": "names"}
    assert (request.sampling.do_sample, request.sampling.temperature) == (True, 0.5)
    (request,) = Translations().parse({"file": body["file"]}, context).requests
    assert not request.sampling.do_sample


def test_the_document_says_that_forms_are_taken(server: LiveServer) -> None:
    paths = http.get(f"{server.url}/api-doc/openapi.json").json()["paths"]
    for path in (TRANSCRIPTIONS, TRANSLATIONS):
        assert set(paths[path]["post"]["requestBody"]["content"]) == {"application/json", "multipart/form-data"}
