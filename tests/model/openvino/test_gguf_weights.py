"""GGUF files made into OpenVINO directories that hold the file's own weights.

SmolLM2's answers are compared with transformers' (`exact` in the golden file). A model of two small layers with
random weights stands for the other kinds of quantization: its bytes are made here, no real file of each is at hand.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from handler.core import child_processes
from handler.core.errors import ConfigError
from handler.core.values import Delta, Finish
from handler.engines import downloads
from handler.engines.openvino import gguf as gguf_graph
from handler.engines.openvino import gguf as gguf_weights
from handler.engines.openvino.engine import properties
from handler.engines.openvino.gguf import converted_model, default_weights, exact_blocks, writable, write_model
from tests.checkpoints.small_gguf import FEED, HEADS, HIDDEN, LAYERS, write_small
from tests.doubles.downloads import serve_hub
from tests.process.engines.test_conformance import ids as ids_of
from tests.process.engines.test_conformance import start
from tests.servers import ANSWER_LIMIT, serve

pytestmark = [pytest.mark.model, pytest.mark.long]

GOLDEN = Path(__file__).parents[2] / "golden" / "engines" / "smollm2_f32_greedy.json"
CASES = json.loads(GOLDEN.read_text())["cases"]
F32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "EXECUTION_MODE_HINT": "ACCURACY"}


@pytest.fixture(scope="module")
def f32_model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Converted anew, whatever the cache has."""
    link = tmp_path_factory.mktemp("demo") / demo_model.name
    link.symlink_to(demo_model)
    return converted_model(link, tmp_path_factory.mktemp("cache"), "exact")


def greedy(model: Path) -> Iterator[tuple[list[int], list[float]]]:
    """The ids and log-probs of the answers to the golden file's prompts."""
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = len(CASES)
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(model), scheduler, "CPU", F32)
    handles = []
    for key, case in enumerate(CASES):
        config = openvino_genai.GenerationConfig(max_new_tokens=32, logprobs=1, eos_token_id=2, stop_token_ids={2})
        prompt = openvino.Tensor(np.array([case["prompt_ids"]], dtype=np.int64))
        handles.append(pipeline.add_request(key, prompt, config))
    while pipeline.has_non_finished_requests():
        pipeline.step()
    for handle in handles:
        [output] = handle.read_all()
        yield output.generated_ids, output.generated_log_probs


@pytest.mark.nightly
def test_answers_as_transformers_does_with_the_same_file(f32_model: Path) -> None:
    for (ids, logprobs), case in zip(greedy(f32_model), CASES, strict=True):
        assert list(ids) == case["exact"]["ids"], case["prompt"]
        assert logprobs == pytest.approx(case["exact"]["logprobs"], abs=1e-3)


@pytest.mark.nightly
def test_the_tokenizer_is_the_files(f32_model: Path, demo_model: Path) -> None:
    from openvino_genai import Tokenizer

    made, own = Tokenizer(str(f32_model)), Tokenizer(str(demo_model))
    assert made.chat_template == own.chat_template != ""
    assert made.get_vocab() == own.get_vocab()
    for name in ("get_bos_token_id", "get_eos_token_id", "get_pad_token_id"):
        assert getattr(made, name)() == getattr(own, name)()
    for case in CASES:
        assert made.encode(case["prompt"]).input_ids.data[0].tolist() == case["prompt_ids"]
        assert made.decode(case["prompt_ids"]) == own.decode(case["prompt_ids"])


def test_says_what_an_engine_asks_of_a_directory(exact_demo: Path) -> None:
    config = json.loads((exact_demo / "config.json").read_text())
    assert config["max_position_embeddings"] == 8192
    assert json.loads((exact_demo / "generation_config.json").read_text())["eos_token_id"] == [0, 2, 4]


