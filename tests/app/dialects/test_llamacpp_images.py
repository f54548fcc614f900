"""Images in every dialect in front of llama-server, which gets only pixels and never an address."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from handler.engines.base import EngineConfig
from handler.engines.llamacpp import media
from handler.engines.llamacpp.media import MARKER, ImageTokenizer
from handler.engines.llamacpp.pieces import Pieces
from handler.serving.media import fetch
from tests.app.media.files import HOST, FileServer, data_url, file_server, image_file
from tests.app.server import AppServer, serve
from tests.checkpoints import byte_gguf
from tests.checkpoints.projector_gguf import write_projector
from tests.doubles import llama_server, tiny
from tests.doubles.llama_server import LlamaServer
from tests.process.engines.llamacpp import real
from tests.process.engines.llamacpp.real import RealServer
from tests.process.engines.llamacpp.test_llamacpp import REAL, own
from tests.servers import events, http, options

IMAGES = [image_file("PNG", (16 + 8 * number, 24)) for number in range(2)]
NUM_TOKENS = 12
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
_real_public = fetch.is_public


class Front(NamedTuple):
    """Our server, llama-server behind it, the tokenizer of both, and a server of files."""

    server: AppServer
    upstream: LlamaServer | RealServer
    tokenizer: ImageTokenizer
    files: FileServer
    marker: str

    def own(self, word: str) -> list[int]:
        """The ids of the server's own answer, and its number of prompt tokens."""
        parts = [_text("One"), _IMAGE, _text("and two"), _IMAGE, _text(word)]
        prompt = self.tokenizer.encode_chat([{"role": "user", "content": parts}])
        data = [base64.b64encode(image).decode() for image in IMAGES]
        sent = {"prompt_string": prompt.text.replace(MARKER, self.marker), "multimodal_data": data}
        answer = own(self.upstream, sent, n_predict=NUM_TOKENS)
        return [*answer["tokens"], answer["tokens_evaluated"]]

    def expected(self, word: str) -> tuple[str, int]:
        *ids, num_prompt = self.own(word)
        return self.tokenizer.vocabulary.decode(ids), num_prompt


@pytest.fixture(scope="module", params=["double", pytest.param("real", marks=REAL)])
def front(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    is_real, directory = request.param == "real", tmp_path_factory.mktemp("model")
    model: Path = byte_gguf.make(directory) if is_real else tiny.make(directory)
    write_projector(directory / "mmproj.gguf")
    tokenizer = media.load_tokenizer(EngineConfig(model=model, chat_template=TEMPLATE), projector=True)
    assert isinstance(tokenizer, ImageTokenizer)
    pieces = tokenizer.vocabulary.pieces[:-1]
    flags = ("--mmproj", str(directory / "mmproj.gguf"))
    listening = real.running(model / "model.gguf", pieces, 4, *flags) if is_real else llama_server.listening(pieces)
    public = mock.patch.object(fetch, "is_public", lambda text: text == HOST or _real_public(text))
    with listening as upstream, file_server() as files, public:
        if isinstance(upstream, LlamaServer):
            upstream.encode, upstream.marker = tokenizer.ids, "<__media_double__>"
            marker = upstream.marker
        else:
            marker = upstream.get("/props")["media_marker"]
        own_options = options(
            f"option.base_url={upstream.url}/v1",
            f"option.chat_template={TEMPLATE}",
            f"option.allowed_media_domains={files.domain}",
            "option.limit_mm_per_prompt=image=4",
        )
        with serve(str(model), "--engine", "openai", *own_options) as server:
            server.wait_ready()
            yield Front(server, upstream, tokenizer, files, marker)


@pytest.fixture(scope="module")
def words(front: Front) -> list[str]:
    """Eight texts whose answers end with a character, and not with an end token."""
    pieces, found = Pieces(front.tokenizer.vocabulary.pieces), list[str]()
    for number in range(200):
        *ids, _ = front.own(f"town {number}")
        if not front.upstream.eog & {*ids} and not pieces.incomplete(ids)[-1]:
            found.append(f"town {number}")
        if len(found) == 8:
            return found
    raise AssertionError("most answers end otherwise")


@pytest.fixture(scope="module")
def word(words: list[str]) -> str:
    return words[0]


_IMAGE = {"type": "image"}


def _text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def _openai(word: str, *urls: str) -> dict[str, Any]:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [_text("One"), images[0], _text("and two"), images[1], _text(word)]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": NUM_TOKENS, "temperature": 0}


def _anthropic(word: str, *urls: str) -> dict[str, Any]:
    images = [{"type": "image", "source": {"type": "url", "url": url}} for url in urls]
    for image in images:
        head, _, data = str(image["source"]["url"]).partition(",")  # type: ignore[index]
        if head.startswith("data:"):
            image["source"] = {"type": "base64", "media_type": "image/png", "data": data}
    content = [_text("One"), images[0], _text("and two"), images[1], _text(word)]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": NUM_TOKENS, "temperature": 0}


def _responses(word: str, *urls: str) -> dict[str, Any]:
    images = [{"type": "input_image", "image_url": url, "detail": "auto"} for url in urls]
    texts = [{"type": "input_text", "text": words} for words in ("One", "and two", word)]
    content = [texts[0], images[0], texts[1], images[1], texts[2]]
    return {"input": [{"role": "user", "content": content}], "max_output_tokens": NUM_TOKENS, "temperature": 0}


class Dialect(NamedTuple):
    path: str
    body: Callable[..., dict[str, Any]]
    read: Callable[[Any], tuple[str, int]]


def _read_openai(answer: Any) -> tuple[str, int]:
    return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]


