"""Images in chats in front of llama-server, which reads exactly the ids of the prompt and the pixels of the images."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
from PIL import Image

from handler.core.errors import InvalidPayload
from handler.core.media import Medium, SharedMedia
from handler.core.text import Prompt
from handler.core.values import NO_EXTRAS, Finish, Sampling
from handler.engines.base import EngineConfig, EngineRequest, Output
from handler.engines.llamacpp import media
from handler.engines.llamacpp.engine import LlamaCppEngine
from handler.engines.llamacpp.media import MARKER, ImageTokenizer
from tests.checkpoints import byte_gguf
from tests.checkpoints.projector_gguf import NUM_TOKENS, write_projector
from tests.doubles import llama_server, tiny
from tests.doubles.llama_server import LlamaServer
from tests.process.engines.llamacpp import real
from tests.process.engines.llamacpp.real import RealServer
from tests.process.engines.llamacpp.test_llamacpp import REAL, SAMPLING, Served, engine, own, quick
from tests.process.engines.openai.test_bad_servers import Result, run
from tests.servers import wait_for

__all__ = ["quick"]

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
IMAGE = {"type": "image"}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


CHATS: dict[str, Sequence[dict[str, Any]]] = {
    "after the text": [{"role": "user", "content": [text("What is this?"), IMAGE]}],
    "before the text": [{"role": "user", "content": [IMAGE, text("What is this, ab?")]}],
    "alone": [{"role": "user", "content": [IMAGE]}],
    "two": [{"role": "user", "content": [IMAGE, IMAGE, text("Compare them.")]}],
    "between texts": [{"role": "user", "content": [text("One"), IMAGE, text("two"), text("three"), IMAGE, text("4")]}],
    "several turns": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [IMAGE, text("Grüße 😀")]},
        {"role": "assistant", "content": "It is a town."},
        {"role": "user", "content": [text("And this?"), IMAGE]},
    ],
}


def picture(number: int, width: int = 0, height: int = 0) -> Medium:
    width, height = width or 20 + 7 * number, height or 50 - 3 * number
    data = bytes((number * 31 + place * place) % 256 for place in range(width * height * 3))
    return Medium("image", (width, height), data, sha256(data).hexdigest())


def large(width: int, height: int) -> Medium:
    data = random.Random(width).randbytes(width * height * 3)
    return Medium("image", (width, height), data, sha256(data).hexdigest())


def png(medium: Medium) -> str:
    """The file that a client would send to the server itself."""
    file = io.BytesIO()
    Image.frombytes("RGB", cast(tuple[int, int], medium.size), medium.data).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


class Chat(NamedTuple):
    """A prompt with its images."""

    prompt: Prompt
    pictures: Sequence[Medium]

    def request(self, key: int, sampling: Sampling) -> tuple[EngineRequest, SharedMedia]:
        shared = SharedMedia(self.prompt.text, self.pictures)
        return EngineRequest(key, self.prompt.ids, sampling, media=shared.file), shared


class Both(NamedTuple):
    """A server with a projector, and the directory of its model's tokenizer."""

    server: Served
    config: EngineConfig
    tokenizer: ImageTokenizer
    marker: str

    def chat(self, name: str, first: int = 0) -> Chat:
        prompt = self.tokenizer.encode_chat(CHATS[name])
        return Chat(prompt, [picture(first + number) for number in range(prompt.text.count(MARKER))])

    def own(self, chat: Chat, **fields: Any) -> dict[str, Any]:
        """The server's own answer to a client that sends PNG."""
        data = [png(medium) for medium in chat.pictures]
        prompt = {"prompt_string": chat.prompt.text.replace(MARKER, self.marker), "multimodal_data": data}
        return own(self.server, prompt, **fields)

    @property
    def fields(self) -> dict[str, Any]:
        """Fields with which answers differ: random weights repeat a letter, and the double often ends."""
        if not isinstance(self.server, RealServer):
            return {"ignore_eos": True}
        letters = [[id, 1.0] for id, piece in enumerate(self.server.pieces) if piece >= b"\x80"]
        return {"repeat_penalty": 3.0, "logit_bias": letters}

    @property
    def sampling(self) -> Sampling:
        biases = tuple((id, bias) for id, bias in self.fields.get("logit_bias", ()))
        fields = {"ignore_eos": self.fields.get("ignore_eos", False), "logit_bias": biases}
        return SAMPLING._replace(repetition_penalty=self.fields.get("repeat_penalty", 1.0), **fields)


