"""Images in every dialect of a chat: by data URL, by HTTP, from a file."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from handler.serving.media import fetch
from tests.app.media.files import HOST, data_url, file_server, image_file
from tests.app.server import serve
from tests.servers import LiveServer, http, options

PNG = image_file()
TEXT = {"type": "text", "text": "one"}


class Urls(dict[str, str]):
    """By kind."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, Urls]]:
    folder = tmp_path_factory.mktemp("media")
    (folder / "a b.png").write_bytes(PNG)
    public = mock.patch.object(fetch, "is_public", lambda text: text == HOST)
    with file_server() as files, public:
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


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "system", "content": [{"type": "image_url"}]}]},
         "messages[0].content[0]: 'image_url' is not supported: images belong in messages of the user"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "video_url"}]}]},
         "messages[0].content[0]: 'video_url' is not supported: the engine reads text, images and "
         "audio clips, no video"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "file"}]}]},
         "messages[0].content[0]: 'file' is not supported: the engine reads text, images and audio clips, no files"),
        ("/v1/chat/completions", {"messages": [{"role": "system", "content": [{"type": "input_audio"}]}]},
         "messages[0].content[0]: 'input_audio' is not supported: audio clips belong in messages of the user"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
         "messages[0].content[0]: 'image' is not supported: write it as an 'image_url'"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
         "input[0].content[0]: 'input_file' is not supported: the engine reads text, images and audio clips, no files"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "poem"}]}]},
         "input[0].content[0]: 'poem' is not supported: it must be one of text, refusal, input_text"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": 1}]}]},
         "messages[0].content[0].image_url must be a URL"),
        ("/v1/messages", {"max_tokens": 1, "system": [anthropic("http://a/")], "messages": []},
         "system[0]: 'image' is not supported: images belong in messages of the user"),
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
         "truncate_prompt_tokens: a prompt with images is not cut"),
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