@pytest.mark.parametrize("name", ["eot", "eom"])
def test_an_answer_ends_at_the_headers_end_of_a_turn(tmp_path: Path, name: str) -> None:
    def answer(*keys: str, end: int = 0) -> list[Delta]:
        source = tmp_path / f"{len(keys)}.gguf"
        write_small(source, Kind.Q8_0, keys={f"tokenizer.ggml.{key}_token_id": end for key in keys})
        driver = start("openvino", converted_model(source, tmp_path / "cache", "exact"))
        try:
            return driver.one("abc", max_new_tokens=4)
        finally:
            driver.engine.close()

    first, *others = ids_of(answer())
    assert others, "nothing ends it"
    deltas = answer(name, end=first)
    assert (ids_of(deltas), deltas[-1].finish) == ([first], Finish.EOS)


def test_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, cache = tmp_path / "small.gguf", tmp_path / "cache"
    write_small(source, Kind.Q4_1)
    made = converted_model(source, cache, "exact")
    monkeypatch.setattr(child_processes, "run", None)
    assert converted_model(source, cache, "exact") == made
    assert {path.name for path in cache.iterdir()} == {made.name, "lock"}
    assert "scratch" not in {path.name for path in made.iterdir()}


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\0\0\0", b"PK\x03\x04" * 99])
def test_what_is_no_gguf_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.gguf"):
        converted_model(path, tmp_path / "cache", "exact")
    with pytest.raises(ConfigError, match=r"absent\.gguf"):
        converted_model(tmp_path / "absent.gguf", tmp_path / "cache", "exact")
    assert not (tmp_path / "cache").exists()


# -- a small model with random weights -------------------------------------------------------------------------------


