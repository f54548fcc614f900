"""Fit of models on instances: the arithmetic by hand, published sizes, and the advice on growth."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from deploy.cli.views import print_candidates
from deploy.data import table
from deploy.errors import DoesNotFit, SpecError
from deploy.resolve.fit import COLUMNS, Candidates, Fit, Need, Resolution, cheapest, fit, rank, rows, title, too_small
from deploy.resolve.instances import InstanceType, find
from deploy.resolve.model.shape import config_of, shape_from_table, shape_of_config
from deploy.resolve.prices import TABLE
from deploy.resolve.resolver import advice, resolve
from deploy.resources.environment import environment
from deploy.spec.sections import Shape
from tests.deploy.unit.resolve.test_resolver import GIVEN, spec
from tests.one_test import in_one_test

# -- what fits where: the arithmetic by hand, and what the advice makes of it ------------------------------------------


GIB = 1 << 30


def shape(name: str) -> Shape:
    found = shape_from_table(name)
    assert found is not None
    return found


def instance(name: str) -> InstanceType:
    found = find(name)
    assert found is not None
    return found


LLAMA_8B = Need(shape("meta-llama/Meta-Llama-3-8B"), context=8192)
LLAMA_70B = Need(shape("meta-llama/Llama-3.1-70B"), context=8192)


def test_the_arithmetic_of_llama_8b_on_an_a10g() -> None:
    found = fit(LLAMA_8B, instance("ml.g5.2xlarge"))
    weights = 8_030_261_248 * 2 / GIB
    assert found.weights == pytest.approx(weights) == pytest.approx(14.96, abs=0.01)
    assert found.overhead == pytest.approx(weights / 10 + 1)
    assert found.limit == pytest.approx(0.9 * 22888 / 1024)
    a_token = 2 * 32 * 8 * 128 * 2  # K and V, layers, KV heads, their size, bytes: 128 KiB
    assert found.tokens == int((found.limit - found.weights - found.overhead) * GIB / a_token) == 21816
    assert (found.fits, found.degree, found.sequences) == (True, 1, 2)


def test_an_fp8_cache_holds_twice_the_tokens() -> None:
    assert fit(replace(LLAMA_8B, kv_bytes=1), instance("ml.g5.2xlarge")).tokens == pytest.approx(2 * 21816, abs=1)


def test_several_gpus_share_weights_and_heads() -> None:
    found = fit(LLAMA_70B, instance("ml.g6e.12xlarge"))
    assert (found.fits, found.degree) == (True, 4)
    assert found.weights == pytest.approx(70_553_706_496 * 2 / GIB / 4)
    assert found.overhead == pytest.approx(found.weights / 10 + 2)
    assert LLAMA_70B.kv_gib(1000, 4) == pytest.approx(LLAMA_70B.kv_gib(1000, 1) / 4)


def test_kv_heads_are_copied_where_there_are_fewer_than_gpus() -> None:
    few = Need(LLAMA_8B.shape.model_copy(update={"kv_heads": 2}))
    assert few.kv_gib(1000, 2) == few.kv_gib(1000, 8) == few.kv_gib(1000, 1) / 2


@in_one_test(
    ("dtype", "gib"),
    [("fp32", 29.92), ("bf16", 14.96), ("fp8", 8.46), ("int8", 8.46), ("int4", 5.61), ("fp4", 5.61)],
)
def test_weights_by_precision(dtype: Any, gib: float) -> None:
    """Below 16 bits: 6.98e9 weights of 8 bits, or of 4 and scales, and 1.05e9 of the embeddings in 16."""
    assert replace(LLAMA_8B, dtype=dtype).weight_gib == pytest.approx(gib, abs=0.01)


def test_the_checkpoints_own_bytes_count_where_it_is_served_as_stored() -> None:
    stored = LLAMA_8B.shape.model_copy(update={"stored": 6.0 * GIB, "dtype": "int4"})
    assert Need(stored, dtype="int4").weight_gib == 6.0
    assert Need(stored, dtype="bf16").weight_gib == pytest.approx(14.96, abs=0.01)
    assert Need(stored, dtype="int4").stored_gib == 6.0


def test_a_shape_without_embeddings_supposes_a_tenth_of_them() -> None:
    plain = Need(Shape(parameters=10e9, layers=32, kv_heads=8, head_dim=128), dtype="fp8")
    assert plain.weight_gib == pytest.approx((9e9 + 2 * 1e9) / GIB)


@pytest.mark.parametrize(
    ("name", "dtype", "problem"),
    [
        ("ml.g4dn.xlarge", "bf16", "bf16 needs compute capability 8.0, but the T4 has 7.5"),
        ("ml.g5.xlarge", "fp8", "fp8 needs compute capability 8.9, but the A10G has 8.6"),
        ("ml.p5.48xlarge", "fp4", "fp4 needs compute capability 10.0, but the H100 has 9.0"),
    ],
)
def test_precisions_that_a_gpu_lacks(name: str, dtype: Any, problem: str) -> None:
    assert fit(replace(LLAMA_8B, dtype=dtype), instance(name)).problem == problem


def test_vllm_computes_a_precision_that_the_gpu_lacks_in_16_bits() -> None:
    cases: list[tuple[str, Any]] = [("ml.g5.xlarge", "fp8"), ("ml.p5.48xlarge", "fp4"), ("ml.g5.xlarge", "fp4")]
    for name, dtype in cases:
        found = fit(replace(LLAMA_8B, dtype=dtype, weight_only=True), instance(name))
        assert found.fits
        assert [line for line in found.remarks if f"computes {dtype} weights in 16 bits" in line]
    old = fit(replace(LLAMA_8B, dtype="fp8", weight_only=True), instance("ml.g4dn.xlarge"))
    assert old.problem == "fp8 needs compute capability 8.0, but the T4 has 7.5"
    best = cheapest(rank(replace(LLAMA_8B, dtype="fp8", weight_only=True)))
    assert best.instance.compute >= (8, 9)  # without remarks come first


@pytest.mark.parametrize(
    ("name", "dtype"), [("ml.g6.2xlarge", "fp8"), ("ml.g7e.2xlarge", "fp4"), ("ml.p5.4xlarge", "fp8")]
)
def test_precisions_that_a_gpu_has(name: str, dtype: Any) -> None:
    assert fit(replace(LLAMA_8B, dtype=dtype), instance(name)).fits


def test_a_context_that_the_cache_cannot_hold() -> None:
    found = fit(replace(LLAMA_8B, context=131072), instance("ml.g5.2xlarge"))
    assert found.problem == (
        "with weights of 15.0 GiB and 2.5 GiB of other memory, the 20.1 GiB of the GPU have room for a KV cache of "
        "21816 tokens, but the context has 131072"
    )
    assert (found.fits, found.sequences) == (False, 0)


def test_weights_that_are_too_many() -> None:
    found = fit(LLAMA_70B, instance("ml.g5.12xlarge"))
    assert found.problem == (
        "weights of 32.9 GiB and 5.3 GiB of other memory are more than the 20.1 GiB of each of 4 GPUs"
    )
    assert found.tokens == 0


def test_eight_gpus_without_nvlink_are_used_only_where_four_do_not_do() -> None:
    small = fit(LLAMA_8B, instance("ml.g6e.48xlarge"))
    assert (small.degree, small.remarks) == (4, ())
    large = fit(replace(LLAMA_70B, dtype="bf16", context=4096), instance("ml.g6.48xlarge"))
    assert large.degree == 8
    huge = fit(Need(shape("meta-llama/Llama-3.1-405B"), dtype="fp8", cuda=(13, 0)), instance("ml.g7e.48xlarge"))
    assert (huge.fits, huge.degree, huge.remarks) == (True, 8, ("8 GPUs without NVLink",))
    assert fit(LLAMA_8B, instance("ml.p5.48xlarge")).degree == 8


def test_degrees_divide_the_heads() -> None:
    smol = Need(shape("HuggingFaceTB/SmolLM2-135M"))  # nine heads, three of K and V
    assert fit(smol, instance("ml.g6e.12xlarge")).degree == 1
    qwen = Need(shape("Qwen/Qwen2.5-7B"))  # 28 and 4
    assert fit(qwen, instance("ml.p5.48xlarge")).degree == 4


def test_a_degree_that_was_asked_for_is_taken_as_it_is() -> None:
    assert fit(replace(LLAMA_8B, degree=2), instance("ml.g6e.12xlarge")).degree == 2
    assert (
        fit(replace(LLAMA_8B, degree=4), instance("ml.g6e.xlarge")).problem
        == "the tensor parallel degree, 4, exceeds the number of GPUs, 1"
    )


def test_a_checkpoint_that_is_large_for_the_hosts_ram_is_remarked() -> None:
    found = fit(LLAMA_8B, instance("ml.g5.xlarge"))
    assert (found.fits, found.remarks) == (True, ("little host RAM (16 GiB) for a checkpoint of 15 GiB",))


@pytest.mark.parametrize(
    ("cuda", "problem", "remarks"),
    [
        ((12, 4), "the RTX PRO Server 6000 needs CUDA 12.8, but the image has 12.4", ()),
        ((12, 8), "", ()),
        (None, "", ("needs an image with CUDA 12.8 or newer (image.cuda)",)),
    ],
)
def test_blackwell_wants_a_new_cuda(cuda: tuple[int, int] | None, problem: str, remarks: tuple[str, ...]) -> None:
    found = fit(replace(LLAMA_8B, cuda=cuda), instance("ml.g7e.2xlarge"))
    assert (found.problem, found.remarks) == (problem, remarks)


def test_a_cpu_type_holds_it_in_ram() -> None:
    need = Need(shape("HuggingFaceTB/SmolLM2-1.7B"), context=2048)
    found = fit(need, instance("ml.c7i.xlarge"))
    assert found.limit == pytest.approx(0.9 * (8 - 2))
    assert (found.fits, found.degree) == (True, 1)
    assert "RAM" in fit(need, instance("ml.c7i.large")).problem
    assert fit(need, instance("ml.m5.large")).remarks == ("no AMX, so bf16 is slow", "few cores")


@in_one_test(
    ("need", "name"),
    [
        (LLAMA_8B, "ml.g6.2xlarge"),
        (replace(LLAMA_8B, dtype="fp8"), "ml.g6.2xlarge"),  # quantized at its start: 15 GiB through 16 GiB of RAM
        (replace(LLAMA_8B, context=131072), "ml.g6e.xlarge"),
        (LLAMA_70B, "ml.g6e.12xlarge"),
        (replace(LLAMA_70B, dtype="fp8", cuda=(13, 0)), "ml.g7e.8xlarge"),
        (Need(shape("meta-llama/Llama-3.1-405B"), dtype="fp8"), "ml.p5.48xlarge"),
    ],
)
def test_the_cheapest_that_fits(need: Need, name: str) -> None:
    assert cheapest(rank(need)).instance.name == name


def test_the_cheapest_cpu_type() -> None:
    assert (
        cheapest(rank(Need(shape("HuggingFaceTB/SmolLM2-135M"), context=2048), cpu=True)).instance.name
        == "ml.c7i.xlarge"
    )


def test_advice_is_in_order() -> None:
    ranked = rank(LLAMA_8B)
    fits = [one.fits for one in ranked]
    assert fits == sorted(fits, reverse=True)
    clean = [one for one in ranked if one.fits and not one.remarks]
    assert [one.price.rank for one in clean] == sorted(one.price.rank for one in clean)
    assert {one.instance.gpus == 0 for one in ranked} == {False}


def test_nothing_fits() -> None:
    giant = Need(Shape(parameters=9e12, layers=100, kv_heads=8, head_dim=128))
    with pytest.raises(DoesNotFit, match=r"on the largest, ml\.p6-b300\.48xlarge, weights of") as caught:
        cheapest(rank(giant))
    assert caught.value.status == 2


def test_a_refusal_says_what_would_do() -> None:
    need = replace(LLAMA_8B, context=32768)
    error = too_small(fit(need, instance("ml.g5.2xlarge")), rank(need))
    assert str(error).startswith("instance.type: ml.g5.2xlarge: with weights of 15.0 GiB")
    assert error.advice == (
        "Set model.context to 21504 or less, or use ml.g6e.xlarge ($2-4/h), ml.g6e.2xlarge ($2-4/h), "
        "ml.g6e.4xlarge ($2-4/h), or set instance.unchecked: true to use it anyway."
    )


def taken(name: str) -> Fit:
    return fit(LLAMA_8B, instance(name))


def test_the_table_shows_one_type_a_family_and_the_taken_one() -> None:
    table = rows(Candidates(LLAMA_8B, "known model", rank(LLAMA_8B), taken("ml.g5.48xlarge")))
    assert [row[0] for row in table] == [
        "ml.g6.2xlarge", "ml.g5.2xlarge", "ml.g6e.xlarge", "ml.g6.12xlarge", "ml.g5.12xlarge", "ml.p5.4xlarge",
        "ml.g5.48xlarge",
    ]  # fmt: skip
    assert {len(row) for row in table} == {len(COLUMNS)}
    assert table[0] == ("ml.g6.2xlarge", "1 x L4 22 GiB", "1", "15.0", "2.7", "2.5", "21816", "2", "$1-2/h", "")
    assert table[-1][-1] == "chosen"


def test_the_table_says_why_the_taken_one_does_not_fit() -> None:
    table = rows(Candidates(LLAMA_70B, "known model", rank(LLAMA_70B), fit(LLAMA_70B, instance("ml.g5.12xlarge"))))
    assert table[-1][-1].startswith("chosen; weights of 32.9 GiB")


@pytest.mark.parametrize("width", [80, 139, 140, 180])
def test_the_table_fits_the_terminal_and_breaks_no_name(width: int) -> None:
    tight = fit(LLAMA_70B, instance("ml.g5.12xlarge"))
    candidates = Candidates(LLAMA_70B, "known model", rank(LLAMA_70B), tight)
    console = Console(file=io.StringIO(), width=width)
    print_candidates(console, candidates, TABLE)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    words = {word for row in rows(candidates) for cell in row[:-1] for word in cell.split()}
    assert words <= set(shown.split())
    assert max(len(line) for line in shown.splitlines() if not line.startswith("ml.g5.12xlarge: ")) <= width
    assert tight.problem.split()[-1] in shown


def test_the_title_says_what_was_asked() -> None:
    assert title(Candidates(LLAMA_8B, "known model", (), None)) == (
        "8.03 billion weights in bf16 (known model), context 8192: 15.0 GiB, and 0.125 MiB per token"
    )


# -- engines and copies against GPUs, and the advice on growth ---------------------------------------------------------


FOUR = {"type": "ml.g6e.12xlarge"}
"""Four GPUs."""


def resolution(**changes: Any) -> Resolution:
    options = {**GIVEN["options"], **changes.pop("options", {})}
    return resolve(spec(**{"model": {**GIVEN["model"], "context": 8192}, **changes, "options": options}), "us-east-1")


def component(**changes: Any) -> list[dict[str, Any]]:
    return [{"name": "chat", **changes}]


@in_one_test(
    ("options", "degree", "idle"),
    [
        ({}, 4, None),
        ({"replicas": 4}, 1, None),
        ({"replicas": "auto"}, 1, None),
        ({"replicas": 2, "tensor_parallel_degree": 2}, 2, None),
        ({"replicas": "auto", "tensor_parallel_degree": 2}, 2, None),
        ({"replicas": 3}, 1, 1),
        ({"tensor_parallel_degree": 1}, 1, 3),
        ({"replicas": 2, "tensor_parallel_degree": "max"}, 4, None),
    ],
)
def test_replicas_divide_an_instances_gpus(options: dict[str, Any], degree: int, idle: int | None) -> None:
    found = resolution(instance=FOUR, options=options).decision
    assert found.tensor_parallel == degree
    said = [sentence for sentence in found.warnings if "stay idle" in sentence]
    assert len(said) == (idle is not None)
    assert all(f"{idle} of 4 GPUs" in sentence for sentence in said)


@in_one_test(
    ("changes", "message"),
    [
        ({"options": {"replicas": 5}}, "options.replicas: 5 engines of 1 GPU need 5 GPUs, but ml.g6e.12xlarge has 4"),
        ({"options": {"replicas": 3, "tensor_parallel_degree": 2}}, "3 engines of 2 GPUs need 6 GPUs"),
        ({"options": {"replicas": 2}, "components": component()}, "need 2 GPUs, but component chat has 1"),
        (
            {"options": {"tensor_parallel_degree": 2}, "components": component()},
            "_parallel_degree: 1 engine of 2",
        ),
        ({"components": component(copies=3, accelerators=2)}, r"components\[\].copies: the initial copies need 6 GPUs"),
        (
            {"instance": {**FOUR, "managed": {"max": 2}}, "components": component(copies=9)},
            r"need 9 GPUs, but 2 x ml.g6e.12xlarge \(instance.managed.max\) have 8",
        ),
    ],
)
def test_engines_and_copies_without_gpus_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        resolution(**{"instance": FOUR, **changes})


def test_copies_with_engines_of_their_own_fit() -> None:
    found = resolution(
        instance={**FOUR, "managed": {"max": 2}},
        options={"replicas": 2},
        components=component(copies=4, accelerators=2),
        scaling={"max": 6, "concurrency": 8},
    ).decision
    assert found.tensor_parallel == 1
    assert any(
        "scaling.max: with all components at their maximum, 12 GPUs are needed" in sentence
        for sentence in found.warnings
    )


def test_replicas_have_the_front_end_that_knows_them() -> None:
    said = spec(options={**GIVEN["options"], "replicas": 2}, instance=FOUR)
    assert environment(said, resolve(said, "us-east-1").decision)["LMI_FRONT"] == "embedded"
    said = said.model_copy(update={"environment": {"LMI_FRONT": "djl"}})
    with pytest.raises(SpecError, match=r"environment.LMI_FRONT and options.replicas contradict"):
        environment(said, resolve(said, "us-east-1").decision)


@in_one_test(
    ("changes", "sentence"),
    [
        (
            {"instance": {"type": "ml.g6e.xlarge"}},
            "ml.g6e.xlarge has room for 22 concurrent requests of the full context. For more",
        ),
        (
            {"instance": {"type": "ml.g6e.12xlarge"}, "options": {"replicas": "auto"}},
            "ml.g6e.12xlarge has room for 88 concurrent requests of the full context. For more, use more instances",
        ),
        (  # one engine on all GPUs
            {
                "instance": {"type": "ml.g6.48xlarge"},
                "options": {"replicas": "auto", "tensor_parallel_degree": "max"},
            },
            "ml.g6.48xlarge has room for 55 concurrent requests",
        ),
        ({"instance": {"type": "ml.g6.xlarge"}}, "or set a shorter model.context"),
        ({"instance": FOUR}, "A single instance has no spare"),
        (
            {"instance": FOUR, "routing": {"concurrency_threshold": 8}, "scaling": {"max": 6, "concurrency": 8}},
            "Dynamo on HyperPod routes by each worker's cache",
        ),
    ],
)
def test_advice_follows_from_the_specification(changes: dict[str, Any], sentence: str) -> None:
    found = resolution(**changes)
    options = {**GIVEN["options"], **changes.get("options", {})}
    said = advice(spec(**{**changes, "options": options}), found.decision, found.candidates)
    assert any(sentence in text for text in said), said


def test_a_model_beyond_one_machine_is_sent_to_dynamo() -> None:
    shape = {"parameters": 3e12, "layers": 120, "kv_heads": 8, "head_dim": 128}
    with pytest.raises(DoesNotFit) as raised:
        resolution(model={"id": "org/huge", "shape": shape})
    assert "Dynamo on HyperPod can" in raised.value.advice


# -- what `plan` counts for models of 2025 and 2026, beside the sizes that others publish ------------------------------
# A size is one of
# * the bytes in the checkpoint's own index (`metadata.total_size`), or the GB of its files that a reader of it tells,
# * the number of weights that the model's card, its paper or vLLM's recipes (vllm-project/recipes, models/, read on
#   2026-11-24) give, times the bytes of the checkpoint's precision. "Not looked up again": no page was at hand.
# `deploy/data/models.json` has numbers of weights that transformers counted, and dimensions; no bytes.


_GIB = 1 << 30
_RECIPES = "vllm-project/recipes: parameter_count"

PUBLISHED: tuple[tuple[str, float, str], ...] = (
    (
        "openai/gpt-oss-20b",
        13_761_264_768,
        "total_size of its index",
    ),
    ("openai/gpt-oss-120b", 60.8 * _GIB, "OpenAI's model card (arXiv 2508.10925), as fitmygpu.com tells it"),
    ("deepseek-ai/DeepSeek-V3", 688_586_727_753, "total_size of its index"),
    (
        "deepseek-ai/DeepSeek-V3.1",
        685e9,
        "DeepSeek's card: 671 billion weights, and 14 of a further token's layer; FP8",
    ),
    ("deepseek-ai/DeepSeek-V3.2", 671e9, f"{_RECIPES}, without the layer of a further token; FP8"),
    ("meta-llama/Llama-4-Scout-17B-16E-Instruct", 109e9 * 2, f"{_RECIPES}"),
    ("meta-llama/Llama-4-Maverick-17B-128E-Instruct", 400e9 * 2, "Meta's 400B, not looked up again"),
    ("meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8", 400e9, "Meta's 400B, not looked up again; FP8"),
    ("Qwen/Qwen3-32B-FP8", 32.8e9, "Qwen's 32.8B, not looked up again; FP8"),
    ("Qwen/Qwen3-235B-A22B-Instruct-2507", 235e9 * 2, f"{_RECIPES}"),
    ("Qwen/Qwen3-Coder-480B-A35B-Instruct", 480e9 * 2, f"{_RECIPES}"),
    ("Qwen/Qwen3-Next-80B-A3B-Instruct", 80e9 * 2, f"{_RECIPES}"),
    ("Qwen/Qwen3-Next-80B-A3B-Instruct-FP8", 80e9, f"{_RECIPES}; FP8"),
    ("Qwen/Qwen3-VL-235B-A22B-Instruct", 235e9 * 2, _RECIPES),
    ("Qwen/Qwen3.5-27B", 27e9 * 2, _RECIPES),
    ("Qwen/Qwen3.5-35B-A3B", 35e9 * 2, _RECIPES),
    ("Qwen/Qwen3.5-122B-A10B", 122e9 * 2, _RECIPES),
    ("Qwen/Qwen3.5-397B-A17B", 397e9 * 2, "the model's name"),
    ("google/gemma-3-27b-it", 27.4e9 * 2, "the hub's count, in this table since 2025"),
    ("google/gemma-4-31B-it", 31e9 * 2, _RECIPES),
    ("google/gemma-4-26B-A4B-it", 26e9 * 2, _RECIPES),
    ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", 24e9 * 2, "the model's name"),
    ("zai-org/GLM-4.5", 358e9 * 2, _RECIPES),
    ("zai-org/GLM-4.5-FP8", 358e9, f"{_RECIPES}; FP8"),
    ("zai-org/GLM-4.6", 357e9 * 2, _RECIPES),
    ("zai-org/GLM-4.7", 358e9 * 2, _RECIPES),
    ("zai-org/GLM-5", 754e9 * 2, "the card of a quantized copy of GLM-5.1: 754 billion, 1.4 TB in BF16"),
    ("moonshotai/Kimi-K2-Instruct", 1026.5e9, "the hub's count of weights, as llmrun.dev repeats it; FP8"),
    ("moonshotai/Kimi-K2-Thinking", 600e9, f"{_RECIPES.replace('parameter_count', 'vram_minimum_gb')}; INT4 experts"),
    ("MiniMaxAI/MiniMax-M2", 230e9, f"{_RECIPES}; FP8"),
    ("MiniMaxAI/MiniMax-M2.5", 228.7e9, "the hub's count of weights, as llmrun.dev repeats it; FP8"),
    ("ByteDance-Seed/Seed-OSS-36B-Instruct", 36e9 * 2, _RECIPES),
    ("Qwen/Qwen3-4B-Instruct-2507", 4.0e9 * 2, "the model's card"),
    ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", 70.6e9 * 2, "the hub's count of Llama-3.3-70B-Instruct"),
    ("zai-org/GLM-5-FP8", 754e9, "the card of a quantized copy of GLM-5.1: 754 billion; FP8"),
    ("mistralai/Ministral-3-3B-Base-2512", (3.4e9 + 0.4e9) * 2, "the model's card: text and vision"),
    ("mistralai/Ministral-3-8B-Base-2512", (8.4e9 + 0.4e9) * 2, "the model's card: text and vision"),
    ("mistralai/Ministral-3-14B-Base-2512", (13.5e9 + 0.4e9) * 2, "the model's card: text and vision"),
    ("XiaomiMiMo/MiMo-V2-Flash", 309e9, f"{_RECIPES}; FP8"),
)


def test_there_are_models_enough() -> None:
    assert len({name for name, _, _ in PUBLISHED}) == len(PUBLISHED) >= 25


@in_one_test(("name", "published", "source"), PUBLISHED, ids=lambda value: value if "/" in str(value) else "")
def test_weights_are_within_a_twentieth_of_what_is_published(name: str, published: float, source: str) -> None:
    shape = shape_from_table(name)
    assert shape is not None
    need = Need(shape, shape.dtype or "bf16")
    assert need.weight_gib * _GIB == pytest.approx(published, rel=0.05), source


@in_one_test(("name", "published", "source"), PUBLISHED, ids=lambda value: value if "/" in str(value) else "")
def test_so_are_those_of_the_dimensions_alone(name: str, published: float, source: str) -> None:
    """As for a model that nobody listed, whose files are not at hand."""
    rows = table("models")["models"]
    row = next(row for row in rows if name in row["names"])
    shape = shape_of_config(config_of(row, rows))
    assert Need(shape, shape.dtype or "bf16").weight_gib * _GIB == pytest.approx(published, rel=0.05), source


# -- degrees that an engine refuses at load (vllm#17569, vllm#25292, sglang#8344) ------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "degree", "experts"),
    [
        ("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", "ml.p5.48xlarge", 4, False),  # 1,536 / 8 is 1.5 blocks of 128
        (
            "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8",
            "ml.p5.48xlarge",
            8,
            True,
        ),  # 2,560 / 8: 2.5 blocks; too large for 4
        ("MiniMaxAI/MiniMax-M2", "ml.p5.48xlarge", 4, False),
        ("Qwen/Qwen3-30B-A3B-FP8", "ml.g6e.12xlarge", 2, False),  # 768 / 4: 1.5 blocks
        ("Qwen/Qwen3-4B-FP8", "ml.p5.48xlarge", 4, False),  # a dense layer: 9,728 / 8 is 9.5 blocks
        ("Qwen/Qwen3-Next-80B-A3B-Instruct-FP8", "ml.p5.48xlarge", 4, False),  # its shared expert: 512 / 8
        ("deepseek-ai/DeepSeek-V3.1", "ml.p5en.48xlarge", 8, False),  # 2,048 / 8: 2 blocks
        ("zai-org/GLM-5-FP8", "ml.p5en.48xlarge", 8, False),
        ("zai-org/GLM-4.5-Air-FP8", "ml.p5.48xlarge", 8, False),  # a scale for each row: no blocks
        ("openai/gpt-oss-120b", "ml.p5.48xlarge", 8, False),  # engines pad its experts
    ],
)
def test_degrees_leave_the_blocks_of_weights_whole(name: str, kind: str, degree: int, experts: bool) -> None:
    known = shape_from_table(name)
    assert known is not None
    found = fit(Need(known, known.dtype or "bf16", 16384, weight_only=True, experts=None), instance(kind))
    assert (found.fits, found.degree, found.experts, found.remarks) == (True, degree, experts, ())


@pytest.mark.parametrize(
    ("config", "splits", "experts"),
    [
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, [5, 16], None),
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}, [5, 16], None),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}, [20, 64], None),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [256, 256]}}, [1, 8], None),  # 2.5 blocks
        ({"quantization_config": {"quant_method": "fp8"}}, [640, 2048], None),
        ({}, [640, 2048], None),
        ({"num_experts": 4, "moe_intermediate_size": 96}, [2048], 96),
        ({"num_experts": 4, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 48}, [48, 2048], 96),
        (
            {"model_type": "qwen3_next", "linear_num_key_heads": 6, "linear_num_value_heads": 12},
            [6, 12, 640, 2048],
            None,
        ),
    ],
)
def test_what_a_degree_must_divide(config: dict[str, Any], splits: list[int], experts: int | None) -> None:
    of = {"model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16, "head_dim": 128, "vocab_size": 8}
    found = shape_of_config({**of, "intermediate_size": 640, "num_hidden_layers": 4, **config})
    assert (found.splits, found.expert_splits) == (splits, experts)


@pytest.mark.parametrize(
    ("options", "type", "variables", "warning"),
    [
        ({}, "ml.p5.48xlarge", {"DEGREE": "8", "PARALLEL": "true"}, ""),
        ({"tensor_parallel_degree": 8}, "ml.p5.48xlarge", {"DEGREE": "8", "PARALLEL": "true"}, ""),
        (
            {"tensor_parallel_degree": 8, "enable_expert_parallel": True},
            "auto",
            {"DEGREE": "8", "PARALLEL": "true"},
            "",
        ),
        ({"enable_expert_parallel": False}, "ml.p5en.48xlarge", {"DEGREE": "4"}, ""),
        (
            {"tensor_parallel_degree": 8, "enable_expert_parallel": False},
            "ml.p5.48xlarge",
            {"DEGREE": "8", "PARALLEL": "false"},
            "does not divide each expert into whole blocks",
        ),
        (
            {"tensor_parallel_degree": 3},
            "ml.p6-b300.48xlarge",
            {"DEGREE": "3"},
            "nor the number of KV heads (8) divides the other",
        ),
        (
            {"tensor_parallel_degree": 8, "llm_engine": "trtllm"},
            "ml.p5.48xlarge",
            {"DEGREE": "8"},
            "options.enable_expert_parallel",
        ),
        ({"llm_engine": "auto"}, "ml.p5.48xlarge", {"DEGREE": "8", "PARALLEL": "true"}, "if the image has vLLM"),
        (
            {"llm_engine": "auto", "enable_expert_parallel": True},
            "ml.p5.48xlarge",
            {"DEGREE": "8", "PARALLEL": "true"},
            "",
        ),
    ],
)
def test_the_plan_leaves_experts_whole_or_warns(
    options: dict[str, Any], type: str, variables: dict[str, str], warning: str
) -> None:
    model = {"id": "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8", "context": 4096}
    given = spec(model=model, options={"llm_engine": "vllm", **options}, instance={"type": type})
    found = resolve(given, "us-east-1").decision
    built = environment(given, found)
    names = {"OPTION_TENSOR_PARALLEL_DEGREE": "DEGREE", "OPTION_ENABLE_EXPERT_PARALLEL": "PARALLEL"}
    got = {short: built[name] for name, short in names.items() if name in built}
    assert got == {**variables, **({"PARALLEL": "false"} if options.get("enable_expert_parallel") is False else {})}
    said = [text for text in found.warnings if "tensor parallel degree" in text]
    assert bool(said) == bool(warning), said
    assert all(warning in text for text in said)
