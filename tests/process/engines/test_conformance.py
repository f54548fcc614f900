"""Duties of every engine, the same tests for each: alone or in company, cancelled, stopped, seeded, limited."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from handler import engines
from handler.config.config import Config
from handler.config.engines import ENGINES
from handler.core.errors import GenerationFailed, PromptTooLong, RefusedByEngine
from handler.core.text import Prompt
from handler.core.values import Delta, Finish, Pooling, Request, Sampling, StructuredOutput, Thoughts
from handler.engines.base import EngineConfig, Tokenizer
from handler.engines.grpc.vllm import VllmContract
from handler.engines.process.engine_process import Spec
from handler.engines.process.supervisor import EngineSupervisor, State
from handler.scheduler.batcher import Batcher
from handler.scheduler.engine import ReasoningEngine, SteppedEngine
from handler.scheduler.labels import MAX_TOPS, LabelEngine
from tests import vllm_forks
from tests.label_batches import Text, check_batch
from tests.process.engines.llamacpp.real import PROGRAM as LLAMA_SERVER
from tests.servers import one_core

PROSE = ("The capital of France is", "Once upon a time", "def add(a, b):", "😀 is an emoji that means")


class Setup(NamedTuple):
    """How an engine is brought up here, and what it is asked."""

    prompts: tuple[str, ...] = PROSE
    model: str | None = None  # a fixture
    options: Mapping[str, Any] = MappingProxyType({})
    dtype: str = "fp32"  # in which a model's arithmetic does not depend on what else is in the batch


STEP = 256  # tokens, of OpenVINO's steps too

# Compact JSON: where white space is free, a small model may go on with it to the end.
GUIDED = {"backend": "xgrammar", "disable_any_whitespace": True}

SETUPS = {
    "echo": Setup(("one two three", "a", "def add", "😀 é"), options={"echo_cues": True}),
    "openvino": Setup(model="exact_demo"),
    "trtllm": Setup(model="trtllm_model", dtype="auto"),  # it has no kernels for fp32
    "vllm": Setup(
        model="hf_demo",
        options={
            "enforce_eager": True,
            "max_logprobs": -1,
            "gpu_memory_utilization": 0.15,  # of a GPU that others share
            "engine_args": {
                "structured_outputs_config": GUIDED,
                "block_size": 32,  # on a CPU 128 by default, so that a beam would compute its prompt at every step
                "max_num_batched_tokens": STEP,
            },
        },
    ),
    "llamacpp": Setup(
        options={"llama_server": LLAMA_SERVER or "", "llama_server_args": ("-t", "1"), "base_url_timeout": 600.0},
        dtype="auto",  # the file determines it
    ),
    "grpc": Setup(
        model="hf_demo",
        options={"base_url_kind": "vllm", "base_url_connect_timeout": 5.0, "base_url_timeout": 60.0},
    ),
}
GRPC_SERVER = (
    *("--max-num-batched-tokens", str(STEP)),
    *("--enforce-eager", "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "16", "--block-size", "32"),
    *(
        "--kv-cache-memory-bytes",
        str(1 << 31),
        "--gpu-memory-utilization",
        "0.15",
        "--max-logprobs",
        "-1",
        "--structured-outputs-config",
        json.dumps(GUIDED),
    ),
)
OPENVINO, VLLM = pytest.param("openvino", marks=pytest.mark.model), pytest.param("vllm", marks=pytest.mark.vllm)
LLAMACPP = pytest.param(
    "llamacpp",
    marks=[pytest.mark.model, pytest.mark.skipif(LLAMA_SERVER is None, reason="no llama-server on PATH")],
)
GRPC = pytest.param("grpc", marks=[pytest.mark.vllm, pytest.mark.nightly])
REAL = [OPENVINO, LLAMACPP, VLLM, GRPC]
"""Those that run a language model."""


def test_every_engine_is_tried() -> None:
    """The one by URL has suites of its own, beside this file."""
    assert set(SETUPS) == set(ENGINES) - {"openai"}, "an engine needs a line in SETUPS"


@dataclass
class Driver:
    """A loaded engine behind a batcher, and the few verbs that the tests speak."""

    name: str
    engine: EngineSupervisor
    stepped: SteppedEngine
    tokenizer: Tokenizer
    batcher: Batcher
    unsupported: Mapping[str, str]
    no_labels: str

    def needs(self, field: str) -> None:
        """Skip the test where the engine refuses the parameter by name."""
        if field in self.unsupported:
            pytest.skip(f"{self.name} lacks {field}: {self.unsupported[field]}")

    @property
    def prompts(self) -> tuple[str, ...]:
        return SETUPS[self.name].prompts

    def submit(self, text: str, **sampling: Any) -> int:
        sampling.setdefault("max_new_tokens", 12)
        return self.batcher.submit(Request(text, Sampling(**sampling)), self.tokenizer.encode(text))

    def labels(self, text: str) -> dict[str, int]:
        """The labels of `LABELS` that are single tokens after the text, and their ids."""
        if self.no_labels:
            pytest.skip(f"{self.name} has no labels: {self.no_labels}")
        if self.tokenizer.vocabulary is None:
            return {label: id for id, label in enumerate(LABELS, 1)}
        before = self.tokenizer.encode(text).ids
        encoded = {label: self.tokenizer.encode(text + label).ids for label in LABELS}
        return {label: ids[-1] for label, ids in encoded.items() if ids[:-1] == before}

    def submit_labels(self, text: str) -> int:
        """Ask for the log-probabilities of labels."""
        prompt, labels = self.tokenizer.encode(text), self.labels(text)
        ids = tuple(labels.values())
        pooling = Pooling("labels", labels=(*labels,), label_ids=ids, num_shared=len(prompt.ids) // 2)
        return self.batcher.submit(Request(text, Sampling(max_new_tokens=1), pooling=pooling), prompt)

    def run(self) -> dict[int, list[Delta]]:
        found: dict[int, list[Delta]] = {}
        while not self.batcher.idle:
            for delta in self.batcher.step(timeout=0.5):
                found.setdefault(delta.id, []).append(delta)
        return found

    def one(self, text: str, **sampling: Any) -> list[Delta]:
        return self.batch(text, sampling)[0]

    def batch(self, text: str, *samplings: Mapping[str, Any]) -> list[list[Delta]]:
        """The answers to requests with the same text in one batch, which costs little more than one of them."""
        started = [self.submit(text, **sampling) for sampling in samplings]
        found = self.run()
        return [found[id] for id in started]


def start(name: str, model: Path | None, **options: Any) -> Driver:
    config = EngineConfig(
        Config(
            dtype=SETUPS[name].dtype,
            max_rolling_batch_size=16,
            max_model_len=2048,
            kv_cache_gib=2,
            engine_options={**SETUPS[name].options, **options},
        ),
        model=model,
    )
    if (weights := engines.weights(name, None)) is not None:  # the demo model
        config = replace(config, model=engines.prepare(name, None, config), weights=weights)
    with one_core() if name == "openvino" else contextlib.nullcontext():
        engine = EngineSupervisor(Spec(name, config), isolated=engines.entry(name).isolated, load_timeout=900)
    while engine.state is State.LOADING:
        engine.step(timeout=1)
    able = engines.capabilities(name, config)
    tokenizer = engines.load_tokenizer(name, config)
    stepped: SteppedEngine = engine
    if not able.labels and not able.no_labels:
        stepped = LabelEngine(engine, able.unsupported, able.limits.get("top_logprobs", MAX_TOPS))
    batcher = Batcher(ReasoningEngine(stepped, tokenizer.vocabulary), max_active=16)
    return Driver(name, engine, stepped, tokenizer, batcher, able.unsupported, able.no_labels)


@pytest.fixture(scope="module", params=["echo", "trtllm", OPENVINO, LLAMACPP, VLLM, GRPC])
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    if request.param == "vllm":
        yield request.getfixturevalue("vllm")
        return
    fixture = SETUPS[request.param].model
    model = request.getfixturevalue(fixture) if fixture else None
    with contextlib.ExitStack() as stack:
        options: dict[str, Any] = {}
        if request.param == "grpc":
            log = tmp_path_factory.mktemp("vllm") / "log"
            server = vllm_forks.grpc_server(log, "--model", str(model), *GRPC_SERVER)
            options["base_url"] = (stack.enter_context(server),)
        found = start(request.param, model, **options)
        stack.callback(found.engine.close)
        yield found


def ids(deltas: list[Delta]) -> list[int]:
    return [token.id for delta in deltas for token in delta.tokens]


def text(deltas: list[Delta]) -> str:
    return "".join(token.text for delta in deltas for token in delta.tokens)


def test_an_engine_whose_steps_grow_with_their_prompts_has_measured_them(driver: Driver) -> None:
    assert driver.engine.info is not None
    assert (driver.engine.info.longest_step > 0) is (driver.name in ("openvino", "vllm"))


def test_an_answer_has_its_length_and_one_finish(driver: Driver) -> None:
    deltas = driver.one(driver.prompts[0], max_new_tokens=5, ignore_eos=True)
    assert len(ids(deltas)) == 5
    assert [delta.finish for delta in deltas if delta.finish] == [Finish.LENGTH]
    assert deltas[-1].tokens, "the finishing delta carries the last token"


def test_every_token_has_a_log_probability(driver: Driver) -> None:
    for delta in driver.one(driver.prompts[0]):
        for token in delta.tokens:
            assert token.logprob is not None
            assert token.logprob <= 0


LABELS = ("A", "B", " a", "e", ",", " the", " Paris")


def vector(deltas: list[Delta]) -> list[float]:
    (delta,) = deltas
    assert delta.finish is not None
    assert delta.extras is not None
    return [*(delta.extras.vector or ())]


def test_labels_have_the_log_probabilities_of_the_next_token(driver: Driver) -> None:
    prompt = driver.prompts[0]
    id = driver.submit_labels(prompt)
    *logprobs, highest = vector(driver.run()[id])
    assert highest >= max(logprobs)
    assert highest == pytest.approx(driver.one(prompt, max_new_tokens=1)[0].tokens[0].logprob, abs=0.01) or (
        driver.name == "echo"
    )
    labels = driver.labels(prompt)
    assert len(labels) > 1
    if "prompt_logprobs" in driver.unsupported:
        return
    for label, logprob in zip(labels, logprobs, strict=True):
        prefill = driver.one(prompt + label, prompt_logprobs=True, max_new_tokens=1)[0].prefill
        assert prefill is not None
        assert logprob == pytest.approx(prefill[-1].logprob, abs=2e-3)


def test_labels_and_alternatives_are_the_same_alone_and_in_company(driver: Driver) -> None:
    alternatives = {} if "top_logprobs" in driver.unsupported else {"top_logprobs": 3}
    prompts = driver.prompts[:3]
    alone = {}
    for prompt in prompts:
        id = driver.submit_labels(prompt)
        alone[prompt] = vector(driver.run()[id])
    tokens = [token for delta in driver.one(prompts[0], **alternatives) for token in delta.tokens]
    asked = {driver.submit_labels(prompt): prompt for prompt in prompts}
    streams = [driver.submit(prompts[0], **alternatives) for _ in range(2)]
    found: dict[int, list[Delta]] = {}
    for _ in range(2):
        for delta in driver.batcher.step(timeout=0.5):
            found.setdefault(delta.id, []).append(delta)
    asked |= {driver.submit_labels(prompt): prompt for prompt in prompts}
    gone = driver.submit_labels(prompts[1])
    driver.batcher.cancel(gone)
    for id, deltas in driver.run().items():
        found.setdefault(id, []).extend(deltas)
    for id, prompt in asked.items():
        assert vector(found[id]) == pytest.approx(alone[prompt], abs=2e-3)
    for stream in streams:
        others = [token for delta in found[stream] for token in delta.tokens]
        assert [token.id for token in others] == [token.id for token in tokens]
        for token, other in zip(tokens, others, strict=True):
            assert [top.id for top in other.top] == [top.id for top in token.top]
            assert [top.logprob for top in other.top] == pytest.approx([top.logprob for top in token.top], abs=2e-3)
    assert gone not in found


GOLDEN = Path(__file__).parents[2] / "golden" / "engines" / "smollm2_f32_greedy.json"


@pytest.mark.parametrize("driver", [OPENVINO], indirect=True)
def test_labels_in_a_batch_of_32_have_the_numbers_of_transformers(driver: Driver) -> None:
    """The others run here with weights that are rounded to 16 bits, which moves numbers by 0.01."""
    cases = [case for case in json.loads(GOLDEN.read_text())["cases"] if case["exact"]["margin"] > 0.05][:6]
    texts = [
        Text([*case["prompt_ids"], *case["exact"]["ids"]], case["exact"]["logprobs"], len(case["prompt_ids"]))
        for case in cases
    ]
    greedy = Sampling(max_new_tokens=6, ignore_eos=True)
    seeded = greedy._replace(do_sample=True, seed=7)
    check_batch(driver.stepped, lambda: driver.stepped.step(timeout=0.5), texts, greedy, seeded)


def test_greedy_is_the_same_every_time_alone_and_in_company(driver: Driver) -> None:
    alone = {prompt: ids(driver.one(prompt)) for prompt in driver.prompts}
    started = {driver.submit(prompt): prompt for prompt in driver.prompts * 2}
    together = driver.run()
    assert {id: ids(together[id]) for id in started} == {id: alone[prompt] for id, prompt in started.items()}


def test_streams_of_any_length_leave_and_join_a_batch(driver: Driver) -> None:
    lengths = {driver.submit(driver.prompts[0], max_new_tokens=count, ignore_eos=True): count for count in (1, 9, 4)}
    found: dict[int, list[Delta]] = {}
    for _ in range(2):
        for delta in driver.batcher.step(timeout=0.5):
            found.setdefault(delta.id, []).append(delta)
    late = driver.submit(driver.prompts[1], max_new_tokens=3, ignore_eos=True)
    for id, deltas in driver.run().items():
        found.setdefault(id, []).extend(deltas)
    assert {id: len(ids(deltas)) for id, deltas in found.items()} == {**lengths, late: 3}
    assert text(found[late]) == text(driver.one(driver.prompts[1], max_new_tokens=3, ignore_eos=True))


def test_a_seed_gives_the_same_sample_alone_and_in_company(driver: Driver) -> None:
    driver.needs("seed")
    sampled = {"do_sample": True, "temperature": 1.0, "seed": 1234}
    alone = ids(driver.one(driver.prompts[1], **sampled))
    id = driver.submit(driver.prompts[1], **sampled)
    for seed in range(5):
        driver.submit(driver.prompts[1], do_sample=True, seed=seed)
    assert ids(driver.run()[id]) == alone


def test_unset_seeds_differ(driver: Driver) -> None:
    drawn = {tuple(ids(deltas)) for deltas in driver.batch(driver.prompts[1], *[{"do_sample": True}] * 4)}
    assert (len(drawn) > 1) == (driver.name != "echo")  # which has one candidate


def test_long_prompts_are_sampled_in_company(driver: Driver) -> None:
    """Each is longer than a step, so that steps compute parts of them beside others' tokens, with seeds and without."""
    seeds = (None, None, None) if "seed" in driver.unsupported else (None, 1, 2)
    alone, long = ids(driver.one(driver.prompts[0])), driver.prompts[1] + " the" * (2 * STEP)
    sampled = {"do_sample": True, "max_new_tokens": 4, "ignore_eos": True}
    started = [driver.submit(long, **sampled, seed=seed) for seed in seeds]
    neighbour = driver.submit(driver.prompts[0])
    found = driver.run()
    assert [len(ids(found[id])) for id in started] == [4, 4, 4]
    assert ids(found[neighbour]) == alone


