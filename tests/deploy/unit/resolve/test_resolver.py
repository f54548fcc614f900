"""Decisions on all that a specification leaves open."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from deploy.errors import DeployError, DoesNotFit, SpecError
from deploy.resolve.decision import Decision
from deploy.resolve.fit import Candidates, rows
from deploy.resolve.resolver import find_size, resolve, times
from deploy.resources.build import resources
from deploy.resources.resource import Kind
from deploy.spec import Spec
from deploy.spec.sections import Shape
from tests.deploy.cases import LLAMA_CONFIG
from tests.one_test import in_one_test

GIVEN: dict[str, Any] = {
    "name": "llama",
    "role": "arn:aws:iam::111122223333:role/endpoint",
    "image": {"repository": "lmi", "tag": "1-cu130"},
    "model": {"id": "meta-llama/Meta-Llama-3-8B-Instruct"},
    "options": {"llm_engine": "trtllm"},
}


SMALL = Shape(parameters=8e9, layers=32, kv_heads=8, head_dim=128)


def spec(**changes: Any) -> Spec:
    return Spec.model_validate({**GIVEN, **changes})


def decision(**changes: Any) -> Decision:
    return resolve(spec(**changes), "us-east-1").decision


def candidates(**changes: Any) -> Candidates | None:
    return resolve(spec(**changes), "us-east-1").candidates


def test_all_that_was_open() -> None:
    assert decision() == Decision(
        region="us-east-1",
        account="111122223333",
        image="111122223333.dkr.ecr.us-east-1.amazonaws.com/lmi:1-cu130",
        instance_type="ml.g6.2xlarge",
        gpus=1,
        ami="al2023-ami-sagemaker-inference-gpu-4-1",
        model_data=None,
        download=300,
        startup=1980,
        tensor_parallel=1,
    )


def test_what_is_said_is_not_decided() -> None:
    found = decision(
        instance={"type": "ml.p5.48xlarge", "ami": "al2-ami-sagemaker-inference-gpu-3-1"},
        timeouts={"download": 61, "startup": 62, "provision": 301},
        model={"s3": "s3://models/llama/", "shape": SMALL.model_dump()},
        options={"tensor_parallel_degree": 2},
    )
    assert (found.instance_type, found.gpus, found.tensor_parallel) == ("ml.p5.48xlarge", 8, 2)
    assert (found.ami, found.model_data) == ("al2-ami-sagemaker-inference-gpu-3-1", "s3://models/llama/")
    assert (found.download, found.startup, found.provision) == (61, 62, 301)


def test_a_directory_is_uploaded_and_served_from_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    found = decision(model={"path": str(tmp_path), "upload": "s3://models/llama/"})
    assert (found.model_data, found.instance_type) == ("s3://models/llama/", "ml.g6.2xlarge")
    assert found.download == 660


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"^model\.path: .* is not a directory on this machine"):
        decision(model={"path": str(tmp_path / "none"), "upload": "s3://models/llama/"})


def test_a_named_type_that_is_too_small_is_refused() -> None:
    with pytest.raises(DoesNotFit, match=r"^instance\.type: ml\.g5\.12xlarge: weights of 32\.9 GiB"):
        decision(
            model={"id": "meta-llama/Llama-3.3-70B-Instruct", "context": 4096}, instance={"type": "ml.g5.12xlarge"}
        )


def test_it_is_taken_by_whom_knows_better() -> None:
    instance = {"type": "ml.g5.12xlarge", "unchecked": True}
    found = decision(model={"id": "meta-llama/Llama-3.3-70B-Instruct", "context": 4096}, instance=instance)
    assert found.instance_type == "ml.g5.12xlarge"
    assert found.warnings[0].startswith("ml.g5.12xlarge: weights of 32.9 GiB")


def test_a_mistyped_type_is_refused_unless_it_is_meant() -> None:
    with pytest.raises(SpecError, match=r"did you mean ml\.g6e\.xlarge\?"):
        decision(instance={"type": "ml.g6e.xlage"})
    assert decision(instance={"type": "ml.g6e.xlage", "unchecked": True}).instance_type == "ml.g6e.xlage"


def test_auto_needs_a_size() -> None:
    with pytest.raises(SpecError, match=r"^instance\.type: auto needs the model's size") as caught:
        decision(model={"id": "me/mine"})
    assert "model.shape" in caught.value.advice


@in_one_test(
    ("changes", "warning"),
    [
        ({"model": {"id": "me/mine"}, "instance": {"type": "ml.g5.xlarge"}}, "The model's size is unknown"),
        ({"instance": {"type": "ml.g9.xlarge"}}, "ml.g9.xlarge is not in the tables"),
        (
            {"instance": {"type": "ml.g5.xlarge"}},
            "ml.g5.xlarge: little host RAM (16 GiB) for a checkpoint of 15 GiB",
        ),
        ({"image": {"repository": "lmi", "tag": "1"}}, "The image's CUDA version is unknown"),
        (
            {"model": {"id": "a/b", "shape": SMALL.model_dump()}},
            "The model's maximum context is unknown; 4096 tokens are assumed",
        ),
        ({"model": {"id": "meta-llama/Llama-3.1-405B"}}, "Loading 756 GiB may take longer"),
        (
            {"encryption": {"volume_key": "alias/k"}},
            "encryption.volume_key does not apply to the NVMe disk of ml.g6.2xlarge",
        ),
        ({"instance": {"ami": "new"}}, "instance.ami: new is not one of the AMIs known"),
    ],
)
def test_warnings(changes: dict[str, Any], warning: str) -> None:
    (found,) = decision(**changes).warnings
    assert found.startswith(warning)


def test_a_volume_beside_nvme_is_refused() -> None:
    with pytest.raises(SpecError, match=r"^instance\.volume_gb: ml\.g5\.2xlarge has 450 GB of NVMe"):
        decision(instance={"type": "ml.g5.2xlarge", "volume_gb": 100})


@in_one_test(
    ("changes", "instance"),
    [
        ({"model": {"id": "meta-llama/Llama-3.1-8B"}}, "ml.g6e.xlarge"),  # its own context, 131072
        ({"model": {"id": "meta-llama/Llama-3.1-8B", "context": 8192}}, "ml.g6.2xlarge"),
        ({"options": {"max_model_len": 65536}}, "ml.g6e.xlarge"),
        ({"options": {"max_model_len": "32768", "kv_cache_dtype": "fp8"}}, "ml.g6.2xlarge"),
        ({"options": {"max_model_len": 32768}}, "ml.g6e.xlarge"),
        ({"model": {"id": "Qwen/Qwen2.5-32B", "context": 8192, "dtype": "int4"}}, "ml.g6e.4xlarge"),
        ({"model": {"id": "Qwen/Qwen2.5-32B", "context": 8192}, "options": {"quantize": "fp8"}}, "ml.g6e.4xlarge"),
        ({"options": {"gpu_memory_utilization": 0.75}}, "ml.g6e.xlarge"),
        ({"options": {"dtype": "fp16", "tensor_parallel_degree": 4}}, "ml.g6.12xlarge"),
        ({"options": {"llm_engine": "openvino"}, "model": {"id": "Qwen/Qwen3-0.6B"}}, "ml.m7i.xlarge"),
        ({"image": {"repository": "lmi-cpu", "tag": "1"}, "options": {}, "model": {"id": "Qwen/Qwen3-0.6B"}},
         "ml.m7i.xlarge"),
        ({"components": [{"name": "a", "accelerators": 2}]}, "ml.g6.12xlarge"),
    ],
)  # fmt: skip
def test_what_the_cheapest_type_depends_on(changes: dict[str, Any], instance: str) -> None:
    found = decision(**changes)
    assert found.instance_type == instance
    asked = candidates(**changes)
    assert asked is not None
    assert asked.chosen is not None
    assert asked.chosen.instance.name == instance  # `plan` shows what is taken


def test_a_cpu_type_has_neither_host_nor_degree() -> None:
    found = decision(options={"llm_engine": "openvino"}, model={"id": "Qwen/Qwen3-0.6B"})
    assert (found.gpus, found.ami, found.tensor_parallel) == (0, None, None)


FOR_GPUS: list[dict[str, Any]] = [
    {"options": {"llm_engine": "trtllm"}},
    {"options": {"rolling_batch": "trtllm"}},
    {"image": {"aws": "djl-tensorrtllm"}, "options": {}},
    {"image": {"aws": "djl-lmi"}, "options": {}},
    {"image": {"repository": "lmi-handler"}, "options": {"llm_engine": "vllm"}},
    {"image": {"repository": "lmi-handler-vllm"}, "options": {"rolling_batch": "lmi-dist"}},
]


@pytest.mark.parametrize("changes", FOR_GPUS)
@pytest.mark.parametrize("name", ["ml.r7i.2xlarge", "ml.m5.xlarge"])  # has room for the model, has none
def test_a_cpu_type_is_refused_for_an_engine_that_the_image_has_for_gpus(name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(DoesNotFit, match=rf"^instance\.type: {name} has no GPU, but .* (trtllm|vllm) ") as refusal:
        decision(**changes, instance={"type": name})
    assert refusal.value.advice is not None
    assert refusal.value.advice.startswith("Use ml.g")
    assert not re.search(r"ml\.[cmr]\d", refusal.value.advice)
    assert decision(**changes, instance={"type": name, "unchecked": True}).gpus == 0


def test_without_the_models_size_the_families_with_gpus_are_advised() -> None:
    with pytest.raises(DoesNotFit) as refusal:
        decision(model={"id": "own/model"}, instance={"type": "ml.c7i.4xlarge"})
    assert str(refusal.value.advice).startswith("Use ml.g")


@pytest.mark.parametrize(
    "changes",
    [
        {"options": {"llm_engine": "vllm"}},  # an image of the user's own
        {"image": {"repository": "lmi-handler"}, "options": {"llm_engine": "openvino"}},
        {"image": {"repository": "lmi-handler"}, "options": {}},
    ],
)
def test_a_cpu_type_is_kept_for_other_engines_and_images(changes: dict[str, Any]) -> None:
    assert decision(**changes, instance={"type": "ml.r7i.2xlarge"}).gpus == 0


@pytest.mark.parametrize(("engine", "count"), [("openvino", 1), ("trtllm", 0)])
@pytest.mark.parametrize("name", ["ml.g6.2xlarge", "ml.g6.12xlarge"])
def test_one_warning_says_that_gpus_stay_idle(engine: str, count: int, name: str) -> None:
    options = {"llm_engine": engine} | ({"tensor_parallel_degree": "max"} if engine == "trtllm" else {})
    warnings = decision(options=options, instance={"type": name}).warnings
    assert len([one for one in warnings if "idle" in one]) == count


def test_pipeline_stages_share_the_weights() -> None:
    options = {"tensor_parallel_degree": 4, "pipeline_parallel_degree": 2}
    found = decision(model={"id": "meta-llama/Llama-3.1-70B", "context": 1024}, options=options)
    assert (found.gpus, found.tensor_parallel) == (8, 4)


def test_a_type_that_is_not_known_has_the_gpus_that_are_wanted() -> None:
    instance = {"type": "ml.g9.48xlarge"}
    assert (decision(instance=instance).gpus, decision(instance=instance).tensor_parallel) == (1, None)
    found = decision(instance=instance, components=[{"name": "a", "accelerators": 4}])
    assert (found.gpus, found.tensor_parallel) == (4, 4)


def test_awss_tensorrt_llm_image_compiles_and_gets_an_hour() -> None:
    found = decision(image={"aws": "djl-tensorrtllm"}, options={})
    assert (found.startup, found.ami) == (3600, "al2-ami-sagemaker-inference-gpu-3-1")


def test_a_shape_that_is_given_beats_all_others() -> None:
    large = SMALL.model_copy(update={"parameters": 70e9, "layers": 80, "context": 8192})
    model = {**GIVEN["model"], "shape": large.model_dump()}
    assert decision(model=model).instance_type == "ml.g7e.12xlarge"


@in_one_test(
    ("model", "source"),
    [
        ({"id": "a/b", "shape": SMALL.model_dump()}, "model.shape"),
        ({"id": "Qwen/Qwen3-8B"}, "known model"),
        ({"id": "demo"}, "known model"),
        ({"id": "a/b"}, None),
        ({"s3": "s3://models/llama/"}, None),
    ],
)
def test_where_a_shape_is_found(model: dict[str, Any], source: str | None) -> None:
    found = find_size(spec(model=model))
    assert (found.source if found.shape is not None else None) == source


def test_advice_on_a_type_of_which_nothing_is_known() -> None:
    asked = candidates(instance={"type": "ml.g9.xlarge"})
    assert asked is not None
    assert asked.chosen is None
    assert rows(asked)[0][0] == "ml.g6.2xlarge"
    assert candidates(model={"id": "a/b"}, instance={"type": "ml.g5.xlarge"}) is None


def test_advice_shows_the_users_price() -> None:
    asked = candidates(instance={"type": "ml.g6e.xlarge", "price": 1.23})
    assert asked is not None
    (row,) = [row for row in rows(asked) if "chosen" in row[-1]]
    assert (row[0], row[8]) == ("ml.g6e.xlarge", "$1.23/h")


T4 = {"type": "ml.g4dn.2xlarge"}
TINY = {"id": "org/tiny", "dtype": "fp16", "context": 1024,
        "shape": {"parameters": 1e9, "layers": 16, "kv_heads": 8, "head_dim": 64}}  # fmt: skip


@in_one_test("image", [
    {"aws": "djl-lmi"},
    {"aws": "djl-lmi", "tag": "0.36.0-lmi28.0.0-cu130"},
    {"uri": "763104351884.dkr.ecr.us-east-1.amazonaws.com/djl-inference:0.38.0-lmi29.0.0-cu130"},
])  # fmt: skip
@in_one_test("model", [TINY, {"id": "org/unknown"}])
def test_an_image_without_kernels_for_the_gpu_is_refused(image: dict[str, str], model: dict[str, Any]) -> None:
    """vLLM of AWS's LMI image is built for Ampere and newer: on a T4 it does not start."""
    with pytest.raises(DoesNotFit, match=r"built for compute capability 8\.0 and newer, but the T4 has 7\.5"):
        decision(image=image, model=model, instance=T4, options={})
    unchecked = decision(image=image, model=model, instance={**T4, "unchecked": True}, options={})
    assert unchecked.instance_type == "ml.g4dn.2xlarge"
    if model is TINY:
        assert "g4dn" not in decision(image=image, model=model, options={}).instance_type