def prepared(server: Served, model: Path, marker: str) -> Both:
    config = EngineConfig(model=model, chat_template=TEMPLATE)
    tokenizer = media.load_tokenizer(config, projector=True)
    assert isinstance(tokenizer, ImageTokenizer)
    return Both(server, config, tokenizer, marker)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def double(model: Path) -> Iterator[Both]:
    config = EngineConfig(model=model)
    tokenizer = media.load_tokenizer(config, projector=False)
    assert tokenizer.vocabulary is not None
    with llama_server.listening(tokenizer.vocabulary.pieces) as server:
        server.encode, server.marker = tokenizer.ids, "<__media_double__>"
        yield prepared(server, model, server.marker)


@pytest.fixture(scope="module")
def real_both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    directory = byte_gguf.make(tmp_path_factory.mktemp("bytes"))
    write_projector(directory / "projector.gguf")
    vocabulary = media.load_tokenizer(EngineConfig(model=directory), projector=False).vocabulary
    assert vocabulary is not None
    flags = ("--mmproj", str(directory / "projector.gguf"))
    with real.running(directory / "model.gguf", vocabulary.pieces, 4, *flags) as server:
        yield prepared(server, directory, server.get("/props")["media_marker"])


@pytest.fixture(params=["double", pytest.param("real", marks=REAL)])
def both(request: pytest.FixtureRequest) -> Both:
    return cast(Both, request.getfixturevalue("real_both" if request.param == "real" else "double"))


def asked(found: LlamaCppEngine, chats: Sequence[Chat], sampling: Sampling) -> list[Result]:
    """The results of requests that run at once."""
    held = []
    for key, chat in enumerate(chats, 1):
        request, shared = chat.request(key, sampling)
        held.append(shared)
        found.add(request)
    results = run(found, *range(1, len(chats) + 1))
    return [results[key] for key in range(1, len(chats) + 1)]


def collected(found: LlamaCppEngine, chat: Chat, sampling: Sampling) -> list[Output]:
    """All outputs of a request but its plain tokens."""
    request, _shared = chat.request(1, sampling)
    found.add(request)
    outputs = list[Output]()
    while not any(output.finish for output in outputs):
        outputs += found.step().others
    assert outputs[-1].error is None, outputs[-1].error
    return outputs


def counts(found: LlamaCppEngine, chat: Chat, sampling: Sampling) -> tuple[int, int]:
    """The numbers of tokens of the media and from the cache."""
    extras = [output.extras or NO_EXTRAS for output in collected(found, chat, sampling)]
    return sum(one.num_media_tokens or 0 for one in extras), sum(one.num_cached_tokens or 0 for one in extras)


def refusal(found: LlamaCppEngine, chat: Chat, sampling: Sampling = SAMPLING) -> str:
    """The words with which a request is refused."""
    request, _shared = chat.request(1, sampling)
    try:
        found.add(request)
    except ValueError as error:
        return str(error)
    result = run(found, 1)[1]
    assert not result.ids
    return result.error


# -- what the server reads --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [1, 8])
def test_the_ids_are_the_servers_own(both: Both, at_once: int) -> None:
    chats = [both.chat(name, first) for first in (0, 3, 6, 9) for name in CHATS]
    expected = [both.own(chat, **both.fields)["tokens"] for chat in chats]
    assert len({tuple(ids) for ids in expected}) > len(CHATS), "the answers depend on the images"
    num_different = 0
    with engine(both.config.model, both.server) as found:
        for start in range(0, len(chats), at_once):
            results = asked(found, chats[start : start + at_once], both.sampling)
            num_different += sum(
                result.ids != ids for result, ids in zip(results, expected[start : start + at_once], strict=True)
            )
    # llama.cpp's sums depend on what else is in the batch.
    assert num_different <= (2 if at_once > 1 and isinstance(both.server, RealServer) else 0)


def test_the_pixels_matter(both: Both) -> None:
    prompt = both.tokenizer.encode_chat(CHATS["before the text"])
    chats = [Chat(prompt, [picture(number, 32, 32)]) for number in range(12)]
    with engine(both.config.model, both.server) as found:
        answers = [tuple(result.ids) for chat in chats for result in asked(found, [chat], both.sampling)]
    assert len(set(answers)) > 4


