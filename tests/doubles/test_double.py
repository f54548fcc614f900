"""The double of TensorRT-LLM: what it takes and refuses, and how requests to it end, fail and stop."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import time
from pathlib import Path
from typing import Any

import pydantic
import pytest

from tests.doubles import using
from tests.doubles.using import PROMPT, Double

# -- the double against the API's list of names; what it takes and refuses ---------------------------------------------


API = json.loads((Path(__file__).parent / "trtllm_api.json").read_text())


# -- names


def test_names_of_classes() -> None:
    with using.tensorrt_llm():
        from tensorrt_llm import executor, llmapi, lora_helper

        classes = {
            "SamplingParams": llmapi.SamplingParams,
            "GuidedDecodingParams": llmapi.GuidedDecodingParams,
            "CompletionOutput": executor.CompletionOutput,
            "Logprob": executor.Logprob,
            "LoRARequest": executor.LoRARequest,
            "LoraConfig": lora_helper.LoraConfig,
        }
        for name, kind in classes.items():
            found = {one.name: one for one in dataclasses.fields(kind) if one.init}
            assert list(found) == [one["name"] for one in API[name]["params"]], name
            for one in API[name]["params"]:
                wanted = one.get("default")
                if isinstance(wanted, list | dict):
                    assert found[one["name"]].default_factory is type(wanted)
                elif wanted != "<required>":
                    assert found[one["name"]].default == wanted, (name, one["name"])
        for name in ("KvCacheConfig", "SchedulerConfig", "CudaGraphConfig", "PeftCacheConfig"):
            model = getattr(llmapi, name)
            assert {key: field.default for key, field in model.model_fields.items()} == {
                one["name"]: one["default"] for one in API[name]["params"]
            }
            with pytest.raises(pydantic.ValidationError):
                model(no_such_thing=1)


@pytest.mark.parametrize(
    ("version", "has", "lacks"),
    [
        ("1.0.0", ["enable_trtllm_sampler", "moe_cluster_parallel_size"], ["sampler_type", "env_overrides"]),
        ("1.1.0", ["sampler_type", "return_perf_metrics"], ["enable_trtllm_sampler", "orchestrator_type"]),
        ("1.2.1", ["sampler_type", "orchestrator_type"], ["telemetry_config", "sleep_config"]),
        ("1.3.0rc29", ["telemetry_config", "sleep_config"], ["sampler_type", "moe_cluster_parallel_size"]),
    ],
)
def test_llm_has_the_arguments_of_its_version(model: Path, version: str, has: list[str], lacks: list[str]) -> None:
    with using.tensorrt_llm(f"version={version}"):
        import tensorrt_llm
        from tensorrt_llm.llm_args import checked

        assert set(has) <= set(type(checked("LLM", {"model": str(model)})).model_fields)
        for name in lacks:
            with pytest.raises(ValueError, match=f"LLM got invalid argument: {name}"):
                tensorrt_llm.LLM(str(model), **{name: None})


@pytest.mark.parametrize(
    ("version", "names"),
    [("1.1.0", {"trace_headers": 0, "cache_salt": 0}), ("1.2.1", {"cache_salt": 1, "priority": 0}),
     ("1.3.0rc29", {"cache_salt": 1, "priority": 1, "conversation_params": 1})],
)  # fmt: skip
def test_generate_async_has_the_arguments_of_its_version(model: Path, version: str, names: dict[str, int]) -> None:
    with using.tensorrt_llm(f"version={version}"):
        double = Double(model)
        there = inspect.signature(double.llm.generate_async).parameters
        double.llm.shutdown()
        assert {name: int(name in there) for name in names} == names


def test_names_of_calls(now: Double) -> None:
    wanted = [one["name"] for one in API["LLM"]["params"]]
    assert list(inspect.signature(now.package.LLM).parameters)[:-1] == wanted
    wanted = [one["name"] for one in API["LLM.generate_async"]["params"]]
    assert list(inspect.signature(now.llm.generate_async).parameters) == wanted
    assert not inspect.iscoroutinefunction(now.llm.generate_async)
    _, result = now.ask(max_tokens=2)
    missing = [name for name in API["RequestOutput"]["attributes"] if not hasattr(result, name)]
    assert missing == []
    with pytest.raises(RuntimeError):
        type(result)()
    for name in ("finished", "error", "decoded_token"):
        assert not hasattr(result.outputs[0], name)
    with pytest.raises(AttributeError):
        result.outputs[0].no_such_slot = 1
    with pytest.raises(AttributeError):
        _ = result.error  # since 1.3


# -- construction


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"no_such_thing": 1}, ValueError, "LLM got invalid argument: no_such_thing"),
        ({"kv_cache_config": None}, ValueError, "kv_cache_config"),
        ({"batching_type": "x", "no_such_thing": 1}, ValueError, "batching_type: only tensorrt_llm._tensorrt_engine"),
        ({"tensor_parallel_size": 2}, RuntimeError, "Only 1 GPUs are available, but 2 are required."),
        ({"max_batch_size": "many"}, ValueError, "max_batch_size"),
        ({"stream_interval": 0}, ValueError, "stream_interval"),
        ({"guided_decoding_backend": "outlines"}, ValueError, "guided_decoding_backend"),
        ({"enable_trtllm_sampler": True}, ValueError, "got invalid argument: enable_trtllm_sampler"),
    ],
)
def test_what_llm_refuses(model: Path, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with using.tensorrt_llm():
        import tensorrt_llm

        with pytest.raises(error, match=message):
            tensorrt_llm.LLM(str(model), **arguments)


def test_a_subclass_refuses_in_its_own_name(model: Path) -> None:
    with using.tensorrt_llm():
        import tensorrt_llm

        class Mine(tensorrt_llm.LLM):  # type: ignore[misc]  # imported as Any
            pass

        with pytest.raises(ValueError, match="Mine got invalid argument: x"):
            Mine(str(model), x=1)


@pytest.mark.parametrize(
    ("version", "arguments", "message"),
    [
        ("1.0.0", {"sampler_type": "auto"}, "sampler_type"),
        ("1.3.0rc29", {"sampler_type": "TorchSampler"}, "sampler_type"),
    ],
)
def test_samplers_of_versions(model: Path, version: str, arguments: dict[str, Any], message: str) -> None:
    with using.tensorrt_llm(f"version={version}"):
        import tensorrt_llm

        with pytest.raises(ValueError, match=message):
            tensorrt_llm.LLM(str(model), **arguments)


# -- sampling


@pytest.mark.parametrize(
    "wrong", [{"top_k": -1}, {"top_p": 1.5}, {"temperature": -1.0}, {"best_of": 1, "n": 2}, {"best_of": 2},
              {"truncate_prompt_tokens": 0}],
)  # fmt: skip
def test_what_sampling_params_refuses(each: Double, wrong: dict[str, Any]) -> None:
    unchecked = each.package.MANNERS.release == (1, 0) and set(wrong) & {"top_k", "top_p", "temperature"}
    if unchecked:
        each.package.SamplingParams(**wrong)
        return
    with pytest.raises(ValueError, match=r"require|must be|Greedy"):
        each.package.SamplingParams(**wrong)


def test_sampling_params_has_keywords_and_slots_only(now: Double) -> None:
    with pytest.raises(TypeError):
        now.package.SamplingParams(5)
    with pytest.raises(TypeError):
        now.package.SamplingParams(max_new_tokens=5)
    with pytest.raises(AttributeError):
        now.package.SamplingParams().max_new_tokens = 5
    with pytest.raises(TypeError):
        now.package.SamplingParams(top_p="0.5")
    from tensorrt_llm.llmapi import GuidedDecodingParams

    with pytest.raises(ValueError, match="one guide"):
        GuidedDecodingParams(regex="a", json_object=True)


def test_it_writes_into_its_callers_object(now: Double) -> None:
    params = now.package.SamplingParams(stop=["x"], max_tokens=2)
    now.llm.generate(PROMPT, params)
    assert (params.end_id, params.pad_id, params.stop_token_ids) == (3, 3, [4])
    assert params._stop_word_ids
    kept = now.package.SamplingParams(end_id=7, max_tokens=2)
    now.llm.generate(PROMPT, kept)
    assert (kept.end_id, kept.stop_token_ids) == (7, None)


@pytest.mark.parametrize(
    "wrong", [{"top_p": 0.0}, {"repetition_penalty": 0.0}, {"min_p": 1.5}, {"max_tokens": 0}, {"min_tokens": -1},
              {"length_penalty": -1.0}, {"n": 0}, {"top_p_decay": 0.0}, {"seed": -1}, {"early_stopping": True},
              {"best_of": 2, "use_beam_search": True}, {"return_generation_logits": True}],
)  # fmt: skip
def test_what_only_c_plus_plus_refuses_comes_when_it_is_consumed(now: Double, wrong: dict[str, Any]) -> None:
    with pytest.raises(now.refusal):
        now.ask(**{"temperature": 1.0, **wrong})


def test_greedy_in_1_0_is_another_thing(model: Path) -> None:
    for version, greedy in (("1.0.0", True), ("1.2.1", False)):
        with using.tensorrt_llm(f"version={version}"):
            import tensorrt_llm

            assert tensorrt_llm.SamplingParams(temperature=0.7)._greedy is greedy
            assert tensorrt_llm.SamplingParams(temperature=0.7, top_p=1.0, top_k=0)._greedy is False


def test_torch_sampler_reads_penalties_and_seeds_since_1_3(each: Double) -> None:
    release = each.package.MANNERS.release
    each.llm.engine.arguments.__dict__["sampler_type"] = "TorchSampler"
    plain = each.ask(max_tokens=40, end_id=-1)[0][-1]
    punished = each.ask(max_tokens=40, end_id=-1, frequency_penalty=5.0)[0][-1]
    assert (plain == punished) == (release < (1, 3))
    sampled: dict[str, Any] = {"temperature": 3.0, "top_k": 0, "top_p": 1.0, "seed": 4, "end_id": -1}
    assert (each.ask(**sampled)[0][-1] == each.ask(**sampled)[0][-1]) == (release >= (1, 3))


# -- requests to the double: they end, fail and stop as those of TensorRT-LLM 1.0 to 1.3 do ----------------------------


@pytest.mark.parametrize(
    ("inputs", "error"),
    [([], IndexError), (["a"], AssertionError), (7, TypeError), ((1, 2), TypeError), ({}, TypeError)],
)
def test_what_inputs_may_be(now: Double, inputs: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        now.ask(inputs)


def test_a_too_long_prompt_is_refused_at_once_by_the_versions_own_error(model: Path) -> None:
    for version, kind in (("1.1.0", "ValueError"), ("1.2.0", "RequestError")):
        with using.tensorrt_llm(f"version={version}"):
            found = Double(model, max_num_tokens=4)
            with pytest.raises(Exception, match=r"The sum of prompt length \(5\.0\)") as raised:
                found.llm.generate_async([5] * 5)
            assert type(raised.value).__name__ == kind
            found.llm.shutdown()


def test_a_request_of_no_sampling_params(now: Double) -> None:
    with pytest.raises(TypeError, match="SamplingParams"):
        now.llm.generate_async(PROMPT, sampling_params={"max_tokens": 1})
    assert len(now.llm.generate(PROMPT).outputs[0].token_ids) <= 32


def test_lists_grow_and_the_end_is_among_them(each: Double) -> None:
    states, result = each.ask(max_tokens=200)
    assert [len(state[0][0]) for state in states] == list(range(1, len(states) + 1))
    assert (result.outputs[0].finish_reason, result.outputs[0].stop_reason) == ("stop", None)
    assert result.outputs[0].token_ids[-1] == 3
    assert result.finished


def test_not_streaming_is_one_item(each: Double) -> None:
    states, _ = each.ask(streaming=False, max_tokens=20, end_id=-1)
    assert len(states) == 1


def test_a_stop_id_is_cut_from_the_ids_and_not_from_the_log_probabilities(now: Double) -> None:
    whole = now.ask(end_id=-1, max_tokens=9)[1].outputs[0].token_ids
    output = now.ask(end_id=-1, max_tokens=9, stop_token_ids=[whole[3]], logprobs=1)[1].outputs[0]
    assert (output.token_ids, output.stop_reason, output.finish_reason) == (whole[:3], whole[3], "stop")
    assert len(output.logprobs) == 4
    kept = now.ask(end_id=-1, stop_token_ids=[whole[3]], include_stop_str_in_output=True)[1].outputs[0]
    assert kept.token_ids == whole[:4]


def test_log_probabilities_in_double(now: Double) -> None:
    output = now.ask(temperature=5.0, top_k=0, top_p=1.0, logprobs=2, max_tokens=30, end_id=-1)[1].outputs[0]
    for id, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert id in entry
        assert len(entry) in (2, 3)
        assert not hasattr(entry[id], "decoded_token")
    assert any(len(entry) == 3 for entry in output.logprobs)  # one outside of the most likely
    assert now.ask(logprobs=0, max_tokens=2)[1].outputs[0].logprobs == []


def test_growing_log_probabilities_fail_at_the_second_item(model: Path) -> None:
    with using.tensorrt_llm():
        found = Double(model, sampler_type="TRTLLMSampler")
        with pytest.raises(AssertionError, match=r"logprobs length: 3 != output\.length: 2"):
            found.ask(logprobs=1, end_id=-1)
        found.llm.shutdown()


def test_an_abort_ends_it_later_as_cancelled(each: Double) -> None:
    async def run() -> Any:
        params = each.package.SamplingParams(max_tokens=400, end_id=-1, detokenize=False)
        result = each.llm.generate_async(PROMPT, sampling_params=params, streaming=True)
        await result.__anext__()
        assert result.abort() is None
        assert (result.aborted(), result.finished) == (True, False)
        async for _ in result:
            pass
        return result

    assert asyncio.run(run()).outputs[0].finish_reason == "cancelled"


def test_an_abort_with_log_probabilities_raises_in_1_2(each: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(each.package.MANNERS, "pause", 0.3)  # the abort comes before a second token

    async def run(**params: Any) -> Any:
        sampling = each.package.SamplingParams(max_tokens=200, detokenize=False, end_id=-1, **params)
        result = each.llm.generate_async(PROMPT, sampling_params=sampling, streaming=True)
        await anext(result)
        result.abort()
        async for _ in result:
            pass
        return result

    assert asyncio.run(run()).outputs[0].finish_reason == "cancelled"
    if each.package.MANNERS.release == (1, 2):
        with pytest.raises(AssertionError, match="logprobs length"):
            asyncio.run(run(logprobs=1))
    else:
        assert asyncio.run(run(logprobs=1)).outputs[0].finish_reason == "cancelled"


def test_a_notice_to_a_loop_that_does_not_run_is_dropped_and_its_item_kept(model: Path) -> None:
    for manners, arguments, caught in (
        ("version=1.2.1", {}, True),
        ("version=1.3.0", {}, True),
        ("version=1.1.0", {}, False),
        ("version=1.2.1;notices=uncaught", {}, False),
        ("version=1.2.1", {"gather_generation_logits": True}, False),
    ):
        with using.tensorrt_llm(manners):
            found = Double(model, **arguments)

            async def begin(found: Double = found) -> Any:
                params = found.package.SamplingParams(max_tokens=3, detokenize=False, end_id=-1)
                return found.llm.generate_async(PROMPT, sampling_params=params, streaming=True)

            loop = asyncio.new_event_loop()
            try:
                result = loop.run_until_complete(begin())
                deadline = time.monotonic() + 20
                while len(result.queue._items) < 3:  # the loop rests
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                kept = [*result.queue._items]
                if caught:
                    assert not result.queue._event.is_set(), "nobody was told"
                    assert loop.run_until_complete(result.aresult()).finished, "one who comes later finds them"
                    loop.run_until_complete(begin())
                else:
                    with pytest.raises(Exception, match=r"^$") as raised:
                        loop.run_until_complete(begin())
                    assert type(raised.value).__name__ == "EventLoopShutdownError"
                    with pytest.raises(RuntimeError, match="LLM is shutting down"):
                        loop.run_until_complete(begin())
                assert len(kept) == 3
            finally:
                found.llm.shutdown()
                loop.run_until_complete(asyncio.sleep(0))  # notices that had come begin
                loop.close()


def test_a_text_level_stop_leaves_the_engine_at_work_in_1_2_alone(model: Path) -> None:
    for version, leaked, aborted in (("1.1.0", 0, 1), ("1.2.1", 1, 0)):
        with using.tensorrt_llm(f"version={version}"):
            found = Double(model)
            text = found.llm.generate(PROMPT, found.package.SamplingParams(end_id=-1)).outputs[0].text
            params: dict[str, Any] = {"detokenize": True, "max_tokens": 400, "stop": [text[3:5]], "min_tokens": 1}
            output = found.ask(**params)[1].outputs[0]
            assert output.finish_reason == "stop"
            assert text[3:5] not in output.text
            engine = found.llm.engine
            assert (engine.leaked, len(engine.aborted)) == (leaked, aborted)
            found.llm.shutdown()


def test_texts_of_several_sequences_are_streamed_twice_before_1_3(each: Double) -> None:
    outputs = each.ask(n=2, temperature=1.0, top_p=1.0, top_k=0, end_id=-1, max_tokens=6, detokenize=True)[1].outputs
    decoded = [each.llm.tokenizer.decode(output.token_ids) for output in outputs]
    assert ([output.text for output in outputs] == decoded) == (each.package.MANNERS.release >= (1, 3))


def test_differences_are_those_of_the_last_item_alone(model: Path) -> None:
    with using.tensorrt_llm("burst=3"):
        found = Double(model)
        output = found.ask(max_tokens=7, end_id=-1)[1].outputs[0]
        assert (len(output.token_ids), output.token_ids_diff, output.length) == (7, output.token_ids[6:], 7)
        found.llm.shutdown()


def test_failures_since_1_3_are_said_and_not_raised(model: Path) -> None:
    with using.tensorrt_llm("version=1.3.0"):
        found = Double(model)
        _, result = found.ask(max_tokens=0)
        assert "max_tokens" in result.error
        assert result.finished
        found.llm.shutdown()


def test_a_dead_engine_refuses_what_comes_after(model: Path) -> None:
    with using.tensorrt_llm("die_after=5"):
        found = Double(model)
        with pytest.raises(RuntimeError, match="the executor died"):
            found.ask(max_tokens=50, end_id=-1)
        with pytest.raises(RuntimeError, match="LLM is shutting down"):
            found.ask()


@pytest.mark.parametrize(
    ("arguments", "params"),
    [
        ({}, {"temperature": 1e-38}),
        ({}, {"temperature": 1.0, "top_k": 10**6}),
        ({}, {"temperature": 1.0, "embedding_bias": "nothing"}),
        ({"guided_decoding_backend": "xgrammar"}, {"regex": "a|b", "end_id": -1}),
        ({"guided_decoding_backend": "xgrammar"}, {"regex": "a|b", "min_tokens": 9}),
    ],
)
def test_what_one_request_can_do_to_all(model: Path, arguments: dict[str, Any], params: dict[str, Any]) -> None:
    """The adapter lets none of these through."""
    with using.tensorrt_llm("version=1.3.0"):
        from tensorrt_llm.llmapi import GuidedDecodingParams

        found = Double(model, **arguments)
        params = dict(params)
        if "embedding_bias" in params:
            params = {**params, "embedding_bias": [-float("inf")] * found.llm.model.vocabulary}
        if regex := params.pop("regex", None):
            params["guided_decoding"] = GuidedDecodingParams(regex=regex)
        with pytest.raises(RuntimeError, match=r"CUDA error|out of range|ended already"):
            found.ask(**params)
        with pytest.raises(RuntimeError, match="LLM is shutting down"):
            found.ask()


def test_an_llm_that_nobody_holds_leaves_its_results_waiting(model: Path) -> None:
    import gc

    with using.tensorrt_llm("pause=0.05"):
        found = Double(model)

        async def run() -> None:
            params = found.package.SamplingParams(max_tokens=20, end_id=-1, detokenize=False)  # a second
            result = found.llm.generate_async(PROMPT, sampling_params=params, streaming=True)
            await result.__anext__()
            del found.llm
            gc.collect()
            async for _ in result:
                pass

        with pytest.raises(TimeoutError):
            asyncio.run(_within(2.0, run()))


async def _within(seconds: float, work: Any) -> None:
    try:
        await asyncio.wait_for(work, seconds)
    except asyncio.TimeoutError:
        raise TimeoutError from None


def test_a_batch_is_a_list(now: Double) -> None:
    with pytest.raises(TypeError):
        now.llm.generate((PROMPT, PROMPT))
    several = [now.package.SamplingParams(max_tokens=2) for _ in range(2)]
    assert [len(one.outputs[0].token_ids) for one in now.llm.generate([PROMPT, [40, 41]], several)] == [2, 2]


def test_adapters_need_lora_to_be_enabled(model: Path, tmp_path: Path) -> None:
    with using.tensorrt_llm():
        from tensorrt_llm.executor import LoRARequest

        with pytest.raises(ValueError, match=r"lora_path \(\) does not exist\."):
            LoRARequest("a", 1)
        with pytest.raises(ValueError, match="lora_ckpt_source"):
            LoRARequest("a", 1, str(tmp_path), "x")
        request = LoRARequest("a", 1, str(tmp_path))
        assert (request.name, request.adapter_id, request.path, request.ckpt_source) == ("a", 1, str(tmp_path), "hf")
        found = Double(model)
        with pytest.raises(found.refusal, match="LoRA is not enabled"):
            found.ask(more={"lora_request": request})
        found.llm.shutdown()


def test_it_is_not_pickled(now: Double) -> None:
    import pickle

    with pytest.raises(RuntimeError):
        pickle.dumps(now.llm)


def test_a_call_outside_an_event_loop_has_no_asynchronous_result(now: Double) -> None:
    result = now.llm.generate_async([5, 6, 7])

    async def take() -> None:
        async for _ in result:
            pass

    with pytest.raises(AssertionError, match="The asyncio event loop was not present during initialization"):
        asyncio.run(take())


def test_positional_arguments_show(model: Path) -> None:
    with using.tensorrt_llm():
        found = Double(model)
        with pytest.raises(SystemExit, match="name them"):
            found.llm.generate_async([5], found.package.SamplingParams())
        found.llm.shutdown()


def test_strings_beside_an_end_id_show(model: Path) -> None:
    with using.tensorrt_llm():
        found = Double(model)
        result = found.llm.generate_async([5], sampling_params=found.package.SamplingParams(end_id=3, bad=["x"]))
        with pytest.raises(RuntimeError, match="is not processed by tokenizer, please call the setup method"):
            result.result()
        found.llm.shutdown()