def _read_anthropic(answer: Any) -> tuple[str, int]:
    usage = answer["usage"]
    return answer["content"][0]["text"], usage["input_tokens"] + usage["cache_read_input_tokens"]


def _read_responses(answer: Any) -> tuple[str, int]:
    return answer["output"][0]["content"][0]["text"], answer["usage"]["input_tokens"]


DIALECTS = {
    "openai": Dialect("/v1/chat/completions", _openai, _read_openai),
    "sagemaker": Dialect("/invocations", _openai, _read_openai),
    "anthropic": Dialect("/v1/messages", _anthropic, _read_anthropic),
    "responses": Dialect("/v1/responses", _responses, _read_responses),
}


@pytest.mark.parametrize("name", DIALECTS)
def test_every_dialect_has_the_servers_own_text(front: Front, word: str, name: str) -> None:
    path, body, read = DIALECTS[name]
    answer = front.server.post(body(word, *map(data_url, IMAGES)), path)
    assert answer.status_code == 200, answer.text
    assert read(answer.json()) == front.expected(word)


def test_a_stream_too(front: Front, word: str) -> None:
    text, num_prompt = front.expected(word)
    urls = list(map(data_url, IMAGES))
    usage = {"stream_options": {"include_usage": True}}
    chunks = events(front.server, "/v1/chat/completions", {**_openai(word, *urls), **usage}, end=["data: [DONE]"])
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]) == text
    assert chunks[-1]["usage"]["prompt_tokens"] == num_prompt
    answer = front.server.post({**_anthropic(word, *urls), "stream": True}, "/v1/messages")
    (begin,) = [line for line in answer.text.splitlines() if line.startswith("data: ") and "message_start" in line]
    counts = json.loads(begin.removeprefix("data: "))["message"]["usage"]
    assert counts["input_tokens"] + counts["cache_read_input_tokens"] == num_prompt
    answer = front.server.post({**_responses(word, *urls), "stream": True}, "/v1/responses")
    (end,) = [line for line in answer.text.splitlines() if line.startswith("data: ") and "response.incomplete" in line]
    assert _read_responses(json.loads(end.removeprefix("data: "))["response"]) == (text, num_prompt)


def test_addresses_are_fetched_here(front: Front, word: str) -> None:
    urls = [front.files.url("/ok.png"), front.files.url("/moved")]
    for name in ("openai", "anthropic", "responses"):
        path, body, read = DIALECTS[name]
        answer = front.server.post(body(word, *urls), path)
        assert answer.status_code == 200, answer.text
        assert len(read(answer.json())[0]) > 3
    assert "/ok.png" in front.files.asked
    if isinstance(front.upstream, LlamaServer):
        assert not any(words in json.dumps(front.upstream.received[-1]) for words in ("http:", "ok.png", "moved"))