def weights_of(model: Path) -> list[Any]:
    """The graph's matrices and vectors, computed."""
    import openvino
    from openvino import opset13

    graph = openvino.Core().read_model(model)
    constants = [node for node in graph.get_ops() if node.get_type_name() == "Constant"]
    vectors = [
        n.data for n in constants if n.data.dtype == np.float32 and n.data.size in (HIDDEN, HIDDEN // HEADS // 2)
    ]
    ports = [(n, {"MatMul": 1, "Gather": 0}.get(n.get_type_name())) for n in graph.get_ordered_ops()]
    sources = [node.input_value(port) for node, port in ports if port is not None]
    matrices = [port for port in sources if port.get_partial_shape().is_static and len(port.get_shape()) == 2]
    results = [opset13.result(port) for port in matrices if port.get_shape()[1] in (HIDDEN, FEED)]
    return [*vectors, *openvino.compile_model(openvino.Model(results, [], "weights"), "CPU", F32)({}).values()]


def changes(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "become" in record.getMessage()]


def types_of_products(model: Path, properties: dict[str, str]) -> list[str]:
    """The types of the weights that the compiled graph multiplies by.

    A plugin that unpacked them would need several times the memory, and be slower.
    """
    import openvino

    compiled = openvino.Core().compile_model(model, "CPU", properties)
    nodes = [(n, n.get_rt_info()["layerType"].astype(str)) for n in compiled.get_runtime_model().get_ordered_ops()]
    return [n.input_value(1).get_element_type().get_type_name() for n, kind in nodes if kind == "FullyConnected"]


KINDS = {Kind.Q4_0: "u4", Kind.Q4_1: "u4", Kind.Q4_K: "u4", Kind.Q8_0: "i8", Kind.Q6_K: "f32", Kind.F16: "f32"}


@pytest.mark.parametrize(("kind", "held_as"), KINDS.items())
def test_every_kind_that_the_reader_knows_is_exact(tmp_path: Path, kind: Kind, held_as: str) -> None:
    source = tmp_path / "small.gguf"
    write_small(source, kind)
    path = converted_model(source, tmp_path / "cache", "exact") / "openvino_model.xml"
    held = weights_of(path)
    # Of each layer: queries, keys and values; output; gate and up; down. And the logits.
    assert types_of_products(path, F32) == [held_as] * (4 * LAYERS + 1)
    tensors = gguf.GGUFReader(source).tensors
    assert sum(weight.size for weight in held) == sum(int(t.n_elements) for t in tensors) + HIDDEN // HEADS // 2
    random = np.random.default_rng(7)
    for columns in (HIDDEN, FEED):
        rows = np.concatenate([weight.reshape(-1, columns) for weight in held if weight.size % columns == 0])
        marks = random.normal(size=columns)  # what they make of a row tells it from others
        order = np.argsort(rows @ marks)
        for tensor in tensors:  # in which order a matrix has its rows is tested by what SmolLM2 answers
            exact = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            if exact.shape[-1] == columns:
                exact = exact.reshape(-1, columns)
                after = np.searchsorted(rows @ marks, exact @ marks, sorter=order)
                near = (rows[order[np.clip(after + by, 0, len(order) - 1)]] for by in (-1, 0, 1))
                apart = np.min([np.abs(row - exact).max(-1) for row in near], axis=0)
                assert apart.max() <= np.abs(exact).max() * 2e-7, tensor.name


@pytest.mark.parametrize("weight", [0.0, 0.25])
def test_a_group_of_equal_weights_is_exact(weight: float) -> None:
    values = np.full((1, 64), weight, np.float32)
    data = gguf.quants.quantize(values, Kind.Q4_1)
    tensor = SimpleNamespace(tensor_type=Kind.Q4_1, data=data)
    form, (whole, zero, scale) = exact_blocks(tensor) or pytest.fail("not kept in 4 bits")
    assert form == "u4"
    assert np.array_equal(((whole - zero) * scale).reshape(1, -1), values)


@pytest.mark.parametrize(("kind", "held_as"), [*list(KINDS.items())[:4], (Kind.Q6_K, "i8")])
@pytest.mark.nightly
def test_blocks_take_8_bits_at_most(tmp_path: Path, kind: Kind, held_as: str, caplog: pytest.LogCaptureFixture) -> None:
    source = tmp_path / "small.gguf"
    write_small(source, kind)
    with caplog.at_level("INFO"):
        path = converted_model(source, tmp_path / "cache", "blocks") / "openvino_model.xml"
    assert types_of_products(path, {}) == [held_as] * (4 * LAYERS + 1)
    assert properties("auto", path.parent) == {}
    said = (
        ["the file's Q6_K weights become 8-bit, because OpenVINO does not support their format"]
        if kind is Kind.Q6_K
        else []
    )
    assert changes(caplog) == said


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q4_K, Kind.Q6_K, Kind.Q8_0])
@pytest.mark.nightly
def test_rows_have_one_scale_each(tmp_path: Path, kind: Kind, caplog: pytest.LogCaptureFixture) -> None:
    import openvino

    source = tmp_path / "small.gguf"
    write_small(source, kind)
    with caplog.at_level("INFO"):
        path = converted_model(source, tmp_path / "cache", "rows") / "openvino_model.xml"
    assert properties("auto", path.parent) == {"INFERENCE_PRECISION_HINT": "f32"}
    assert types_of_products(path, properties("auto", path.parent)) == ["i8"] * (4 * LAYERS + 1)
    assert changes(caplog) == [
        f"the file's {kind.name} weights become 8-bit with one scale per row; option.dtype=fp32 would keep them exact"
    ]
    wholes = [node.data for node in openvino.Core().read_model(path).get_ops() if node.get_type_name() == "Constant"]
    assert {whole.shape[1] for whole in wholes if whole.dtype == np.int8} == {1}  # a group for each row
    held = [weight for weight in weights_of(path) if weight.shape == (258, HIDDEN)]
    for weight, name in zip(held, ("token_embd.weight", "output.weight"), strict=True):
        [tensor] = [tensor for tensor in gguf.GGUFReader(source).tensors if tensor.name == name]
        exact = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        step = np.abs(exact).max(-1, keepdims=True) / 127
        assert np.all(np.abs(weight - exact) <= step * 0.51), name