def test_an_image_for_hopper_and_newer_names_the_types_for_it() -> None:
    sglang = {"uri": "763104351884.dkr.ecr.us-east-1.amazonaws.com/sglang:0.5.20-gpu-py312-cu130-amzn2023-sagemaker"}
    said = (
        r"instance.type: ml.g6e.xlarge: the image is built for compute capability 9\.0 and newer, but the L40S has 8\.9"
    )
    with pytest.raises(DoesNotFit, match=said) as caught:
        decision(image=sglang, model=TINY, instance={"type": "ml.g6e.xlarge"}, options={})
    assert caught.value.advice == (
        "Use ml.g7e, ml.g7, ml.p5, ml.p5e, ml.p5en, ml.p6-b200, ml.p6-b300, or another image."
    )


LLAMACPP: dict[str, Any] = {
    "image": {"repository": "lmi-handler-llamacpp", "tag": "1.1.0"},
    "model": {
        "s3": "s3://models/gguf/",
        "context": 4096,
        "shape": {**SMALL.model_dump(), "dtype": "int4", "stored": 4.9e9},
    },
    "options": {"llm_engine": "llamacpp"},
}
ARM: dict[str, Any] = {**LLAMACPP, "image": {"repository": "lmi-handler-llamacpp-arm64", "tag": "1.1.0"}}
CUDA: dict[str, Any] = {**LLAMACPP, "image": {"repository": "lmi-handler-llamacpp", "tag": "1.1.0-cu130"}}