def test_the_tokens_of_images_are_counted_from_the_answer(both: Both) -> None:
    with engine(both.config.model, both.server) as found:
        for name in CHATS:
            chat = both.chat(name)
            evaluated = both.own(chat, n_predict=1)["tokens_evaluated"]
            counts(found, chat, SAMPLING._replace(max_new_tokens=4))
            num_media, num_cached = counts(found, chat, SAMPLING._replace(max_new_tokens=4))
            assert num_media == evaluated - len(chat.prompt.ids)
            assert 0 <= num_cached < evaluated
            if isinstance(both.server, RealServer):
                assert num_cached > len(chat.prompt.ids), "the images too are cached"
                assert num_media == (NUM_TOKENS - 1) * len(chat.pictures)


def test_log_probabilities(both: Both) -> None:
    whole = tuple((id, -100.0) for id, piece in enumerate(both.server.pieces) if not piece.isascii())
    chat, biases = both.chat("between texts"), [[*bias] for bias in whole]
    answer = both.own(chat, n_probs=3, n_predict=8, logit_bias=biases)
    sampling = Sampling(max_new_tokens=8, logprobs=True, top_logprobs=3, logit_bias=whole)
    with engine(both.config.model, both.server) as found:
        outputs = collected(found, chat, sampling)
    logprobs = [value for output in outputs for value in output.logprobs]
    assert [id for output in outputs for id in output.ids] == answer["tokens"]
    assert logprobs == pytest.approx([one["logprob"] for one in answer["completion_probabilities"]], abs=1e-3)


def test_a_sample_is_repeated_with_its_seed(both: Both) -> None:
    """Also where the double omits ids, so that a completion has to be computed again."""
    drawn = both.sampling._replace(do_sample=True, max_new_tokens=40, logit_bias=(), repetition_penalty=1.0)
    with engine(both.config.model, both.server) as found:
        for name in CHATS:
            chat = both.chat(name)
            first, second = (asked(found, [chat], drawn._replace(seed=5))[0] for _ in range(2))
            assert first == second
            assert first.finish in (Finish.LENGTH, Finish.EOS)
            answer = asked(found, [chat], drawn)[0]
            assert answer.finish in (Finish.LENGTH, Finish.EOS)


def test_a_completion_that_was_computed_again_has_all_ids(double: Both) -> None:
    assert isinstance(double.server, LlamaServer)
    num_again = 0
    with engine(double.config.model, double.server) as found:
        for first in range(12):
            chat = double.chat("before the text", first)
            expected = double.own(chat, n_predict=40)["tokens"]
            double.server.received.clear()
            assert asked(found, [chat], SAMPLING._replace(max_new_tokens=40))[0].ids == expected
            num_again += len(double.server.received) > 1
            seeds = {body["seed"] for body in double.server.received}
            assert len(seeds) == 1
    assert num_again, "no id was uncertain"


def test_a_full_cache_repeats_the_response(double: Both) -> None:
    server = double.server
    assert isinstance(server, LlamaServer)
    server.pool = 220
    chats = [double.chat("two", number) for number in range(4)]
    sampling = SAMPLING._replace(max_new_tokens=60, ignore_eos=True)
    with engine(double.config.model, server) as found:
        expected = [asked(found, [chat], sampling)[0].ids for chat in chats]
        server.received.clear()
        assert [result.ids for result in asked(found, chats, sampling)] == expected
    assert len(server.received) > 4


def test_a_cancelled_request_frees_its_slot(double: Both) -> None:
    server = double.server
    assert isinstance(server, LlamaServer)
    server.pace = 0.05
    with engine(double.config.model, server) as found:
        request, _shared = double.chat("two").request(1, SAMPLING._replace(max_new_tokens=1000))
        found.add(request)
        while not found.step().others and not server.num_busy:
            pass
        found.cancel(1)
        wait_for(lambda: not server.num_busy, 5, "the slot is busy")


def test_after_a_restart_another_marker_is_used(double: Both) -> None:
    server, chat = double.server, double.chat("two")
    assert isinstance(server, LlamaServer)
    with engine(double.config.model, server) as found:
        first = asked(found, [chat], SAMPLING)
        server.marker = "<__media_another__>"
        server.restart(server.name)
        assert asked(found, [chat], SAMPLING) == first
        server.marker = "<__media_third__>"  # on a connection that is kept
        assert asked(found, [chat], SAMPLING) == first
    assert {body["prompt"]["prompt_string"].count("<__media_third__>") for body in server.received[-1:]} == {2}


# -- what is refused --------------------------------------------------------------------------------------------------