def test_the_largest_seed_is_taken(driver: Driver) -> None:
    assert ids(driver.one(driver.prompts[0], do_sample=True, seed=2**64 - 1))


def test_cancel_frees_the_place_and_spares_the_neighbours(driver: Driver) -> None:
    gone = driver.submit(driver.prompts[0], max_new_tokens=1000, ignore_eos=True)
    kept = driver.submit(driver.prompts[1])
    early = driver.batcher.step(timeout=0.5)
    driver.batcher.cancel(gone)
    late = driver.run()
    assert gone not in late
    assert driver.batcher.num_active == 0
    deltas = [delta for delta in early if delta.id == kept] + late.get(kept, [])
    assert ids(deltas) == ids(driver.one(driver.prompts[1]))


def test_a_stop_string_across_tokens_is_cut_out(driver: Driver) -> None:
    whole = text(driver.one(driver.prompts[0], ignore_eos=True))
    at = len(whole) // 2
    stop = whole[at - 1 : at + 4]
    deltas = driver.one(driver.prompts[0], stop=(stop,), ignore_eos=True)
    assert text(deltas) == whole[: whole.index(stop)]
    assert deltas[-1].finish is Finish.STOP
    included = driver.one(driver.prompts[0], stop=(stop,), include_stop=True, ignore_eos=True)
    assert text(included) == whole[: whole.index(stop) + len(stop)]


