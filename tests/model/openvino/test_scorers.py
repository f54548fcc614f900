"""The scores of prompts: by OpenVINO from logits, and by GenAI for GGUF files that only it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import openvino
import pytest

from handler.config.config import Config
from handler.core.values import Pooling, Sampling
from handler.engines.base import EngineConfig, EngineRequest, score
from handler.engines.openvino.engine import capabilities, make_pipeline, make_scorer, prepare
from handler.engines.openvino.logits import ROWS, PrefixStates, select_rows
from handler.engines.openvino.scorers import (
    NO_TOPS,
    LogitScorer,
    PipelineScorer,
    Scores,
)

pytestmark = pytest.mark.model

IDS = [504, 3575, 282, 4649, 314, 7042]  # The capital of France is Paris
LONG = [(7 * at) % 1000 + 300 for at in range(290)]  # more than one step reads


@pytest.fixture(scope="module")
def config(demo_model: Path) -> EngineConfig:
    return EngineConfig(Config(dtype="fp32"), model=prepare(str(demo_model), EngineConfig(Config(dtype="fp32"))))


@pytest.fixture(scope="module")
def scorer(config: EngineConfig) -> Any:
    found = make_scorer(config)
    assert isinstance(found, LogitScorer)
    found.check(3)
    return found


def prompt(key: int, ids: list[int], num_tops: int) -> EngineRequest:
    return EngineRequest(key, ids, Sampling(prompt_logprobs=True, prompt_top_logprobs=num_tops))


def run(scorer: Any, *jobs: tuple[int, list[int], int]) -> list[Scores]:
    for job in jobs:
        scorer.add(prompt(*job))
    found: list[Scores] = []
    while len(found) < len(jobs):
        if (scores := scorer.step(idle=True)) is not None:
            found.append(scores)
    return found


def test_scores_from_logits() -> None:
    rows = numpy.log(numpy.array([[0.5, 0.25, 0.25], [0.125, 0.125, 0.75]], dtype=numpy.float32)) + 7
    chosen, tops = score(rows, [1, 2], 2)
    assert chosen == pytest.approx(numpy.log([0.25, 0.75]), abs=1e-6)
    assert [[id for id, _ in top] for top in tops] == [[0, tops[0][1][0]], [2, tops[1][1][0]]]
    assert [value for top in tops for _, value in top] == pytest.approx(numpy.log([0.5, 0.25, 0.75, 0.125]), abs=1e-6)
    assert tops[1][0][1] == chosen[1]  # the same number: clients compare them
    assert score(rows, [1, 2], 0)[1] == [(), ()]
    assert len(score(rows, [1, 2], 9)[1][0]) == 3
    assert score(rows[:0], [], 2) == ([], [])


def test_the_prompts_scores_and_what_was_likelier(scorer: LogitScorer) -> None:
    (found,) = run(scorer, (1, IDS, 3))
    assert found.logprobs[0] is None
    assert found.logprobs[1:] == pytest.approx([-11.54, -0.34, -2.44, -0.45, -0.26], abs=0.01)
    assert found.tops is not None
    assert found.tops[0] == ()
    for logprob, top, id in zip(found.logprobs[1:], found.tops[1:], IDS[1:], strict=True):
        values = [value for _, value in top]
        assert values == sorted(values, reverse=True)
        assert dict(top).get(id, logprob) == logprob
    assert found.tops[5][0][0] == IDS[5]
    assert found.tops[1][0][1] > found.logprobs[1]  # type: ignore[operator]
    assert run(scorer, (2, IDS, 0)) == [Scores(2, found.logprobs)]


def test_a_long_prompt_is_read_in_parts_like_a_short_one(scorer: LogitScorer) -> None:
    one, two, three = run(scorer, (1, LONG, 1), (2, IDS, 0), (3, IDS[:1], 1))
    assert (one.key, two.key, three.key) == (1, 2, 3)
    assert len(one.logprobs) == len(one.tops or ()) == 290
    assert two.logprobs == run(scorer, (4, IDS, 0))[0].logprobs
    assert three == Scores(3, [None], [()])
    (short,) = run(scorer, (5, LONG[:150], 1))
    assert one.logprobs[1:150] == pytest.approx(short.logprobs[1:], abs=1e-3)


def test_a_cancelled_prompt_leaves_nothing_behind(scorer: LogitScorer) -> None:
    scorer.add(prompt(1, LONG, 1))
    scorer.add(prompt(2, LONG, 1))
    assert scorer.step(idle=True) is None
    scorer.cancel(1)
    scorer.cancel(2)
    assert run(scorer, (3, IDS, 1))[0].key == 3
    assert scorer.step(idle=True) is None


def test_a_gguf_file_as_it_is_has_scores_alone(demo_model: Path, scorer: LogitScorer, config: EngineConfig) -> None:
    """A pipeline of GenAI's; on the same files both say the same."""
    file = EngineConfig(model=demo_model)
    assert capabilities(file).unsupported["prompt_top_logprobs"] == NO_TOPS
    assert "prompt_top_logprobs" not in capabilities(config).unsupported
    found = make_scorer(file)
    assert isinstance(found, PipelineScorer)
    with pytest.raises(ValueError, match="no alternatives"):
        found.check(1)
    genai = PipelineScorer(lambda: make_pipeline(config))
    genai.check(0)
    ours = run(scorer, (1, LONG[:40], 0))[0].logprobs
    (theirs,) = run(genai, (1, LONG[:40], 0))
    assert theirs.logprobs[0] is None
    assert theirs.logprobs[1:] == pytest.approx(ours[1:], abs=2e-3)