def test_eight_clients_at_once_get_their_own_answers(front: Front, words: list[str]) -> None:
    expected = [front.expected(one) for one in words]
    with ThreadPoolExecutor(8) as pool:
        bodies = [_openai(one, *map(data_url, IMAGES)) for one in words]
        answers = pool.map(lambda body: front.server.post(body, "/v1/chat/completions").json(), bodies)
        different = [1 for answer, own in zip(answers, expected, strict=True) if _read_openai(answer) != own]
    assert len(different) <= (1 if isinstance(front.upstream, RealServer) else 0)


def test_the_metrics_count_the_tokens_of_images(front: Front, word: str) -> None:
    def total() -> float:
        lines = http.get(f"{front.server.url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prompt_tokens_total"))

    before, (_, num_prompt) = total(), front.expected(word)
    front.server.post(_openai(word, *map(data_url, IMAGES)), "/v1/chat/completions")
    assert total() - before == num_prompt


def test_decisions_about_images(front: Front) -> None:
    question = {"type": "choice", "instructions": "Which?", "criteria": {"a": None, "b": None}}
    state = [
        {"role": "user", "content": [_text("See:"), {"type": "image_url", "image_url": {"url": data_url(IMAGES[0])}}]}
    ]
    answer = front.server.post({"state": state, "questions": {"c": question}}, "/v1/systemone")
    assert answer.status_code == 200, answer.text
    assert answer.json()["answers"]["c"]["choice"] in ("a", "b")


def test_what_is_refused(front: Front, word: str) -> None:
    body = _openai(word, *map(data_url, IMAGES))
    cases: list[tuple[dict[str, Any], str]] = [
        ({**body, "min_tokens": 2}, "min_new_tokens cannot be combined with images on llama-server"),
        (_openai(f"{word} {MARKER}", *map(data_url, IMAGES)), f"must not contain the text {MARKER}"),
        (_openai(f"{word} {front.marker}", *map(data_url, IMAGES)), "the text by which llama-server recognizes images"),
        (_openai(word, *[data_url(b"GIF89a nothing")] * 2), "image"),
        (_openai(word * 1200, *map(data_url, IMAGES)), ""),
    ]
    for asked, words in cases:
        answer = front.server.post(asked, "/v1/chat/completions")
        assert answer.status_code == 400, answer.text
        assert words in answer.text
    audio = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
    answer = front.server.post({"messages": [{"role": "user", "content": [audio]}]}, "/v1/chat/completions")
    assert answer.status_code == 400
    assert "audio has not been tested with llama-server" in answer.text
    assert front.server.post(body, "/v1/chat/completions").status_code == 200


def test_a_prompt_that_only_the_images_make_too_long(front: Front) -> None:
    """The number of tokens of an image is known only to the server."""
    image = data_url(image_file("PNG", (9000, 8)))
    content = [_text("x"), *[{"type": "image_url", "image_url": {"url": image}}] * 4]
    if isinstance(front.upstream, RealServer):
        content = [_text("x" * 2000), *content[1:]]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
    answer = front.server.post(body, "/v1/chat/completions")
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "exceeds the available context size" in answer.text


def test_a_server_without_projector_refuses_images_by_name(tmp_path: Path) -> None:
    vocabulary = media.load_tokenizer(EngineConfig(model=tiny.make(tmp_path)), projector=False).vocabulary
    with llama_server.listening(vocabulary.pieces) as upstream:
        given = options(f"option.base_url={upstream.url}/v1", f"option.chat_template={TEMPLATE}")
        with serve(str(tmp_path), "--engine", "openai", *given) as server:
            server.wait_ready()
            answer = server.post(_openai("one", *map(data_url, IMAGES)), "/v1/chat/completions")
            assert answer.status_code == 400
            assert f"'image_url' is not supported: {media.NO_PROJECTOR}" in answer.text