def test_a_stop_token_ends_a_sequence(driver: Driver) -> None:
    found = ids(driver.one(driver.prompts[0], ignore_eos=True))
    stop = found[2]
    for ignore_eos in (False, True):
        deltas = driver.one(driver.prompts[0], stop_token_ids=(stop,), ignore_eos=ignore_eos)
        assert ids(deltas) == found[: found.index(stop) + 1]
        assert deltas[-1].finish is Finish.STOP
        late = ids(driver.one(driver.prompts[0], stop_token_ids=(stop,), ignore_eos=ignore_eos, min_new_tokens=6))
        assert len(late) >= 6


def test_several_sequences_come_numbered(driver: Driver) -> None:
    deltas = driver.one(driver.prompts[1], n=3, best_of=3, do_sample=True, seed=5, max_new_tokens=4, ignore_eos=True)
    by_sequence = {s: [d for d in deltas if d.sequence == s] for s in range(3)}
    assert all(len(ids(found)) == 4 and found[-1].finish for found in by_sequence.values())
    driver.needs("seed")
    assert ids(by_sequence[1]) == ids(
        driver.one(driver.prompts[1], do_sample=True, seed=6, max_new_tokens=4, ignore_eos=True)
    )


def test_what_a_neighbour_breaks_stays_with_the_neighbour(driver: Driver) -> None:
    """A request that the engine itself refuses, with all checks before it passed by."""
    alone = ids(driver.one(driver.prompts[0]))
    broken = driver.submit("x <refuse>", do_sample=True, max_new_tokens=5, repetition_penalty=-1.0)
    good = driver.submit(driver.prompts[0])
    found = driver.run()
    assert isinstance(found[broken][-1].error, GenerationFailed | RefusedByEngine)
    assert ids(found[good]) == alone