@pytest.mark.nightly
def test_a_matrix_of_many_rows_is_quantized_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "small.gguf"
    write_small(source, Kind.Q4_1)
    whole = converted_model(source, tmp_path / "cache", "rows")
    small = "from handler.engines.openvino import gguf as gguf_graph; gguf_graph._CHUNK = gguf_graph._CHECKED = 100\n"
    monkeypatch.setattr(gguf_weights, "SCRIPT", small + gguf_weights.SCRIPT)
    parts = converted_model(source, tmp_path / "other", "rows")
    assert (parts / "openvino_model.bin").read_bytes() == (whole / "openvino_model.bin").read_bytes()


GIB = 1 << 30


@pytest.mark.parametrize(
    ("kind", "size", "expected"),
    [(Kind.Q4_1, GIB, "rows"), (Kind.Q8_0, GIB, "rows"), (Kind.F16, GIB, "blocks"), (Kind.Q4_1, GIB + 1, "blocks")],
)
def test_the_default_form_of_weights(tmp_path: Path, kind: Kind, size: int, expected: str) -> None:
    source = tmp_path / "small.gguf"
    write_small(source, kind)
    os.truncate(source, size)  # sparse
    assert default_weights(source) == expected


@pytest.mark.nightly
def test_weights_of_16_bits_stay_as_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import openvino

    source = tmp_path / "small.gguf"
    write_small(source, Kind.F16)
    with caplog.at_level("INFO"):
        path = converted_model(source, tmp_path / "cache", "blocks") / "openvino_model.xml"
    constants = [node for node in openvino.Core().read_model(path).get_ops() if node.get_type_name() == "Constant"]
    assert sum(node.data.dtype == np.float16 and node.data.size > 1000 for node in constants) == 2 + 7 * LAYERS
    assert changes(caplog) == []


@pytest.mark.nightly
def test_a_result_beside_the_file_must_be_complete(tmp_path: Path) -> None:
    source = tmp_path / "small.gguf"
    write_small(source, Kind.Q8_0)
    made = converted_model(source, tmp_path / "converted", "blocks")
    assert converted_model(source, tmp_path / "cache", "blocks") == made
    (made / "openvino_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"openvino_model\.bin is an empty file"):
        converted_model(source, tmp_path / "cache", "blocks")


@pytest.mark.nightly
def test_makers_that_start_together_share_one_result(tmp_path: Path) -> None:
    source = tmp_path / "small.gguf"
    write_small(source, Kind.Q4_1)
    with ThreadPoolExecutor(3) as pool:
        models = list(pool.map(lambda _: converted_model(source, tmp_path / "cache", "blocks"), range(3)))
    assert models == [models[0]] * 3


@pytest.mark.parametrize(("name", "shape"), [
    ("rope_freqs.weight", HIDDEN), ("blk.0.attn_q.bias", HIDDEN), ("blk.0.ffn_extra.weight", (32, 64)),
    ("blk.0.ffn_up_exps.weight", (2, 32, 64)),
])  # fmt: skip
@pytest.mark.nightly
def test_weights_that_the_graph_leaves_out_are_refused(tmp_path: Path, name: str, shape: Any) -> None:
    source = tmp_path / "small.gguf"
    extra = np.full(shape, 0.5, np.float32)
    write_small(source, Kind.Q8_0, more={name: extra})
    with pytest.raises(ConfigError, match=name):
        converted_model(source, tmp_path / "cache", "exact")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


FREQUENCIES = 1 / 10000 ** (np.arange(0, 64, 2) / 64)
DIVISORS = np.geomspace(1, 8, 32, dtype=np.float32)


@pytest.mark.parametrize(("keys", "more", "expected"), [
    ({}, {"rope_freqs.weight": DIVISORS}, FREQUENCIES / DIVISORS),
    ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, {}, FREQUENCIES / 4),
    ({"llama.rope.scale_linear": 4.0}, {}, FREQUENCIES / 4),
    ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, {}, FREQUENCIES),
])  # fmt: skip
@pytest.mark.nightly
def test_positions_are_scaled_as_the_file_says(
    tmp_path: Path, keys: dict[str, Any], more: dict[str, Any], expected: Any
) -> None:
    source = tmp_path / "small.gguf"
    write_small(source, Kind.Q8_0, keys=keys, more=more)
    held = weights_of(converted_model(source, tmp_path / "cache", "blocks") / "openvino_model.xml")
    found = [weight.ravel() for weight in held if weight.size == len(expected)]
    assert found
    assert all(np.allclose(weight, expected, 1e-6, 0) for weight in found)


