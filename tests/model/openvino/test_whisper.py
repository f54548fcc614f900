"""Whisper with OpenVINO: tokens as transformers has them, alone and in company, and over HTTP."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest

from handler.config.config import Config
from handler.core.errors import ConfigError, InvalidParameter, InvalidPayload
from handler.core.media import SAMPLE_RATE, MediaSource, Medium
from handler.core.text import Prompt
from handler.core.values import Request, Sampling, Task, TemplateOptions
from handler.engines.base import EngineConfig, EngineRequest, Output, Tokenizer
from handler.engines.openvino.engine import check, load, load_tokenizer
from handler.engines.openvino.whisper.engine import OpenVinoWhisper
from handler.serving.media.placing import place_media
from tests.app.media.clips import clip_file, tone
from tests.audio.whisper import CASES, GAP, NUM_TOKENS, Answer, Case
from tests.servers import http, serve

pytestmark = pytest.mark.model

GOLDEN = Path(__file__).parents[2] / "golden" / "engines" / "whisper"
ANSWERS = [Answer(**answer) for answer in json.loads((GOLDEN / "answers.json").read_text())]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whisper")
    with tarfile.open(GOLDEN / "whisper.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    return directory / "openvino"


def config(model: Path) -> EngineConfig:
    return EngineConfig(Config(dtype="fp32", max_audio_seconds=90), model=model, task=Task.TRANSCRIPTION)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[OpenVinoWhisper]:
    assert min(answer.gap for answer in ANSWERS) >= GAP
    engine = load(config(model))
    assert isinstance(engine, OpenVinoWhisper)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return load_tokenizer(config(model))


def prompt(tokenizer: Tokenizer, case: Case) -> Prompt:
    messages = ({"role": "user", "content": [{"type": "audio"}]},)
    asked = TemplateOptions(arguments=(("language", case.language), ("task", case.task), ("prompt", case.prompt)))
    request = Request("", messages=messages, media=(MediaSource("audio", b"", "", "file"),), template=asked)
    encoded = tokenizer.encode_chat(messages, options=asked)
    return place_media(request, encoded, (case.clip,), tokenizer.media_tokens)


def run(engine: OpenVinoWhisper, prompts: list[Prompt]) -> list[Output]:
    for key, one in enumerate(prompts):
        assert one.media is not None
        engine.add(EngineRequest(key, one.ids, Sampling(max_new_tokens=448), media=one.media.file))
    found: dict[int, Output] = {}
    while len(found) < len(prompts):
        found |= {output.key: output for output in engine.step().others}
    return [found[key] for key in range(len(prompts))]


def test_tokens_are_those_of_transformers_alone_and_in_company(engine: OpenVinoWhisper, tokenizer: Tokenizer) -> None:
    prompts = [prompt(tokenizer, case) for case in CASES]
    for one, answer in zip(prompts, ANSWERS, strict=True):
        (output,) = run(engine, [one])
        assert output.ids[:NUM_TOKENS] == answer.ids, output.error
    together = run(engine, [*prompts, *prompts])
    assert [output.ids[:NUM_TOKENS] for output in together] == [answer.ids for answer in ANSWERS] * 2


def test_a_clip_of_several_windows_is_heard_to_its_end(model: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """GenAI needs the tokens of times then, which `CASES` do without."""
    directory = shutil.copytree(model, tmp_path / "timed")
    made = json.loads((directory / "generation_config.json").read_text())
    made["suppress_tokens"] = [id for id in made["suppress_tokens"] if id <= made["no_timestamps_token_id"]]
    (directory / "generation_config.json").write_text(json.dumps(made))
    engine = load(config(directory))
    assert isinstance(engine, OpenVinoWhisper)
    samples = tone(65.0).tobytes()
    long = prompt(tokenizer, Case(Medium("audio", (len(samples) // 4,), samples, "long"), "en", "transcribe"))
    (output,) = run(engine, [long])
    engine.close()
    assert output.error is None
    assert len(output.ids) > 448


def test_one_that_is_cancelled_answers_nothing(engine: OpenVinoWhisper, tokenizer: Tokenizer) -> None:
    first, second = prompt(tokenizer, CASES[0]), prompt(tokenizer, CASES[1])
    assert first.media is not None
    engine.add(EngineRequest(7, first.ids, Sampling(max_new_tokens=448), media=first.media.file))
    engine.cancel(7)
    (output,) = run(engine, [second])
    assert (output.key, output.ids[:NUM_TOKENS]) == (0, ANSWERS[1].ids)


def test_what_the_model_does_not_know_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidParameter, match="language=xx: the model does not know it; it knows de, en"):
        prompt(tokenizer, CASES[0]._replace(language="xx"))
    for words in ("hello " * 300, "a" * 100_000):
        with pytest.raises(InvalidPayload, match="'prompt' is too long: at most 223 tokens"):
            prompt(tokenizer, CASES[0]._replace(prompt=words))


def test_a_graph_that_is_missing_stops_the_start(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        if "decoder" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(ConfigError, match=r"openvino_decoder_model\.xml is missing"):
        check(str(tmp_path), config(tmp_path))


def test_over_http(model: Path) -> None:
    def ask(case: Case) -> str:
        path = "translations" if case.task == "translate" else "transcriptions"
        file = clip_file(numpy.frombuffer(case.clip.data, numpy.float32), SAMPLE_RATE, subtype="FLOAT")
        fields = {"language": case.language, "prompt": case.prompt}
        answer = http.post(f"{server.url}/v1/audio/{path}", files={"file": file}, data=fields)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["text"])

    tokenizer = load_tokenizer(config(model))
    assert tokenizer.vocabulary is not None
    with serve(str(model), "-o", "option.dtype=fp32") as server, ThreadPoolExecutor(4) as threads:
        server.wait_ready()
        for answer, text in zip(ANSWERS, threads.map(ask, CASES), strict=True):
            shown = tokenizer.vocabulary.decode(answer.ids[:-3]).strip().rstrip("\ufffd")
            assert text.startswith(shown)
