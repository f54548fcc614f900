"""Whisper with vLLM: tokens as transformers has them, pieces as vLLM's own server cuts them, languages and times."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from handler.config.config import Config
from handler.core.media import SAMPLE_RATE, Medium
from handler.core.values import Finish, Heard, Sampling, Task
from handler.engines.base import EngineConfig, EngineRequest, Tokenizer
from handler.engines.huggingface.whisper import cut
from handler.engines.process.supervisor import EngineSupervisor
from handler.engines.vllm.engine import load_tokenizer
from tests import vllm_forks
from tests.checkpoints.audio import clip
from tests.checkpoints.whisper import (
    CASES,
    GAP,
    NUM_TOKENS,
    Case,
    Reference,
    prompt,
    start,
    transcribe,
    write_model,
    write_timed,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # vLLM's own
]

FRENCH = 94
"""A token that these weights write after some clips: they take all for English otherwise."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whisper")
    model = write_timed(write_model(directory / "made"), directory / "timed")
    made = json.loads((model / "generation_config.json").read_text())
    made["lang_to_id"]["<|fr|>"] = FRENCH
    (model / "generation_config.json").write_text(json.dumps(made))
    return model


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


def config(model: Path) -> EngineConfig:
    options = Config(
        dtype="fp32",
        max_audio_seconds=90,
        max_rolling_batch_size=8,
        kv_cache_gib=1,
        engine_options={"enforce_eager": True, "gpu_memory_utilization": 0.15},
    )
    return EngineConfig(options, model=model, task=Task.TRANSCRIPTION)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[EngineSupervisor]:
    with vllm_forks.engines():
        engine = start("vllm", config(model))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return load_tokenizer(config(model))


@pytest.mark.parametrize("timed", [False, True])
def test_tokens_of_speech_are_those_of_transformers_with_vllm(
    engine: EngineSupervisor, tokenizer: Tokenizer, reference: Reference, timed: bool
) -> None:
    answers = [reference.answer(case, timed=timed) for case in CASES]
    assert min(answer.gap for answer in answers) >= GAP
    prompts = [prompt(tokenizer, case, timed=timed) for case in CASES]
    for case, one, answer in zip(CASES, prompts, answers, strict=True):
        (found,) = transcribe(engine, [one])
        assert found.finish is Finish.EOS, found.error
        assert found.ids[:NUM_TOKENS] == answer.ids, (case[1:], answer.gap)
        assert found.steps > 1  # they come one by one
    together = transcribe(engine, [*prompts, *prompts])
    assert [found.ids[:NUM_TOKENS] for found in together] == [answer.ids for answer in answers] * 2


def test_the_language_is_found_where_none_is_asked_for(
    engine: EngineSupervisor, tokenizer: Tokenizer, reference: Reference
) -> None:
    clips = [clip(2.0, seed) for seed in (1, 2, 5)]
    languages = [reference.language(one) for one in clips]
    assert languages == ["en", "fr", "en"]
    cases = [Case(one, "", "transcribe") for one in clips]
    for found, language in zip(
        transcribe(engine, [prompt(tokenizer, case, timed=True) for case in cases]), languages, strict=True
    ):
        assert [heard.language for _, heard in found.pieces] == [language], found.error


def test_a_long_clip_is_cut_as_vllms_own_server_cuts_it(
    engine: EngineSupervisor, tokenizer: Tokenizer, reference: Reference
) -> None:
    long = clip(70.0, 5)
    samples = numpy.frombuffer(long.data, numpy.float32)
    parts = [samples[start:end] for start, end in cut(samples)]
    assert [len(part) for part in parts] == [len(part) for part in _split_by_vllm(samples)]
    assert len(parts) == 3
    (found,) = transcribe(engine, [prompt(tokenizer, Case(long, "en", "transcribe"))])
    assert found.finish is Finish.EOS, found.error
    ends = [*(first for first, _ in found.pieces), len(found.ids)]
    for part, (first, heard), last in zip(parts, found.pieces, ends[1:], strict=True):
        data = part.tobytes()
        expected = reference.answer(Case(Medium("audio", (len(part),), data, ""), "en", "transcribe"))
        sure = NUM_TOKENS if expected.gap >= GAP / 10 else 1
        assert found.ids[first:last][:sure] == expected.ids[:sure]
        assert heard.end - heard.start == pytest.approx(len(part) / SAMPLE_RATE)
    assert found.pieces[0][1].start == 0
    assert found.pieces[-1][1] == Heard(found.pieces[-1][1].start, 70.0, "en")


def test_one_that_is_cancelled_leaves_others_whole(
    engine: EngineSupervisor, tokenizer: Tokenizer, reference: Reference
) -> None:
    long = prompt(tokenizer, Case(clip(70.0, 5), "en", "transcribe"))
    assert long.media is not None
    engine.add(EngineRequest(99, long.ids, Sampling(max_new_tokens=1 << 20), media=long.media.file))
    engine.step(timeout=1)
    engine.cancel(99)
    (found,) = transcribe(engine, [prompt(tokenizer, CASES[0])])
    assert found.ids[:NUM_TOKENS] == reference.answer(CASES[0]).ids


def _split_by_vllm(samples: Any) -> list[Any]:
    from vllm.multimodal.audio import split_audio

    return [*split_audio(samples, SAMPLE_RATE, 30, 1, 1600)]