@in_one_test(
    ("given", "type", "message"),
    [
        (LLAMACPP, "ml.c8g.2xlarge", "ml.c8g.2xlarge is an arm64 host, but the image is built for amd64"),
        (ARM, "ml.c7i.2xlarge", "ml.c7i.2xlarge is an amd64 host, but the image is built for arm64"),
        (ARM, "ml.g6e.2xlarge", "ml.g6e.2xlarge is an amd64 host, but the image is built for arm64"),
        ({}, "ml.r6g.2xlarge", "ml.r6g.2xlarge is an arm64 host, but the image is built for amd64"),
        (LLAMACPP, "ml.m9g.2xlarge", "ml.m9g.2xlarge is an arm64 host"),
    ],
)
def test_an_image_for_other_processors_is_refused(given: dict[str, Any], type: str, message: str) -> None:
    for unchecked in (False, True):
        with pytest.raises(SpecError, match=rf"^instance\.type: {message}") as caught:
            decision(**given, instance={"type": type, "unchecked": unchecked})
    host = "arm64" if "g." in type.replace("g6e", "") else "amd64"
    assert f"--platform linux/{host} and set image.architecture: {host}" in caught.value.advice


def test_llamacpp_takes_the_cheapest_host_of_the_images_processors() -> None:
    assert decision(**LLAMACPP).instance_type == "ml.m7i.xlarge"
    found = candidates(**ARM)
    assert found is not None
    assert found.chosen is not None
    assert found.chosen.instance.name == "ml.m8g.xlarge"
    assert {item.instance.architecture for item in found.fits} == {"arm64"}
    assert any("Graviton2" in remark for item in found.fits if item.instance.family == "c6g" for remark in item.remarks)
    assert decision(**{**LLAMACPP, "image": {"repository": "mine", "architecture": "arm64", "tag": "1"}}).gpus == 0


