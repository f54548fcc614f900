"""The double against the API's list of names; what it takes and refuses."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import pydantic
import pytest

from tests.doubles import using
from tests.doubles.double import PROMPT, Double

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


def test_torch_sampler_takes_penalties_and_seeds_and_does_nothing_before_1_3(each: Double) -> None:
    release = each.package.MANNERS.release
    each.llm._engine.arguments.__dict__["sampler_type"] = "TorchSampler"
    plain = each.ask(max_tokens=40, end_id=-1)[0][-1]
    punished = each.ask(max_tokens=40, end_id=-1, frequency_penalty=5.0)[0][-1]
    assert (plain == punished) == (release < (1, 3))
    sampled: dict[str, Any] = {"temperature": 3.0, "top_k": 0, "top_p": 1.0, "seed": 4, "end_id": -1}
    assert (each.ask(**sampled)[0][-1] == each.ask(**sampled)[0][-1]) == (release >= (1, 3))