def test_unicode_survives(driver: Driver) -> None:
    deltas = driver.one(driver.prompts[3], max_new_tokens=24, ignore_eos=True)
    assert "\ufffd" not in text(deltas)


def test_a_thought_ends_at_its_budget_and_the_answer_follows(driver: Driver) -> None:
    driver.needs("thinking_token_budget")
    vocabulary = driver.tokenizer.vocabulary
    assert vocabulary is not None
    prompt, closing = driver.tokenizer.encode(driver.prompts[1]), vocabulary.ids(b"</think>")
    thoughts = Thoughts(("<think>",), ("</think>",), True, (), closing)
    first = [*ids(driver.one(prompt.text, max_new_tokens=4, ignore_eos=True)), *closing]
    ask = Sampling(max_new_tokens=5, ignore_eos=True)
    asked = [
        driver.submit(prompt.text, max_new_tokens=5 + len(first), ignore_eos=True, thoughts=thoughts, **budget)
        for budget in ({"thinking_token_budget": 4}, {"thinking_token_budget": 0})
    ]
    alone = [
        driver.batcher.submit(Request("", ask), Prompt("", [*prompt.ids, *part], vocabulary))
        for part in (first, closing)
    ]
    found = driver.run()
    assert ids(found[asked[0]]) == [*first, *ids(found[alone[0]])]
    assert ids(found[asked[1]])[: len(closing) + 5] == [*closing, *ids(found[alone[1]])]