def test_a_gguf_file_needs_its_size_and_a_cache() -> None:
    found = candidates(**ARM, instance={"type": "ml.c7g.2xlarge"})
    assert found is not None
    assert found.chosen is not None
    assert found.chosen.weights == pytest.approx(4.9e9 / 2**30)
    with pytest.raises(DoesNotFit, match=r"ml\.c7g\.xlarge: with weights of 4\.6 GiB .* the 5\.4 GiB of RAM"):
        decision(**ARM, instance={"type": "ml.c7g.xlarge"})


def test_llamacpp_with_cuda_divides_the_layers_between_all_gpus() -> None:
    assert decision(**CUDA).gpus == 1
    found = resolve(spec(**CUDA, instance={"type": "ml.g6.12xlarge"}), "us-east-1")
    assert found.chosen is not None
    assert found.chosen.degree == 4
    assert found.chosen.weights == pytest.approx(4.9e9 / 2**30 / 4)
    assert (found.decision.tensor_parallel, found.decision.warnings) == (None, ())
    one = resolve(spec(**LLAMACPP, instance={"type": "ml.g6.xlarge"}), "us-east-1").decision
    assert "leaves the GPU idle" in "".join(one.warnings)


def test_llamacpp_frees_the_cache_outside_of_a_window() -> None:
    shape = {**LLAMACPP["model"]["shape"], "window": 1024, "window_layers": 28, "context": 131072}
    of_windows = {
        **LLAMACPP,
        "model": {**LLAMACPP["model"], "shape": shape, "context": 131072},
        "instance": {"type": "ml.m7i.4xlarge"},
    }
    kept = {**of_windows, "options": {"llm_engine": "llamacpp", "llama_server_args": "--swa-full"}}
    freed, whole = candidates(**of_windows), candidates(**kept)
    assert freed is not None
    assert whole is not None
    assert freed.need.kv_gib(131072, 1) < whole.need.kv_gib(131072, 1) / 4


