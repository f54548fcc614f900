"""vLLM against transformers on the same files: tokens, scores, beams; guides, and deaths of its processes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from handler.core.errors import GenerationFailed
from handler.core.values import Finish, Sampling
from handler.engines.base import EngineRequest, EngineStatistics, Step
from handler.engines.process.supervisor import State
from tests import vllm_forks
from tests.process.engines.test_conformance import Driver, ids, start, text
from tests.process_tree import in_session
from tests.servers import wait_for

pytestmark = pytest.mark.vllm

PROMPT = "The capital of France is"
STORY = "Once upon a time, in a small village"


@pytest.fixture(scope="module")
def reference(hf_demo: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(hf_demo, dtype=torch.float32)


def close() -> float:
    """How far log-probabilities may be away: those of an H100 were up to 0.004."""
    return 1e-2 if vllm_forks.on_gpu() else 2e-3


def generated(reference: Any, prompt: list[int], **options: Any) -> list[list[int]]:
    import torch

    options.setdefault("max_new_tokens", 12)
    found = reference.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False, **options
    )
    return [row[len(prompt) :].tolist() for row in found]


def log_probabilities(reference: Any, ids: list[int]) -> Any:
    """Of every id of the vocabulary, after each of `ids`."""
    import torch

    with torch.no_grad():
        return torch.log_softmax(reference(torch.tensor([ids])).logits[0].float(), -1)


# -- the same as transformers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [PROMPT, STORY, "def add(a, b):"])
def test_greedy_tokens_are_those_of_transformers(vllm: Driver, reference: Any, prompt: str) -> None:
    expected = generated(reference, vllm.tokenizer.encode(prompt).ids, max_new_tokens=24)[0]
    assert ids(vllm.one(prompt, max_new_tokens=24)) == expected


def test_log_probabilities_and_alternatives_are_those_of_transformers(vllm: Driver, reference: Any) -> None:
    prompt = vllm.tokenizer.encode(PROMPT).ids
    tokens = [token for delta in vllm.one(PROMPT, top_logprobs=4, max_new_tokens=6) for token in delta.tokens]
    scores = log_probabilities(reference, prompt + [token.id for token in tokens])
    for index, token in enumerate(tokens):
        row = scores[len(prompt) - 1 + index]
        best = row.topk(4)
        assert token.logprob == pytest.approx(float(row[token.id]), abs=close())
        assert [other.id for other in token.top] == best.indices.tolist()
        assert [other.logprob for other in token.top] == pytest.approx(best.values.tolist(), abs=close())


def test_a_prompts_log_probabilities_are_those_of_transformers(vllm: Driver, reference: Any) -> None:
    prefill = vllm.one(STORY, prompt_logprobs=True, max_new_tokens=1)[0].prefill
    assert prefill is not None
    scores = log_probabilities(reference, [token.id for token in prefill])
    expected = [float(scores[index - 1][prefill[index].id]) for index in range(1, len(prefill))]
    assert [token.logprob for token in prefill[1:]] == pytest.approx(expected, abs=close())


@pytest.mark.parametrize("beams", [pytest.param(2, marks=pytest.mark.nightly), 4])
@pytest.mark.parametrize("more", [{}, {"length_penalty": 0.0}, {"early_stopping": True}])
def test_beams_are_those_of_transformers(vllm: Driver, reference: Any, beams: int, more: dict[str, Any]) -> None:
    prompt = vllm.tokenizer.encode(PROMPT).ids
    expected = generated(reference, prompt, num_beams=beams, num_return_sequences=beams, max_new_tokens=8, **more)
    deltas = vllm.one(PROMPT, num_beams=beams, max_new_tokens=8, **more)
    assert [[token.id for token in delta.tokens] for delta in deltas] == expected


# -- what vLLM alone does ------------------------------------------------------------------------------------------


def test_words_can_be_forbidden_and_tokens_weighted(vllm: Driver) -> None:
    plain = vllm.one(PROMPT)
    paris = plain[0].tokens[0]
    assert "Paris" in paris.text
    assert "Paris" not in text(vllm.one(PROMPT, bad_sequences=(" Paris", "Paris")))
    assert ids(vllm.one(PROMPT, logit_bias=((paris.id, -100.0),)))[0] != paris.id
    assert set(ids(vllm.one(PROMPT, logit_bias=((paris.id, 100.0),), ignore_eos=True))) == {paris.id}
    biased = vllm.one(PROMPT, logit_bias=((paris.id, 100.0),), bad_token_ids=(paris.id,), ignore_eos=True)
    assert paris.id not in ids(biased)


def test_an_answer_has_only_allowed_tokens(vllm: Driver) -> None:
    allowed = tuple(ids(vllm.one(STORY)))[:3]
    found = vllm.one(PROMPT, allowed_token_ids=allowed, ignore_eos=True)
    assert ids(found) != ids(vllm.one(PROMPT))
    assert {*ids(found)} <= {*allowed}
    (choice,) = vllm.batch(PROMPT, {"allowed_token_ids": allowed, "do_sample": True, "temperature": 2.0})
    assert {*ids(choice)} <= {*allowed}


def test_a_salt_divides_the_prefix_cache_with_vllm(vllm: Driver) -> None:
    prompt = f"{STORY} there were many people. " * 8

    def cached(**more: Any) -> int:
        extras = [delta.extras for delta in vllm.one(prompt, max_new_tokens=2, **more) if delta.extras]
        return extras[0].num_cached_tokens or 0 if extras else 0

    assert cached() == 0
    first = cached()
    assert first >= 16
    found = [cached(cache_salt=salt) for salt in ("tenant-a", "tenant-b", "tenant-a", "tenant-b", "")]
    assert found == [0, 0, first, first, first]
    assert cached(cache_salt="tenant-c", num_beams=2) == 0
    assert cached(cache_salt="tenant-d") == 0


def test_a_search_whose_beams_all_end_at_once_ends_alone(vllm: Driver) -> None:
    alone = ids(vllm.one(STORY))
    (first,) = (token for delta in vllm.one(PROMPT, top_logprobs=8, max_new_tokens=1) for token in delta.tokens)
    good = vllm.submit(STORY)
    ended = vllm.submit(PROMPT, num_beams=2, stop_token_ids=tuple(token.id for token in first.top))
    found = vllm.run()
    assert [delta.finish for delta in found[ended]] == [Finish.STOP, Finish.STOP]
    assert ids(found[good]) == alone


def test_beams_in_company_disturb_nobody(vllm: Driver) -> None:
    alone = [ids([delta]) for delta in vllm.one(PROMPT, num_beams=3)]
    story = ids(vllm.one(STORY))
    search, dropped, other = (
        vllm.submit(PROMPT, num_beams=3),
        vllm.submit(STORY, num_beams=4, max_new_tokens=60),
        vllm.submit(STORY),
    )
    found: dict[int, list[Any]] = {}
    for _ in range(3):
        for delta in vllm.batcher.step(timeout=0.5):
            found.setdefault(delta.id, []).append(delta)
    vllm.batcher.cancel(dropped)
    for id, deltas in vllm.run().items():
        found.setdefault(id, []).extend(deltas)
    assert [ids([delta]) for delta in found[search]] == alone
    assert ids(found[other]) == story
    assert dropped not in found


def test_what_does_not_fit_vllm_is_refused_alone(vllm: Driver) -> None:
    alone = ids(vllm.one(STORY))
    hot = vllm.submit(PROMPT, do_sample=True, temperature=9.0)
    good = vllm.submit(STORY)
    found = vllm.run()
    assert "temperature must be in [0, 2]" in str(found[hot][-1].error)
    assert ids(found[good]) == alone


@pytest.mark.nightly
def test_a_long_prompt_shows_each_of_its_steps_without_statistics(hf_demo: Path) -> None:
    given = {"disable_log_stats": True, "max_num_batched_tokens": 64}
    with vllm_forks.engines():
        driver = start("vllm", hf_demo, engine_args=given)
    with contextlib.closing(driver.engine) as engine:
        engine.add(EngineRequest(1, range(100, 740), Sampling(max_new_tokens=1)))
        steps: list[Step] = []
        while not any(output.finish for step in steps for output in step.others):
            steps += engine.step(timeout=0.5)
        assert len(steps) >= 640 / 64, "otherwise engine_timeout would begin at the prompt's start"
        assert engine.statistics in (None, EngineStatistics())


# -- deaths --------------------------------------------------------------------------------------------------------


def shared_memory(pids: Iterable[int]) -> set[Path]:
    """The files in /dev/shm that processes have mapped: also those that had another name then."""
    maps = (line.split() for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    mapped = {int(fields[4]) for fields in maps if fields[5:] and fields[5].startswith("/dev/shm/")}
    return {path for path in Path("/dev/shm").iterdir() if path.stat().st_ino in mapped}


@pytest.fixture(scope="module")
def processes(hf_demo: Path) -> Iterator[Driver]:
    """Real ones, until the last has been killed: in a fork the end of a core has other signs."""
    driver = start("vllm", hf_demo)
    yield driver
    driver.engine.close()


@pytest.mark.nightly
@pytest.mark.timeout(900)  # three processes import vLLM
@pytest.mark.parametrize("victim", ["its core", "the engine"])
def test_a_killed_process_takes_the_others_along_and_a_new_engine_comes(processes: Driver, victim: str) -> None:
    leader = processes.engine.pid
    assert leader is not None
    lost = processes.submit(PROMPT, max_new_tokens=1500, ignore_eos=True)
    while not processes.batcher.step(timeout=0.5):
        pass
    segments = shared_memory(in_session(leader))
    assert segments
    core = next(pid for pid, args in in_session(leader).items() if "EngineCore" in args)
    os.kill(leader if victim == "the engine" else core, signal.SIGKILL)
    error = processes.run()[lost][-1].error
    assert isinstance(error, GenerationFailed)
    assert "no step for" not in str(error), "it was noticed at once, not when its time was up"
    wait_for(lambda: not in_session(leader), 20, "something of it is left that holds memory")
    wait_for(lambda: not any(segment.exists() for segment in segments), 20, f"one of {segments} is left")
    with vllm_forks.engines() if victim == "the engine" else contextlib.nullcontext():
        while processes.engine.state is not State.READY:  # a request waits two minutes, a busy machine may need longer
            processes.engine.step(timeout=1)
    waiting = processes.submit(PROMPT, max_new_tokens=3)
    assert processes.run()[waiting][-1].finish is Finish.LENGTH
