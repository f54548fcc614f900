"""A guide is tried before its request goes to the engine; others go on meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from handler import engines
from handler.config.loader import read_config
from handler.djl.batches import Item, start_items
from handler.engines.base import Capabilities, EngineConfig, EngineInfo
from handler.engines.process.engine_process import Spec
from handler.engines.structured_output.validator import StructuredOutputValidator
from handler.plugins.functions import Formatters
from handler.serving import start as loading
from handler.serving.engine import engine_spec
from handler.serving.model import ServedModel
from handler.serving.request.task import RequestTask
from handler.serving.start import load_model, make_validator, server_context
from tests.services import begin
from tests.stepped import Bench, benches
from tests.unit.engines import fake_guides

__all__ = ["benches"]

INFO = EngineInfo("scripted", "1", "none", "none", 100_000)


@pytest.fixture(scope="module")
def checks() -> Iterator[StructuredOutputValidator]:
    found = StructuredOutputValidator(fake_guides.make, seconds=1.0)
    found.start()
    yield found
    found.close()


def item(text: str, structured_output: str | None = None, **parameters: Any) -> Item:
    guided = {} if structured_output is None else {"guided_regex": structured_output}
    body = {"inputs": text, "parameters": {"max_new_tokens": 3, **guided, **parameters}}
    return Item(json.dumps(body).encode(), {})


def bench(checks: StructuredOutputValidator) -> Bench:
    return Bench(info=INFO, validator=checks)


@pytest.mark.parametrize("words", [1, 4000], ids=["short", "long"])
def test_step_by_step_a_neighbour_does_not_wait(checks: StructuredOutputValidator, words: int) -> None:
    found = bench(checks)
    items = [item("a " * words, f"sleep 1.{words}"), item("a b")]
    guided, plain = start_items(found.model, items, found.loop.stop)
    assert found.loop.wait_until(lambda: plain.finished, 20)
    assert not guided.finished
    assert found.loop.wait_until(lambda: guided.finished, 20)
    assert guided.status == 200


def test_step_by_step_a_bad_guide_is_refused_by_its_name(checks: StructuredOutputValidator) -> None:
    (task,) = bench(checks).dynamic(20).run([item("a", "wrong it has no end")])
    assert task.status == 424
    answer = json.loads(task.take())
    assert answer["error"] == "parameters.guided_regex: the engine cannot apply it: it has no end"


def test_a_request_that_is_wrong_anyway_costs_no_trial(checks: StructuredOutputValidator) -> None:
    (task,) = bench(checks).dynamic(0.5).run([item(" ", "sleep 0.55")])
    assert task.status == 424
    assert "no tokens" in json.loads(task.take())["error"]


def test_what_a_client_calls_it_is_what_its_refusal_says(checks: StructuredOutputValidator) -> None:
    grammar = {"grammar": {"type": "regex", "value": "wrong so"}}
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": {"wrong": 1}}}  # type: ignore[assignment]
    tasks = bench(checks).dynamic(20).run([item("a", None, **grammar), Item(json.dumps(chat).encode(), {})])
    assert json.loads(tasks[0].take())["error"].startswith("parameters.grammar: ")
    assert tasks[1].status == 200, "the schema itself is no cue"


# -- with an event loop --------------------------------------------------------------------------------------------


async def answered(model: ServedModel, body: bytes) -> tuple[int, Any]:
    task, begun = begin(model, body)
    await begun
    answer = task.take_whole()
    return answer.status, json.loads(answer.body)


def run(checks: StructuredOutputValidator | None, story: Any, *options: str) -> None:
    """With `checks`, echo takes guides, as if it followed them."""

    async def all() -> None:
        config = read_config(overrides=["option.llm_engine=echo", *options], environ={}).checked()
        with pytest.MonkeyPatch.context() as patch:
            if checks is None:
                assert make_validator(engine_spec(config)) is None, "echo has no structured output"
            else:
                context = server_context
                patch.setattr(loading, "make_validator", lambda spec, engine: checks)
                patch.setattr(loading, "server_context", lambda *given: replace(context(*given), unsupported={}))
            model = await load_model(config, Formatters())
        model.start()
        await model.availability.opened
        await story(model)
        model.availability.engine.close()

    asyncio.run(all())


def test_many_bad_guides_keep_no_neighbour_waiting(checks: StructuredOutputValidator) -> None:
    async def story(model: ServedModel) -> None:
        guides = [f"sleep {seconds}" for seconds in (2.5, 2.51, 0.1, 0.11, 0.12, 0.13)]  # two at a time
        bad = [asyncio.ensure_future(answered(model, item("a b", guide).body)) for guide in guides]
        await asyncio.sleep(0.05)
        for n in range(10):
            status, answer = await answered(model, item(f"a{n} b").body)
            assert (status, answer["generated_text"]) == (200, f" a{n} b a{n}")
        assert not any(task.done() for task in bad)
        assert [status for status, _ in await asyncio.gather(*bad)] == [200] * 6
        status, answer = await answered(model, item("a b", "wrong it has no end").body)
        assert (status, "parameters.guided_regex: the engine cannot" in answer["error"]) == (424, True)

    run(checks, story)


def test_a_client_that_leaves_takes_no_other_ones_trial_along(checks: StructuredOutputValidator) -> None:
    async def story(model: ServedModel) -> None:
        body = item("a b", "sleep 0.45").body
        (first, _), (second, begun) = begin(model, body), begin(model, body)
        await asyncio.sleep(0.1)
        first.close()
        await begun
        assert second.status == 200
        assert model.driver.batcher.num_active == 0

    run(checks, story)


class Pace:
    """When the parts of a stream came, by the CPU time of this process: another one's is nobody's fault."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.ended = asyncio.Event()

    def pull(self, task: RequestTask) -> None:
        task.take()
        self.times.append(time.process_time())
        if task.finished:
            self.ended.set()

    @property
    def longest_gap(self) -> float:
        return max(after - before for before, after in itertools.pairwise(self.times))