@pytest.mark.parametrize(("keys", "message"), [
    ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "not support the position scaling .yarn"),
    ({"llama.rope.dimension_count": 32}, "always rotates all 64 dimensions, not 32"),
])  # fmt: skip
def test_positions_that_the_graph_cannot_rotate_are_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    source = tmp_path / "small.gguf"
    write_small(source, Kind.Q8_0, keys=keys)
    with pytest.raises(downloads.UnknownLayout, match=message):
        converted_model(source, tmp_path / "cache", "exact")


def test_norms_that_are_nearly_equal_are_not_mistaken(tmp_path: Path) -> None:
    source = tmp_path / "small.gguf"
    write_small(source, Kind.Q8_0, spread=1e-4)
    held = weights_of(converted_model(source, tmp_path / "cache", "exact") / "openvino_model.xml")
    norms = [weight.ravel() for weight in held if weight.size == HIDDEN]
    for tensor in gguf.GGUFReader(source).tensors:
        assert "norm" not in tensor.name or any(np.array_equal(norm, tensor.data) for norm in norms), tensor.name


def test_matrices_that_differ_in_one_row_are_not_mistaken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row is none of those that are compared first, and the file has the layers in another order than the graph."""
    source, row = tmp_path / "small.gguf", 100
    write_small(source, Kind.Q8_0)
    swapped = (
        source.read_bytes().replace(b"blk.0.", b"blk.x.").replace(b"blk.1.", b"blk.0.").replace(b"blk.x.", b"blk.1.")
    )
    source.write_bytes(swapped)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(source, "r+").tensors}
    up = [tensors[f"blk.{layer}.ffn_up.weight"].data for layer in range(LAYERS)]
    up[0][:row], up[0][row + 1 :] = up[1][:row], up[1][row + 1 :]
    monkeypatch.setattr(gguf_graph, "_CHECKED", 16)
    write_model(source, tmp_path / "model", "exact")
    held = [w for w in weights_of(tmp_path / "model" / "openvino_model.xml") if w.shape == (2 * FEED, HIDDEN)]
    assert len(held) == LAYERS
    for weights, data in zip(held, up, strict=True):  # gate, then up
        assert np.allclose(weights[FEED + row], gguf.quants.dequantize(data[row : row + 1], Kind.Q8_0)[0], 0, 1e-6)


@pytest.mark.parametrize(("kind", "number", "row", "weights"), [
    (Kind.Q8_0, np.inf, 0, "exact"), (Kind.Q8_0, np.nan, 100, "exact"), (Kind.Q8_0, np.inf, 100, "rows"),
    (Kind.Q4_1, np.nan, 100, "blocks"), (Kind.F16, np.nan, 0, "blocks"), (Kind.F16, np.inf, 100, "blocks"),
])  # fmt: skip
def test_weights_that_are_no_numbers_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, number: float, row: int, weights: gguf_graph.Weights
) -> None:
    """Both in a row that is compared with the graph's, and in another."""
    source = tmp_path / "small.gguf"
    write_small(source, kind)
    [output] = [tensor for tensor in gguf.GGUFReader(source, "r+").tensors if tensor.name == "output.weight"]
    output.data.view(np.uint8)[row, :2] = np.frombuffer(np.float16(number).tobytes(), np.uint8)
    monkeypatch.setattr(gguf_graph, "_CHECKED", 16)
    with pytest.raises(FloatingPointError, match=r"output\.weight has weights that are infinite or not numbers"):
        write_model(source, tmp_path / "model", weights)


