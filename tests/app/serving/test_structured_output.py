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
from handler.config.loader import load_config
from handler.core.errors import InvalidParameter
from handler.engines.base import Capabilities, EngineConfig, EngineInfo
from handler.engines.echo import EchoTokenizer
from handler.engines.process.engine_loop import Spec
from handler.engines.structured_output.validator import StructuredOutputValidator
from handler.plugins.loading import Formatters
from handler.protocols.base import ServerContext
from handler.protocols.registry import SCHEMAS
from handler.scheduler.batcher import Batcher
from handler.scheduler.lora.registry import AdapterHome, AdapterRegistry
from handler.serving.launch import engine_spec, load_tokenizer, make_validator, start_engine
from handler.serving.model import loaded_model
from handler.serving.preprocess import Intake
from handler.serving.request_task import Exchange
from handler.serving.service import Service
from handler.serving.slots import Item
from handler.serving.steps import StepDriver
from tests.unit.engines import fake_guides
from tests.unit.scheduler.test_batcher import Scripted

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


def steps(checks: StructuredOutputValidator, schema: str = "lmi") -> StepDriver:
    context = ServerContext(engine="scripted")
    intake = Intake(SCHEMAS[schema], context, EchoTokenizer(), lambda: INFO, guides=checks)
    return StepDriver(Batcher(Scripted()), intake)


@pytest.mark.parametrize("words", [1, 4000], ids=["short", "long"])
def test_step_by_step_a_neighbour_does_not_wait(checks: StructuredOutputValidator, words: int) -> None:
    driver = steps(checks)
    guided, plain = driver.open_all([item("a " * words, f"sleep 0.6{words}"), item("a b")])
    began = time.monotonic()
    while not plain.finished:
        driver.step(0.05)
    assert time.monotonic() - began < 0.5
    assert not guided.finished
    while not guided.finished:
        driver.step(0.05)
    assert guided.status == 200


def test_step_by_step_a_bad_guide_is_refused_by_its_name(checks: StructuredOutputValidator) -> None:
    (place,) = steps(checks).run([item("a", "wrong it has no end")], 20)
    answer = json.loads(place.take())
    assert place.status == 424
    assert answer["error"] == "parameters.guided_regex: the engine cannot follow it: it has no end"


def test_a_request_that_is_wrong_anyway_costs_no_trial(checks: StructuredOutputValidator) -> None:
    (place,) = steps(checks).run([item(" ", "sleep 0.55")], 0.5)
    assert place.status == 424
    assert "no tokens" in json.loads(place.take())["error"]


def test_what_a_client_calls_it_is_what_its_refusal_says(checks: StructuredOutputValidator) -> None:
    driver = steps(checks)
    grammar = {"grammar": {"type": "regex", "value": "wrong so"}}
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": {"wrong": 1}}}  # type: ignore[assignment]
    places = driver.run([item("a", None, **grammar), Item(json.dumps(chat).encode(), {})], 20)
    assert json.loads(places[0].take())["error"].startswith("parameters.grammar: ")
    assert places[1].status == 200, "the schema itself is no cue"


# -- with an event loop --------------------------------------------------------------------------------------------


async def answered(exchange: Exchange) -> tuple[int, Any]:
    await exchange.begun
    assert exchange.answer is not None
    return exchange.answer.status, json.loads(exchange.answer.body)


def run(checks: StructuredOutputValidator | None, story: Any, *options: str) -> None:
    """With `checks`, echo takes guides, as if it followed them."""

    async def all() -> None:
        config = load_config(overrides=["option.llm_engine=echo", *options], environ={})
        spec = engine_spec(config)
        adapters = AdapterHome(AdapterRegistry())
        loaded = loaded_model(config, spec, start_engine(config, spec), load_tokenizer(spec), Formatters(), adapters)
        assert loaded.guides is None, "echo has no guides"
        if checks is not None:
            loaded = loaded._replace(guides=checks, context=replace(loaded.context, unsupported={}))
        service = Service(loaded)
        service.start()
        await service.opened
        await story(service)
        service._engine.close()

    asyncio.run(all())


def test_many_bad_guides_keep_no_neighbour_waiting(checks: StructuredOutputValidator) -> None:
    async def story(service: Service) -> None:
        async def ask(request: Item) -> tuple[int, Any]:
            return await answered(service.exchange(await service.read(request.body, {}), "id"))

        bad = [asyncio.ensure_future(ask(item("a b", f"sleep 0.7{n}"))) for n in range(6)]
        await asyncio.sleep(0.05)
        began = time.monotonic()
        for n in range(10):
            status, answer = await ask(item(f"a{n} b"))
            assert (status, answer["generated_text"]) == (200, f" a{n} b a{n}")
        assert time.monotonic() - began < 0.6
        assert not any(task.done() for task in bad)
        assert [status for status, _ in await asyncio.gather(*bad)] == [200] * 6
        status, answer = await ask(item("a b", "wrong it has no end"))
        assert (status, "parameters.guided_regex: the engine cannot" in answer["error"]) == (424, True)

    run(checks, story)


def test_a_client_that_leaves_takes_no_other_ones_trial_along(checks: StructuredOutputValidator) -> None:
    async def story(service: Service) -> None:
        request = item("a b", "sleep 0.45")
        first, second = [service.exchange(await service.read(request.body, {}), "id") for _ in range(2)]
        await asyncio.sleep(0.1)
        first.cancel()
        assert (await answered(second))[0] == 200
        assert service._batcher.num_active == 0

    run(checks, story)


class Pace:
    """When the parts of a stream came."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.ended = asyncio.Event()

    def write(self, data: bytes, *, last: bool = False) -> None:
        self.times.append(time.monotonic())
        if last:
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

    async def story(service: Service) -> None:
        body = item("a b", max_new_tokens=60).body.replace(b'"inputs"', b'"stream": true, "inputs"')
        stream, pace = service.exchange(await service.read(body, {}), "id"), Pace()
        await stream.begun
        stream.stream_to(pace)
        if tried:
            status, _ = await answered(service.exchange(await service.read(hostile.body, {}), "id"))
            assert status == 200, "to try it is the double's business"
        else:
            with pytest.raises(InvalidParameter, match="the engine echo lacks it"):
                await service.read(hostile.body, {})
        await pace.ended.wait()
        assert len(pace.times) >= 30
        assert pace.longest_gap < 1.0

    run(checks if tried else None, story, "option.echo_tokens_per_second=50")


def test_only_engines_that_a_guide_can_harm_have_theirs_tried() -> None:
    config = load_config(overrides=["option.llm_engine=echo"], environ={})
    assert make_validator(engine_spec(config)) is None


@pytest.mark.parametrize("engine", ["openvino", "vllm", "trtllm"])
def test_how_long_a_guide_may_take_is_an_option_of_all_that_try_them(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # installed or not
    monkeypatch.setattr(engines, "capabilities", lambda name, config: Capabilities())

    def checked(**more: str) -> StructuredOutputValidator | None:
        given = [f"option.{name}={value}" for name, value in more.items()]
        config = load_config(overrides=[f"option.llm_engine={engine}", *given], environ={})
        return make_validator(Spec(engine, EngineConfig(options=config.engine_options)))

    for given, wanted in (({}, 5.0), ({"guide_timeout": "2"}, 2.0)):
        found = checked(**given)
        assert found is not None
        assert found.seconds == wanted
    assert checked(guide_timeout="0") is None