def test_an_older_or_unknown_image_takes_a_t4() -> None:
    """Of AWS's image before LMI 27 nothing is known, and of one's own: it is remarked, not refused."""
    old = {"aws": "djl-lmi", "tag": "0.31.0"}
    assert decision(image=old, model=TINY, instance=T4, options={}).instance_type == "ml.g4dn.2xlarge"
    own = decision(model=TINY, instance=T4)
    assert any("older than Ampere" in sentence for sentence in own.warnings)
    assert "g4dn" not in decision(model=TINY).instance_type


# -- timeouts out of a model's size ------------------------------------------------------------------------------------


@in_one_test(
    ("gib", "engine", "from_hub", "download", "startup"),
    [
        (15, "vllm", False, 660, 720),  # 300 + 15360 / 50; 600 + 15360 / 200
        (15, "trtllm", False, 660, 1620),  # fifteen minutes more
        (15, "vllm", True, 300, 1080),  # + 15360 / 40
        (0.25, "openvino", False, 360, 660),
        (None, "", False, 720, 720),
        (131, "trtllm", False, 3000, 2220),
    ],
)
def test_times_in_resolver(gib: float | None, engine: str, from_hub: bool, download: int, startup: int) -> None:
    assert times(gib, engine=engine, from_hub=from_hub) == (download, startup, ())


def test_an_image_that_compiles_gets_all_there_is() -> None:
    assert times(15, builds_engine=True).startup == 3600


def test_what_is_beyond_sagemakers_hour_is_said() -> None:
    found = times(756, from_hub=True)
    assert (found.download, found.startup) == (300, 3600)
    assert found.warnings == (
        "Loading 756 GiB may take longer than SageMaker's maximum of 3600 s. Upload the model to S3 (model.path): "
        "the download from S3 has its own timeout.",
    )
    assert times(400).warnings == (
        "Downloading 400 GiB of model data may take longer than SageMaker's maximum of 3600 s.",
    )


# -- several instance types for one endpoint: each is fitted, and one host suits all -----------------------------------