@pytest.mark.parametrize(("kind", "old", "new", "message"), [
    (Kind.F32, b"", b"", "Unsupported quantization type; use a file with F16, Q4_0, Q4_1, Q8_0, Q4_K, Q6_K weights"),
    (Kind.Q8_0, b"llama.block_count", b"llama.block_kount",
     r"status 1\):\na key or tensor that OpenVINO GenAI needs is missing from the file"),
])  # fmt: skip
def test_what_the_reader_cannot_read_is_named(tmp_path: Path, kind: Kind, old: bytes, new: bytes, message: str) -> None:
    source = tmp_path / "small.gguf"
    write_small(source, kind)
    source.write_bytes(source.read_bytes().replace(old, new))
    with pytest.raises(ConfigError, match=message):
        converted_model(source, tmp_path / "cache", "exact")


def test_a_kill_half_way_leaves_nothing_that_counts_in_gguf_weights(tmp_path: Path) -> None:
    source, cache = tmp_path / "small.gguf", tmp_path / "cache"
    write_small(source, Kind.Q4_1)
    code = "import sys; from pathlib import Path; from handler.engines.openvino.gguf import converted_model\n"
    code += "converted_model(Path(sys.argv[1]), Path(sys.argv[2]), 'exact')"
    maker = subprocess.Popen([sys.executable, "-c", code, str(source), str(cache)], start_new_session=True)
    while not list(cache.glob("*.partial/openvino_tokenizer.xml")):
        assert maker.poll() is None
        time.sleep(0.005)
    os.killpg(maker.pid, signal.SIGKILL)
    maker.wait()
    assert [path.suffix for path in cache.iterdir() if path.name != "lock"] == [".partial"]
    model = converted_model(source, cache, "exact")
    assert {path.name for path in cache.iterdir()} == {model.name, "lock"}
    assert {path.name for path in model.iterdir()} >= set(downloads.NEEDED)


def test_a_file_that_cannot_be_written_is_copied_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "model.gguf"
    source.write_bytes(b"GGUF")
    assert writable(source, tmp_path / "made") == source
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as on a file system mounted read only, root or not
    copy = writable(source, tmp_path / "made")
    assert (copy.name, copy.read_bytes()) == ("model.gguf", b"GGUF")
    assert (tmp_path / "made") in copy.parents
    assert writable(source, tmp_path / "made") == copy


def test_a_file_with_a_suffix_in_capitals_is_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.GGUF").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    link = writable(Path("model.GGUF"), tmp_path / "made")
    assert (link.name, link.is_symlink(), link.read_bytes()) == ("model.gguf", True, b"GGUF")


@pytest.mark.nightly
def test_a_file_of_the_hub_is_served(tmp_path: Path) -> None:
    source = tmp_path / "small.gguf"
    write_small(source, Kind.Q8_0)
    with (
        serve_hub({"someone/files": {"small.gguf": source.read_bytes(), "other.gguf": b""}}) as hub,
        serve("someone/files/small.gguf", env={**hub.environment(tmp_path), "LMI_CACHE": str(tmp_path)}) as server,
    ):
        server.wait_ready(ANSWER_LIMIT)
        answer = server.post({"inputs": "ab", "parameters": {"max_new_tokens": 2, "details": True}}).json()
    assert answer["details"]["generated_tokens"] == 2
    assert not any("other.gguf" in path for path in hub.asked if "/resolve/" in path)