# -- what only a model can show ----------------------------------------------------------------------------------


CHAT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
PET = "<|im_start|>user\nTell me about a pet.<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("driver", REAL, indirect=True)
class TestModel:
    def test_the_end_token_ends_an_answer_and_is_not_shown(self, driver: Driver) -> None:
        deltas = driver.one(CHAT, max_new_tokens=200)
        last = deltas[-1].tokens[-1]
        assert (deltas[-1].finish, last.text, last.special) == (Finish.EOS, "", True)
        assert "<|im_end|>" not in text(deltas)

    def test_special_tokens_show_when_asked(self, driver: Driver) -> None:
        shown = driver.one(CHAT, max_new_tokens=200, skip_special_tokens=False, include_stop=True)
        assert text(shown).endswith("<|im_end|>")
        assert "<|im_end|>" not in text(driver.one(CHAT, max_new_tokens=200, skip_special_tokens=False))

    def test_ignore_eos_goes_on(self, driver: Driver) -> None:
        stopped = len(ids(driver.one(CHAT, max_new_tokens=200)))
        assert len(ids(driver.one(CHAT, max_new_tokens=stopped + 5, ignore_eos=True))) == stopped + 5

    def test_min_new_tokens_holds_the_end_back(self, driver: Driver) -> None:
        stopped = len(ids(driver.one(CHAT, max_new_tokens=200)))
        least = stopped + 3
        assert len(ids(driver.one(CHAT, max_new_tokens=200, min_new_tokens=least))) >= least

    def test_prompt_log_probabilities(self, driver: Driver) -> None:
        driver.needs("prompt_logprobs")
        for _ in range(2):  # a second time: nothing is taken from a cache
            deltas = driver.one("The capital of France is", prompt_logprobs=True, max_new_tokens=2)
            prefill = deltas[0].prefill
            assert prefill is not None
            assert [token.text for token in prefill] == ["The", " capital", " of", " France", " is"]
            assert prefill[0].logprob is None
            assert all(token.logprob is not None and token.logprob < 0 for token in prefill[1:])
            assert text(deltas).startswith(" Paris")

    def test_what_was_likelier_than_the_prompts_tokens(self, driver: Driver) -> None:
        driver.needs("prompt_logprobs")
        deltas = driver.one("The capital of France is Paris", prompt_logprobs=True, prompt_top_logprobs=2)
        prefill = deltas[0].prefill
        assert prefill is not None
        assert prefill[0].top == ()
        for token in prefill[1:]:
            first, second = token.top
            assert first.logprob is not None
            assert second.logprob is not None
            assert token.logprob is not None
            assert first.logprob >= second.logprob
            assert token.logprob <= first.logprob
            assert all(one.logprob == token.logprob for one in token.top if one.id == token.id)
        assert prefill[-1].top[0].text == " Paris"

    def test_a_prompts_log_probabilities_are_the_same_in_company(self, driver: Driver) -> None:
        driver.needs("prompt_logprobs")
        ask = {"prompt_logprobs": True, "max_new_tokens": 3}
        prompt = "Story 5: once upon a time there was"
        alone = driver.one(prompt, **ask)[0].prefill
        company = [driver.submit(f"Tell me {index}", max_new_tokens=40, ignore_eos=True) for index in range(5)]
        driver.batcher.step(timeout=0.5)
        asked = [driver.submit(prompt, **ask) for _ in range(2)]
        dropped = driver.submit("A prompt that nobody waits for " * 9, **ask)
        driver.batcher.cancel(dropped)
        found = driver.run()
        on_gpu = driver.name == "vllm" and vllm_forks.on_gpu()
        tolerance = 2e-3 if on_gpu else 0.0  # its kernels round a larger batch otherwise
        for prefill in (found[id][0].prefill for id in asked):
            assert prefill
            assert alone
            assert [token.id for token in prefill] == [token.id for token in alone]
            scores = [token.logprob for token in alone[1:]]
            assert [token.logprob for token in prefill[1:]] == pytest.approx(scores, abs=tolerance, rel=0)
        assert set(found) == {*company, *asked}

    def test_a_long_prompts_log_probabilities_are_all_there(self, driver: Driver) -> None:
        driver.needs("prompt_logprobs")
        long = "word " * 300  # more than one step computes
        prefill = driver.one(long, prompt_logprobs=True, max_new_tokens=1)[0].prefill
        assert prefill is not None
        assert len(prefill) == len(driver.tokenizer.encode(long).ids)

    def test_a_rule_holds_from_the_thoughts_end(self, driver: Driver) -> None:
        rule = StructuredOutput("regex", "[0-9]{3}")
        free, ruled = driver.batch("Once upon a time", {}, {"structured_output": rule})
        tokens = [token for delta in free for token in delta.tokens]
        thought, mark = text(free)[: len("".join(token.text for token in tokens[:4]))], tokens[3].text
        assert thought.index(mark) == len(thought) - len(mark)
        ends = Thoughts(("<think>",), (mark,), is_open=True)
        never = Thoughts(("<think>",), ("</think>",), is_open=False)
        after, without = driver.batch(
            "Once upon a time", *({"structured_output": rule, "thoughts": one} for one in (ends, never))
        )
        assert re.fullmatch(re.escape(thought) + "[0-9]{3}", text(after))
        assert after[-1].finish is Finish.EOS
        assert ids(without) == ids(ruled)

    def test_beams_come_at_the_end_the_best_first_in_conformance(self, driver: Driver) -> None:
        driver.needs("num_beams")
        deltas = driver.one("The capital of France is", num_beams=3, max_new_tokens=6)
        assert [delta.sequence for delta in deltas] == [0, 1, 2]
        assert all(delta.finish for delta in deltas)
        mean = [sum(t.logprob or 0 for t in delta.tokens) / len(delta.tokens) for delta in deltas]
        assert mean == sorted(mean, reverse=True)

    def test_beams_end_at_the_requests_stop_ids_instead_of_the_models(self, driver: Driver) -> None:
        driver.needs("num_beams")
        wanted: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 6, "length_penalty": 0.0, "early_stopping": True}
        free = driver.one("The capital of France is", ignore_eos=True, **wanted)
        stop = free[0].tokens[2].id
        stopped = driver.one("The capital of France is", ignore_eos=True, stop_token_ids=(stop,), **wanted)
        assert [delta.finish for delta in free] == [Finish.LENGTH] * 3
        assert Finish.STOP in [delta.finish for delta in stopped]
        for delta in stopped:
            places = [at for at, token in enumerate(delta.tokens) if token.id == stop]
            assert places == ([len(delta.tokens) - 1] if delta.finish is Finish.STOP else [])

    def test_greedy_by_temperature_or_nucleus_of_nothing(self, driver: Driver) -> None:
        changes: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_p": 0.0}, {"top_k": 1}]
        greedy, *others = driver.batch("Once upon a time", {}, *({"do_sample": True, **change} for change in changes))
        for change, deltas in zip(changes, others, strict=True):
            assert ids(deltas) == ids(greedy), change

    def test_sampling_parameters_have_an_effect(self, driver: Driver) -> None:
        sampled = {"do_sample": True, "seed": 3, "temperature": 1.5, "max_new_tokens": 20}
        changes: list[dict[str, Any]] = [
            {"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.5}, {"temperature": 0.3}, {"seed": 4},
        ]  # fmt: skip
        plain, *others = driver.batch("Once upon a time", sampled, *({**sampled, **change} for change in changes))
        for change, deltas in zip(changes, others, strict=True):
            assert ids(deltas) != ids(plain), change

    @pytest.mark.parametrize(
        "sampled", [{}, {"do_sample": True, "temperature": 0.1, "seed": 1}], ids=["greedy", "sampled"]
    )
    def test_penalties_have_an_effect(self, driver: Driver, sampled: dict[str, Any]) -> None:
        ask = {"max_new_tokens": 16, "ignore_eos": True, **sampled}
        penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        names = [name for name in penalties if name not in driver.unsupported]
        plain, *others = driver.batch("la la la la la la", ask, *({**ask, name: 2.0} for name in names))
        assert len(set(ids(plain))) < len(ids(plain))
        for name, deltas in zip(names, others, strict=True):
            assert ids(deltas) != ids(plain), name

    def test_what_the_engine_refuses_of_a_scored_prompt_ends_alone(self, driver: Driver) -> None:
        alone = ids(driver.one("Once upon a time"))
        broken = driver.submit("x", prompt_logprobs=True, repetition_penalty=-1.0)
        good = driver.submit("Once upon a time")
        found = driver.run()
        assert isinstance(found[broken][-1].error, GenerationFailed | RefusedByEngine)
        assert ids(found[good]) == alone


SCHEMA = """{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer",
"minimum": 1, "maximum": 120}, "kind": {"enum": ["cat", "dog"]}}, "required": ["name", "age", "kind"],
"additionalProperties": false}"""


def obeys_schema(answer: str) -> bool:
    pet = json.loads(answer)
    return (
        set(pet) == {"name", "age", "kind"}
        and isinstance(pet["name"], str)
        and len(pet["name"]) <= 12
        and 1 <= pet["age"] <= 120
        and pet["kind"] in ("cat", "dog")
    )


GUIDES = {
    "json_schema": (StructuredOutput("json_schema", SCHEMA), obeys_schema),
    "json_object": (StructuredOutput("json_object", ""), lambda answer: isinstance(json.loads(answer), dict)),
    "regex": (
        StructuredOutput("regex", "[a-z]{2,4} [0-9]{3}"),
        lambda answer: re.fullmatch("[a-z]{2,4} [0-9]{3}", answer),
    ),
    "grammar": (
        StructuredOutput("grammar", 'root ::= item (", " item){1,2}\nitem ::= "red" | "blue"'),
        lambda answer: re.fullmatch("(red|blue)(, (red|blue)){1,2}", answer),
    ),
    "choice": (
        StructuredOutput("choice", '["yes", "n\u00f6", "a \\"b\\""]'),
        lambda answer: answer in ("yes", "nö", 'a "b"'),
    ),
}


def _release(package: str) -> tuple[int, ...]:
    return tuple(map(int, metadata.version(package).split(".")[:3]))


@pytest.mark.parametrize("driver", REAL, indirect=True)
class TestGuides:
    @pytest.mark.parametrize("kind", GUIDES)
    @pytest.mark.parametrize("sampled", [{}, {"do_sample": True, "seed": 11}], ids=["greedy", "sampled"])
    def test_an_answer_obeys_its_guide_and_ends_by_itself(
        self, driver: Driver, kind: str, sampled: dict[str, Any]
    ) -> None:
        structured_output, obeys = GUIDES[kind]
        deltas = driver.one(PET, structured_output=structured_output, max_new_tokens=400, **sampled)
        assert deltas[-1].finish is Finish.EOS
        assert obeys(text(deltas)), text(deltas)
        assert all(token.logprob is not None for delta in deltas for token in delta.tokens)

    def test_each_of_a_batch_has_its_own_and_the_others_none(self, driver: Driver) -> None:
        alone = ids(driver.one(driver.prompts[1], max_new_tokens=30, ignore_eos=True))
        free = [driver.submit(driver.prompts[1], max_new_tokens=30, ignore_eos=True) for _ in range(3)]
        guided = {
            driver.submit(PET, structured_output=structured_output, max_new_tokens=400): obeys
            for structured_output, obeys in GUIDES.values()
        }
        found = driver.run()
        assert [ids(found[id]) for id in free] == [alone] * 3
        assert all(obeys(text(found[id])) for id, obeys in guided.items())

    def test_several_samples_obey_the_same_guide(self, driver: Driver) -> None:
        structured_output, obeys = GUIDES["regex"]
        deltas = driver.one(
            PET, structured_output=structured_output, n=3, best_of=3, do_sample=True, seed=1, max_new_tokens=60
        )
        texts = ["".join(text([delta]) for delta in deltas if delta.sequence == number) for number in range(3)]
        assert all(map(obeys, texts)), texts

    def test_what_is_cancelled_under_a_guide_leaves_nothing_behind(self, driver: Driver) -> None:
        structured_output, obeys = GUIDES["json_schema"]
        gone = [driver.submit(PET, structured_output=structured_output, max_new_tokens=400) for _ in range(2)]
        driver.batcher.cancel(gone[0])  # before a step
        driver.batcher.step(timeout=0.5)
        driver.batcher.step(timeout=0.5)
        driver.batcher.cancel(gone[1])
        kept = driver.submit(PET, structured_output=structured_output, max_new_tokens=400)
        found = driver.run()
        assert set(found) == {kept}
        assert obeys(text(found[kept]))

    def test_a_stop_token_ends_a_guided_answer(self, driver: Driver) -> None:
        structured_output, _ = GUIDES["json_schema"]
        whole = ids(driver.one(PET, structured_output=structured_output, max_new_tokens=400))
        deltas = driver.one(PET, structured_output=structured_output, max_new_tokens=400, stop_token_ids=(whole[3],))
        if driver.name in ("vllm", "grpc") and _release("xgrammar") >= (0, 2, 8):
            assert whole[3] not in ids(deltas)  # it keeps end tokens for the end: the answer takes another way
            return
        assert ids(deltas) == whole[: whole.index(whole[3]) + 1]
        assert deltas[-1].finish is Finish.STOP

    @pytest.mark.parametrize(
        "structured_output",
        [StructuredOutput("regex", "(?=a)b"), StructuredOutput("grammar", "root ::= missing")],
        ids=str,
    )
    def test_a_guide_that_cannot_be_followed_ends_alone(
        self, driver: Driver, structured_output: StructuredOutput
    ) -> None:
        alone = ids(driver.one(driver.prompts[0]))
        broken = driver.submit(PET, structured_output=structured_output)
        good = driver.submit(driver.prompts[0])
        found = driver.run()
        assert isinstance(found[broken][-1].error, GenerationFailed | RefusedByEngine)
        assert ids(found[good]) == alone


@pytest.mark.parametrize("driver", [OPENVINO], indirect=True)
def test_length_penalty_and_early_stopping_reach_the_beam_search(driver: Driver) -> None:
    """On vLLM tests/gpu/vllm/test_engine.py compares both with transformers."""
    search: dict[str, Any] = {"num_beams": 4, "max_new_tokens": 40, "length_penalty": 5.0}
    searches = {**search, "length_penalty": -5.0}, search, {**search, "early_stopping": True}
    short, long, early = (text(found[:1]) for found in driver.batch(CHAT, *searches))
    assert len(short) < len(long)
    assert early != long


@pytest.mark.parametrize("driver", [OPENVINO], indirect=True)
def test_penalties_of_a_beam_search_are_refused_by_name(driver: Driver) -> None:
    for penalty in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        [delta] = driver.one(CHAT, num_beams=2, max_new_tokens=4, **{penalty: 1.5})
        assert isinstance(delta.error, RefusedByEngine)
        assert "cannot be combined with num_beams > 1" in str(delta.error)
        assert penalty in str(delta.error)


@pytest.mark.parametrize("driver", [OPENVINO], indirect=True)
def test_a_prompt_that_the_tokenizer_would_cut_is_refused(driver: Driver) -> None:
    with pytest.raises(PromptTooLong, match=r"at least \d+ tokens; the model accepts at most 8191"):
        driver.tokenizer.encode("word " * 9000)


# -- what only a server can show ---------------------------------------------------------------------------------


ASKED: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.2},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": -0.5},
    "ignore_eos": {"ignore_eos": True},
    "stop_token_ids": {"stop_token_ids": (4,)},
    "max_new_tokens": {"max_new_tokens": 1},
    "min_new_tokens": {"min_new_tokens": 2},
    "do_sample": {"do_sample": True},
    "temperature": {"do_sample": True, "temperature": 0.5},
    "top_k": {"do_sample": True, "top_k": 3},
    "top_p": {"do_sample": True, "top_p": 0.0},
    "min_p": {"do_sample": True, "min_p": 0.1},
    "seed": {"do_sample": True, "seed": 2**64 - 1},
    "logprobs": {"logprobs": False},
    "top_logprobs": {"top_logprobs": 19},
    "prompt_logprobs": {"prompt_logprobs": True},
    "prompt_top_logprobs": {"prompt_logprobs": True, "prompt_top_logprobs": 19},
    "logit_bias": {"logit_bias": ((4, 5.0),)},
    "structured_output": {"structured_output": StructuredOutput("regex", "[0-9]{1,3}")},
}


@pytest.mark.parametrize("driver", [GRPC], indirect=True)
class TestServer:
    def test_greedy_tokens_and_scores_are_those_of_the_engine_in_process(self, driver: Driver, vllm: Driver) -> None:
        for there, here in zip(*(asked(one) for one in (driver, vllm)), strict=True):
            assert ids(there) == ids(here)
            scores = [[token.logprob for delta in deltas for token in delta.tokens] for deltas in (there, here)]
            assert scores[0] == pytest.approx(scores[1], abs=1e-3)

    def test_every_parameter_of_the_contract_is_taken(self, driver: Driver) -> None:
        assert set(ASKED) == VllmContract.supports
        answers = driver.batch(driver.prompts[0], *({"max_new_tokens": 3, **more} for more in ASKED.values()))
        for name, deltas in zip(ASKED, answers, strict=True):
            assert deltas[-1].finish in (Finish.LENGTH, Finish.EOS, Finish.STOP), (name, deltas[-1].error)


def asked(driver: Driver) -> list[list[Delta]]:
    started = [driver.submit(prompt, top_logprobs=2) for prompt in PROSE]
    found = driver.run()
    return [found[id] for id in started]