def test_a_server_without_projector_refuses_images(double: Both) -> None:
    server, chat = double.server, double.chat("alone")
    assert isinstance(server, LlamaServer)
    server.marker = ""
    with engine(double.config.model, server) as found:
        assert refusal(found, chat) == f"to the client: {media.NO_PROJECTOR}"
    assert not server.received


def test_a_prompt_that_the_server_would_read_otherwise_is_refused(double: Both) -> None:
    server = double.server
    assert isinstance(server, LlamaServer)
    encode = server.encode
    server.encode = lambda text: encode(text.replace("this", "that"))
    chat = double.chat("after the text")
    with engine(double.config.model, server) as found:
        assert "divides the text of this prompt into other tokens" in refusal(found, chat)
        server.encode = encode
        quoted = double.tokenizer.encode_chat([{"role": "user", "content": [IMAGE, text(double.marker)]}])
        assert "by which llama-server recognizes images" in refusal(found, Chat(quoted, [picture(1)]))
        assert not server.received
        assert asked(found, [chat], SAMPLING)[0].finish is not Finish.ERROR


def test_an_image_that_the_server_cannot_read_is_refused(both: Both) -> None:
    chat = both.chat("two")
    broken = [chat.pictures[0]._replace(data=b""), *chat.pictures[1:]]
    with engine(both.config.model, both.server) as found:
        assert refusal(found, chat._replace(pictures=broken)) == "to the client: Failed to load image or audio file"
        assert asked(found, [chat], SAMPLING)[0].finish is not Finish.ERROR


def test_a_text_without_images_is_refused_as_by_other_servers(double: Both) -> None:
    with engine(double.config.model, double.server) as found:
        found.add(EngineRequest(1, [len(double.server.pieces)], SAMPLING))
        assert run(found, 1)[1].error == "to the client: Prompt contains invalid tokens"


def test_images_that_exceed_a_body_are_refused(double: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "_MAX_BODY", (8 << 20) + 100)
    with engine(double.config.model, double.server) as found:
        assert "bytes in base64; with the text, llama-server accepts 8,388,708" in refusal(found, double.chat("alone"))


def test_a_text_never_becomes_an_image(both: Both) -> None:
    """Neither llama.cpp's default marker nor the text of our own placeholder."""
    tokenizer = both.tokenizer
    with pytest.raises(InvalidPayload, match="must not contain the text <__media__>"):
        tokenizer.encode_chat([{"role": "user", "content": [IMAGE, text(f"{MARKER} is a marker")]}])
    prompt = tokenizer.encode_chat([{"role": "user", "content": f"{MARKER} is a marker"}])
    placeholder = tokenizer.media_tokens["image"].placeholder
    assert placeholder not in prompt.ids
    assert tokenizer.vocabulary.decode(prompt.ids).count(MARKER) == 1


def test_parameters_that_need_a_prompt_of_ids(double: Both) -> None:
    with engine(double.config.model, double.server) as found:
        words = refusal(found, double.chat("alone"), SAMPLING._replace(min_new_tokens=3))
    assert words == "min_new_tokens cannot be combined with images on llama-server"


def test_a_response_that_was_begun_elsewhere_goes_on(both: Both) -> None:
    """As after a crash of our own engine process: the ids end with a part of the response."""
    chat = both.chat("two")
    letters = tuple((id, -100.0) for id, piece in enumerate(both.server.pieces) if not piece.isalpha())
    sampling = SAMPLING._replace(logit_bias=letters, ignore_eos=True)
    encode = both.tokenizer.ids
    with engine(both.config.model, both.server) as found:
        whole = asked(found, [chat], sampling)[0].ids
        before = both.tokenizer.vocabulary.decode(whole[:9])
        if encode(before) != whole[:9]:
            before = "ab and"
            whole = []
        request, _shared = chat.request(1, sampling)
        found.add(request._replace(ids=[*chat.prompt.ids, *encode(before)], goes_on=True))
        rest = run(found, 1)[1].ids
        assert rest[: len(whole) - 9] == whole[9:] if whole else len(rest) == 24
        if isinstance(both.server, LlamaServer):
            assert both.server.received[-1]["prompt"]["prompt_string"].endswith(before)


@REAL
def test_the_real_server_reads_large_files(real_both: Both) -> None:
    prompt = real_both.tokenizer.encode_chat(CHATS["two"])
    chat = Chat(prompt, [large(1300, 1200), large(1200, 1300)])
    with engine(real_both.config.model, real_both.server) as found:
        result = asked(found, [chat], real_both.sampling)[0]
    assert result == (real_both.own(chat, **real_both.fields)["tokens"], Finish.LENGTH, "")