# -- log-probabilities of labels ---------------------------------------------------------------------------------------

STATE, QUESTIONS = LONG[:270], ([7, 11, 13], [7, 12], [29, 31, 37, 41])
LABELS = (330, 331, 332)


def labels(key: int, ids: list[int], num_shared: int, salt: str = "") -> EngineRequest:
    pooling = Pooling("labels", labels=("A", "B", "C"), label_ids=LABELS, num_shared=num_shared, cache_salt=salt)
    return EngineRequest(key, ids, pooling)


def read(scorer: Any, *requests: EngineRequest) -> dict[int, list[float]]:
    for request in requests:
        scorer.add(request)
    results: dict[int, list[float]] = {}
    while len(results) < len(requests):
        if (scores := scorer.step(idle=True)) is not None:
            assert scores.error == ""
            results[scores.key] = [*scores.logprobs]
    assert results.keys() == {request.key for request in requests}
    return results


def test_labels_have_the_log_probabilities_of_the_next_token(scorer: LogitScorer) -> None:
    """The same numbers come from prompts that end with a label, whose last token is scored."""
    numbers = read(scorer, labels(1, STATE + QUESTIONS[0], len(STATE)))[1]
    prompts = [(10 + index, [*STATE, *QUESTIONS[0], id], 1) for index, id in enumerate(LABELS)]
    scored = run(scorer, *prompts)
    assert numbers[:3] == pytest.approx([scores.logprobs[-1] for scores in scored], abs=1e-3)
    best = scored[0].tops[-1][0][1] if scored[0].tops else None
    assert numbers[3] == pytest.approx(best, abs=1e-3)


def test_a_question_has_the_same_numbers_alone_and_among_others(config: EngineConfig, scorer: LogitScorer) -> None:
    """Each scorer computes the state by itself: no other test gives the first one this salt."""
    salt = "alone and among others"
    requests = [labels(key, STATE + tail, len(STATE), salt) for key, tail in enumerate(QUESTIONS)]
    together, alone = make_scorer(config), scorer
    together.check(0)
    among = read(together, *requests, labels(3, STATE[:40] + QUESTIONS[0], 40), requests[1]._replace(key=4))
    for request in reversed(requests):
        assert read(alone, request._replace(key=9))[9] == among[request.key]
        assert read(alone, labels(8, IDS, 2)).keys() == {8}
    assert among[4] == among[1]


def test_neither_a_stored_prefix_nor_its_length_changes_the_numbers(demo_model: Path) -> None:
    """By default OpenVINO quantizes the KV cache that it manages itself, which moved numbers by 0.07."""
    scorer = make_scorer(EngineConfig(model=prepare(str(demo_model), EngineConfig())))
    scorer.check(0)
    requests = [labels(key, STATE + tail, len(STATE)) for key, tail in enumerate(QUESTIONS)]
    first, again = (read(scorer, *requests) for _ in range(2))
    assert first == again
    (whole,) = read(scorer, labels(9, STATE + QUESTIONS[0], 0)).values()
    assert whole == pytest.approx(first[0], abs=1e-3)


def test_a_shared_prefix_is_computed_once_for_each_salt(config: EngineConfig) -> None:
    scorer = make_scorer(config)
    scorer.check(0)

    read(scorer, labels(9, IDS, 0))  # loads the model

    def num_steps(request: EngineRequest) -> int:
        scorer.add(request)
        return next(number for number in range(1, 20) if scorer.step(idle=True) is not None)

    first, second = (labels(key, STATE + tail, len(STATE)) for key, tail in enumerate(QUESTIONS[:2]))
    assert num_steps(first) == 3  # two for the prefix of 270 tokens, and one for the question
    assert num_steps(second) == 1
    assert num_steps(first._replace(key=5, parameters=first.pooling._replace(cache_salt="other"))) == 3


def test_questions_about_different_states_take_turns(scorer: LogitScorer) -> None:
    many = [labels(key, [*STATE, *tail, key], len(STATE)) for key, tail in enumerate(QUESTIONS)]
    other = [labels(key, [*IDS, key], len(IDS)) for key in (10, 11)]
    read(scorer, many[0])  # stores the state: computing it lengthens its turn
    assert [*read(scorer, *many, *other, labels(20, IDS, 0))] == [0, 10, 20, 1, 11, 2]


def states(num_bytes: int) -> dict[str, Any]:
    return {"past.0": openvino.Tensor(numpy.zeros(num_bytes, numpy.uint8))}