def pools_decision(*types: str | dict[str, Any], **changes: Any) -> Decision:
    pools = [item if isinstance(item, dict) else {"type": item} for item in types]
    return resolve(spec(instance={"pools": pools}, **changes), "us-east-1").decision


def test_each_type_has_its_own_degree_and_the_first_is_the_deployments() -> None:
    found = pools_decision({"type": "ml.g6.12xlarge", "priority": 3}, {"type": "ml.g6e.xlarge", "priority": 1})
    assert [(pool.priority, pool.instance_type, pool.gpus, pool.tensor_parallel) for pool in found.pools] == [
        (1, "ml.g6e.xlarge", 1, 1),
        (3, "ml.g6.12xlarge", 4, 4),
    ]
    assert (found.instance_type, found.gpus, found.tensor_parallel) == ("ml.g6e.xlarge", 1, 1)


@in_one_test(
    ("types", "changes", "message"),
    [
        (("ml.g6e.xlarge", "ml.g4dn.xlarge"), {}, r"instance.pools\[1\]: instance.type: ml.g4dn.xlarge: bf16 needs"),
        (("ml.g6.xlarge",), {"model": {"id": "Qwen/Qwen3-32B"}}, r"instance.pools\[0\]: .*ml.g6.xlarge: weights of"),
        (("ml.g6e.xlarge", "ml.g7g.xlarge"), {}, r"instance.pools\[1\]: .* arm64"),
        (("ml.g6e.xlarge", "ml.g6ee.xlarge"), {}, r"instance.pools\[1\]: .* did you mean"),
        (
            ("ml.g6e.xlarge", "ml.p6-b200.48xlarge"),
            {"image": {"repository": "lmi", "tag": "1-cu128"}},
            r"instance.pools: the types need different host AMIs \(ml.g6e.xlarge: al2-",
        ),
        (("ml.g6e.xlarge", "ml.c7i.24xlarge"), {}, r"instance.pools\[1\]: .*ml.c7i.24xlarge has no GPU"),
        (
            ("ml.g6e.xlarge", "ml.c7i.24xlarge"),
            {"options": {"llm_engine": "vllm"}},
            "instance.pools: the types need different host AMIs",
        ),
    ],
)
def test_a_type_that_does_not_suit_is_named(types: tuple[str, ...], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DeployError, match=message):
        pools_decision(*types, **changes)


def test_a_pool_whose_environment_differs_has_its_own_model() -> None:
    said = spec(instance={"pools": [{"type": "ml.g6e.xlarge"}, {"type": "ml.g6.12xlarge"}, {"type": "ml.g6e.2xlarge"}]})
    built = resources(said, resolve(said, "us-east-1").decision)
    models = [item for item in built if item.kind is Kind.MODEL]
    degrees = [item.request["PrimaryContainer"]["Environment"].get("OPTION_TENSOR_PARALLEL_DEGREE") for item in models]
    assert degrees == [None, "4"]
    (config,) = [item for item in built if item.kind is Kind.ENDPOINT_CONFIG]
    (variant,) = config.request["ProductionVariants"]
    assert variant["InstancePools"] == [
        {"InstanceType": "ml.g6e.xlarge", "Priority": 1},
        {"InstanceType": "ml.g6.12xlarge", "ModelNameOverride": models[1].name, "Priority": 2},
        {"InstanceType": "ml.g6e.2xlarge", "Priority": 3},
    ]
    assert "InstanceType" not in variant
    assert set(config.needs) == {item.key for item in models}


@in_one_test(
    ("instance", "message"),
    [
        ({"type": "ml.g6e.xlarge", "pools": [{"type": "ml.g6.xlarge"}]}, "instance.type cannot be combined with"),
        ({"price": 1.5, "pools": [{"type": "ml.g6.xlarge"}]}, "instance.price cannot be combined with instance.pools"),
        (
            {"pools": [{"type": "ml.g6.xlarge"}, {"type": "ml.g6.xlarge"}]},
            r"pools\[\].type: duplicate values: ml.g6.xlarge",
        ),
        (
            {"pools": [{"type": "ml.g6.xlarge", "priority": 2}, {"type": "ml.g5.xlarge"}]},
            r"pools\[\].priority: duplicate values: 2",
        ),
        ({"pools": [{"type": f"ml.g{n}.xlarge"} for n in range(1, 7)]}, "at most 5"),
        ({"pools": [{"type": "auto"}]}, "pattern"),
    ],
)
def test_contradictions_are_named(instance: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Spec.model_validate({**GIVEN, "instance": instance})
