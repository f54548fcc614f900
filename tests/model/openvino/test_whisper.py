"""Whisper with OpenVINO: tokens as transformers has them, alone and in company, and over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest

from handler.config.config import Config
from handler.core.errors import ConfigError, InvalidParameter, InvalidPayload
from handler.core.media import SAMPLE_RATE, Medium
from handler.core.values import Sampling, Task
from handler.engines.base import EngineConfig, EngineRequest, Tokenizer
from handler.engines.huggingface.whisper import cut
from handler.engines.openvino.engine import check, load_tokenizer
from handler.engines.process.supervisor import EngineSupervisor
from handler.scheduler.engine import join
from tests.app.media.clips import clip_file
from tests.checkpoints.audio import clip
from tests.checkpoints.whisper import CASES, GAP, NUM_TOKENS, Answer, Case, prompt, start, transcribe, write_timed
from tests.random_models import unpack
from tests.servers import http, serve

pytestmark = pytest.mark.model

GOLDEN = Path(__file__).parents[2] / "golden" / "engines" / "whisper"
ANSWERS = [Answer(**answer) for answer in json.loads((GOLDEN / "answers.json").read_text())]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whisper")
    unpack(GOLDEN / "whisper.tar.xz", directory)
    return directory / "openvino"


def config(model: Path) -> EngineConfig:
    return EngineConfig(Config(dtype="fp32", max_audio_seconds=90), model=model, task=Task.TRANSCRIPTION)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[EngineSupervisor]:
    assert min(answer.gap for answer in ANSWERS) >= GAP
    engine = start("openvino", config(model))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def timed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSupervisor]:
    engine = start("openvino", config(write_timed(model, tmp_path_factory.mktemp("timed") / "model")))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return load_tokenizer(config(model))


def test_tokens_of_speech_are_those_of_transformers_alone_and_in_company(
    engine: EngineSupervisor, tokenizer: Tokenizer
) -> None:
    prompts = [prompt(tokenizer, case) for case in CASES]
    for one, answer in zip(prompts, ANSWERS, strict=True):
        (found,) = transcribe(engine, [one])
        assert found.ids[:NUM_TOKENS] == answer.ids, found.error
        assert found.steps > 1  # they come one by one
    together = transcribe(engine, [*prompts, *prompts])
    assert [found.ids[:NUM_TOKENS] for found in together] == [answer.ids for answer in ANSWERS] * 2


def piece(medium: Medium, start: int, end: int) -> Medium:
    data = medium.data[4 * start : 4 * end]
    return Medium("audio", (end - start,), data, "")


def test_a_long_clip_is_heard_in_pieces(engine: EngineSupervisor, tokenizer: Tokenizer) -> None:
    long = clip(65.0, 5)
    places = list(cut(numpy.frombuffer(long.data, numpy.float32)))
    assert len(places) == 3
    alone = [
        one
        for start, end in places
        for one in transcribe(engine, [prompt(tokenizer, Case(piece(long, start, end), "en", "transcribe"))])
    ]
    (found,) = transcribe(engine, [prompt(tokenizer, Case(long, "en", "transcribe"))])
    assert found.error is None
    assert found.ids == [id for one in alone for id in one.ids]


def test_a_short_clip_waits_for_one_piece_of_a_long_one(engine: EngineSupervisor, tokenizer: Tokenizer) -> None:
    long = prompt(tokenizer, Case(clip(85.0, 5), "en", "transcribe"))
    short = prompt(tokenizer, CASES[0])
    assert long.media is not None
    assert short.media is not None
    for key, one in enumerate((long, short), 1):
        assert one.media is not None
        engine.add(EngineRequest(key, one.ids, Sampling(max_new_tokens=448), media=one.media.file))
    ended: list[int] = []
    while len(ended) < 2:
        ended += [output.key for output in join(engine.step(timeout=1)).others if output.finish is not None]
    assert ended == [2, 1]


@pytest.mark.parametrize("language", ["en", ""])
def test_times_in_whisper(timed: EngineSupervisor, tokenizer: Tokenizer, language: str) -> None:
    (found,) = transcribe(timed, [prompt(tokenizer, Case(clip(40.0, 5), language, "transcribe"), timed=True)])
    assert found.error is None
    first, second = (heard for _, heard in found.pieces)
    assert (first.start, second.start, second.end) == (0.0, first.end, 40.0)
    assert {first.language, second.language} <= ({language} if language else {"de", "en"})
    assert first.language == second.language
    assert tokenizer.vocabulary is not None
    times = [id for id in found.ids if tokenizer.vocabulary.text(id).startswith("<|")]
    assert len(times) > 4
    assert len(times) < len(found.ids)
    assert set(times) <= tokenizer.vocabulary.special


def test_one_that_is_cancelled_answers_nothing(engine: EngineSupervisor, tokenizer: Tokenizer) -> None:
    first, second = prompt(tokenizer, CASES[0]), prompt(tokenizer, CASES[1])
    assert first.media is not None
    engine.add(EngineRequest(7, first.ids, Sampling(max_new_tokens=448), media=first.media.file))
    engine.cancel(7)
    (found,) = transcribe(engine, [second])
    assert found.ids[:NUM_TOKENS] == ANSWERS[1].ids


def test_what_the_model_does_not_know_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidParameter, match="language=xx: the model only supports de, en"):
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


def test_over_http_in_whisper(model: Path) -> None:
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