def test_the_prefixes_used_last_are_kept() -> None:
    prefixes = PrefixStates()
    stored = [states(1 << 26) for _ in range(5)]
    for id in range(4):
        prefixes.put(("", id), stored[id])
    assert prefixes.get(("", 0)) is stored[0]
    prefixes.put(("", 4), stored[4])
    assert [prefixes.get(("", id)) for id in range(5)] == [stored[0], None, *stored[2:]]
    large = states(1 << 29)
    prefixes.put(("", 5), large)
    assert prefixes.get(("", 5)) is large
    assert [prefixes.get(("", id)) for id in range(5)] == [None] * 5


class FailingScorer(PipelineScorer):
    """A scorer whose model cannot be loaded the first time."""

    def __init__(self) -> None:
        super().__init__(self.make)
        self.num_loads = 0

    def make(self) -> Any:
        self.num_loads += 1
        if self.num_loads == 1:
            raise RuntimeError("no memory")
        return NoPipeline()


class NoPipeline:
    """A pipeline that fails, but not while it is loaded."""


def ended(scorer: PipelineScorer | LogitScorer) -> Scores:
    while (scores := scorer.step(idle=True)) is None:
        pass
    return scores


def test_a_model_that_cannot_be_loaded_fails_only_its_own_requests(tmp_path: Path) -> None:
    scorer = LogitScorer(tmp_path, {})
    scorer.add(labels(1, IDS, 2))
    scores = ended(scorer)
    assert scores.key == 1
    assert "the second copy of the model cannot be loaded" in scores.error


def test_a_failed_load_ends_all_requests_that_wait_for_it_and_is_tried_again_later() -> None:
    scorer = FailingScorer()
    for key in (1, 2, 3):
        scorer.add(labels(key, IDS, 0))
    scorer.cancel(2)
    for scores in (ended(scorer), ended(scorer)):
        assert "no memory" in scores.error
    assert scorer.step(idle=True) is None
    assert scorer.num_loads == 1
    scorer.add(labels(4, IDS, 0))
    with pytest.raises(AttributeError, match="NoPipeline"):
        ended(scorer)
    assert scorer.num_loads == 2


def test_labels_of_a_file_that_only_genai_reads(config: EngineConfig, scorer: LogitScorer) -> None:
    genai = PipelineScorer(lambda: make_pipeline(config))
    request = labels(1, STATE[:40] + QUESTIONS[0], 40)
    assert read(genai, request)[1] == pytest.approx(read(scorer, request)[1], abs=2e-3)


def test_a_cancelled_request_for_labels_leaves_nothing_behind(scorer: LogitScorer) -> None:
    scorer.add(labels(1, [*reversed(STATE)], 269))
    assert scorer.step(idle=True) is None
    scorer.cancel(1)
    assert read(scorer, labels(2, IDS, 3)).keys() == {2}
    assert scorer.step(idle=True) is None


@pytest.mark.parametrize(("operations", "has_rows"), [(["tanh", "convert"], True), (["softmax"], False)])
def test_rows_are_selected_before_the_last_multiplication(operations: list[str], has_rows: bool) -> None:
    from openvino import opset13

    hidden = opset13.parameter([1, -1, 4], numpy.float32, name="input_ids")
    hidden.output(0).set_names({"input_ids"})
    node = opset13.matmul(hidden, opset13.constant(numpy.eye(4, dtype=numpy.float32)), False, True)
    for operation in operations:
        arguments: tuple[Any, ...] = {"tanh": (), "convert": ("f32",), "softmax": (2,)}[operation]
        node = getattr(opset13, operation)(node, *arguments)
    node.output(0).set_names({"logits"})
    model = openvino.Model([opset13.result(node)], [hidden])
    select_rows(model)
    assert (ROWS in {port.any_name for port in model.inputs}) is has_rows
    exact = {"INFERENCE_PRECISION_HINT": "f32"}  # where a CPU computes with bf16 by default
    request = openvino.Core().compile_model(model, "CPU", exact).create_infer_request()
    values = numpy.arange(12, dtype=numpy.float32).reshape(1, 3, 4) / 12
    request.infer({"input_ids": values, **({ROWS: numpy.array([2, 0])} if has_rows else {})})
    logits = request.get_tensor("logits").data[0]
    assert logits.shape == ((2, 4) if has_rows else (3, 4))
    if has_rows:
        assert logits == pytest.approx(numpy.tanh(values[0, [2, 0]]), abs=1e-5)


def test_a_model_with_inputs_of_another_kind_is_refused(tmp_path: Path) -> None:
    from openvino import opset13

    image = opset13.parameter([-1, 4], numpy.float32, name="pixel_values")
    image.output(0).set_names({"pixel_values"})
    result = opset13.result(opset13.relu(image))
    openvino.save_model(openvino.Model([result], [image], "m"), tmp_path / "openvino_model.xml")
    with pytest.raises(ValueError, match="the model has unknown inputs: pixel_values"):
        LogitScorer(tmp_path, {}).check(0)