@pytest.mark.parametrize("tried", [False, True], ids=["echo", "an engine with guides"])
def test_an_expression_that_takes_long_to_compile_stops_no_stream(
    checks: StructuredOutputValidator, tried: bool
) -> None:
    """Python's own compiler needs seconds for it, in which no other thread runs."""
    hostile = item("a b", "(?i)" + "[a-\U0010ffff]" * 800)

    async def story(model: ServedModel) -> None:
        body = item("a b", max_new_tokens=60).body.replace(b'"inputs"', b'"stream": true, "inputs"')
        (stream, begun), pace = begin(model, body), Pace()
        await begun
        stream.on_bytes = pace.pull
        status, answer = await answered(model, hostile.body)
        if tried:
            assert status == 200, "to try it is the double's business"
        else:
            assert (status, "the engine echo does not support it" in answer["error"]) == (424, True)
        await pace.ended.wait()
        assert len(pace.times) >= 30
        assert pace.longest_gap < 1.0

    run(checks if tried else None, story, "option.echo_tokens_per_second=50")


def test_only_engines_that_a_guide_can_harm_have_theirs_tried() -> None:
    config = read_config(overrides=["option.llm_engine=echo"], environ={}).checked()
    assert make_validator(engine_spec(config)) is None


@pytest.mark.parametrize("engine", ["openvino", "vllm", "trtllm"])
def test_how_long_a_guide_may_take_is_an_option_of_all_that_try_them(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # installed or not
    monkeypatch.setattr(engines, "capabilities", lambda name, config: Capabilities({"structured_output"}))

    def checked(**more: str) -> StructuredOutputValidator | None:
        given = [f"option.{name}={value}" for name, value in more.items()]
        config = read_config(overrides=[f"option.llm_engine={engine}", *given], environ={}).checked()
        return make_validator(Spec(engine, EngineConfig(config)))

    for given, wanted in (({}, 5.0), ({"guide_timeout": "2"}, 2.0)):
        found = checked(**given)
        assert found is not None
        assert found.seconds == wanted
    assert checked(guide_timeout="0") is None
