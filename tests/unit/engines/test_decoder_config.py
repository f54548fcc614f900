"""A decoder's config.json and safetensors: what is read, and what is refused before a weight is read."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from handler import engines
from handler.config.config import Config
from handler.core.errors import ConfigError
from handler.core.package import install
from handler.engines.base import EngineConfig
from handler.engines.openvino import ir_files as conversion
from handler.engines.openvino.decoder.config import DecoderConfig, UnknownDecoder, read_decoder
from handler.engines.openvino.decoder.convert import check_weights, quantize
from tests.checkpoints.decoders import CASES, weights, write_checkpoint, write_safetensors

LLAMA, QWEN = "llama", "qwen2, windows"


def read(tmp_path: Path, name: str, **values: Any) -> DecoderConfig:
    config = {key: value for key, value in {**CASES[name], **values}.items() if value != "absent"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_decoder(tmp_path)


def windows(decoder: DecoderConfig) -> list[int | None]:
    return [layer.window for layer in decoder.layers]


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        (LLAMA, {"model_type": "mixtral"}, r"its model_type is mixtral; supported: llama, mistral"),
        (LLAMA, {"model_type": None}, "its model_type is None"),
        (LLAMA, {"architectures": ["LlamaModel"]}, "it is a LlamaModel; a llama model must be a LlamaForCausalLM"),
        (LLAMA, {"quantization_config": {"quant_method": "awq"}}, r"weights are quantized \(quantization_config\)"),
        (LLAMA, {"auto_map": {"AutoConfig": "x.Y"}}, "it contains custom code"),
        (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2}}, "its rope_type is dynamic; supported: default"),
        (LLAMA, {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "its rope_type is longrope"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "its partial_rotary_factor is 0.5"),
        (LLAMA, {"hidden_act": "relu2"}, "its activation is relu2; supported: silu"),
        (
            "ministral",
            {"layer_types": ["full_attention"] * 2 + ["chunked_attention"]},
            "layer_types contains chunked_atten",
        ),
    ],
)
def test_what_is_unknown_is_named(tmp_path: Path, name: str, values: dict[str, Any], told: str) -> None:
    with pytest.raises(UnknownDecoder, match=told):
        read(tmp_path, name, **values)


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        (LLAMA, {"hidden_size": "absent"}, "hidden_size must be a whole number of at least 1, not None"),
        (
            LLAMA,
            {"num_attention_heads": 3},
            "cannot combine num_attention_heads=3, num_key_value_heads=2 and head_dim=21",
        ),
        (LLAMA, {"num_hidden_layers": True}, "num_hidden_layers must be a whole number of at least 1, not True"),
        (LLAMA, {"rms_norm_eps": 0}, "rms_norm_eps must be a positive number, not 0"),
        (LLAMA, {"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, not 'yes'"),
        (LLAMA, {"rope_scaling": {"type": "llama3", "factor": 8}}, r"llama3 rotary .*low_freq_factor"),
        (LLAMA, {"rope_theta": 0}, "default rotary position embeddings are infinite or not numbers"),
        (LLAMA, {"rope_scaling": [2]}, "rope_parameters and rope_scaling must be objects"),
        ("ministral", {"layer_types": ["full_attention"]}, "layer_types must contain a type for each of the 3 layers"),
        (
            QWEN,
            {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 3},
            ".*use_sliding_window is not true",
        ),
        ("gemma 3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, which OpenVINO's paged attenti"),
        ("gemma 2 without attention caps", {"attn_logit_softcapping": "absent"}, "attn_logit_softcapping is 50.0"),
        ("gemma 3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    ],
)
def test_what_is_wrong_is_refused_by_name(tmp_path: Path, name: str, values: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: {told}"):
        read(tmp_path, name, **values)


def test_layers_have_their_windows(tmp_path: Path) -> None:
    assert windows(read(tmp_path, "mistral, window")) == [12] * 3
    assert windows(read(tmp_path, "mistral")) == [None] * 3
    assert windows(read(tmp_path, "mistral", sliding_window="absent")) == [4096] * 3
    assert windows(read(tmp_path, QWEN)) == [None, 10, 10]
    assert windows(read(tmp_path, QWEN, use_sliding_window=False)) == [None] * 3
    assert windows(read(tmp_path, "gemma 2 without attention caps")) == [12, None, 12]
    assert windows(read(tmp_path, "gemma 3")) == [12, None, 12]
    assert windows(read(tmp_path, "gemma 3", sliding_window_pattern="absent")) == [12] * 3
    assert windows(read(tmp_path, LLAMA, sliding_window=4)) == [None] * 3


def test_gemmas_first_files_mean_the_other_gelu(tmp_path: Path) -> None:
    assert read(tmp_path, "gemma", hidden_act="gelu").activation == "gelu_tanh"
    assert read(tmp_path, LLAMA, hidden_act="gelu").activation == "gelu"


@pytest.mark.parametrize("form", ["new", "old"])
def test_gemma_3s_layers_have_their_positions_in_both_forms(tmp_path: Path, form: str) -> None:
    new: dict[str, Any] = {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    values = {"rope_parameters": new, "rope_scaling": None, "rope_theta": None} if form == "new" else {}
    near, far, _ = (layer.rotary.frequencies()[0] for layer in read(tmp_path, "gemma 3", **values).layers)
    assert near[1] == pytest.approx(1e4 ** (-2 / 32))
    assert far[1] == pytest.approx(1e6 ** (-2 / 32) / 2)


def test_tensors_are_checked_before_they_are_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, LLAMA)
    decoder, tensors = read_decoder(tmp_path), weights(tmp_path, LLAMA)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"

    def told(**changes: Any) -> str:
        changed = {**tensors, **changes}
        write_safetensors(file, {key: value for key, value in changed.items() if value is not None})
        with pytest.raises(ConfigError) as caught:
            check_weights(tmp_path, decoder)
        return str(caught.value)

    check_weights(tmp_path, decoder)
    assert (
        told(**{name: tensors[name].T}) == f"{file}: {name} has the shape [64, 96], but config.json requires [96, 64]"
    )
    assert told(**{name: None}) == f"{tmp_path}: its safetensors files have no tensor {name}"
    bias = "model.layers.0.self_attn.q_proj.bias"
    assert told(**{bias: tensors[name][0]}) == f"{tmp_path}: a llama model with this config.json does not use {bias}"
    write_safetensors(file, {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": tensors[name][0]})
    check_weights(tmp_path, decoder)  # of old versions


@pytest.mark.parametrize(
    ("one", "told"),
    [
        (
            {"dtype": "F32", "shape": [320, 64], "data_offsets": [0, 8]},
            r"8 bytes, but F32 \[320, 64\] needs 81,920",
        ),
        (
            {"dtype": "F32", "shape": [2, -1], "data_offsets": [0, 8]},
            "does not give the position and shape of model.norm.weight",
        ),
        (
            {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]},
            "does not give the position and shape of model.norm.weight",
        ),
        ({"dtype": "F32", "data_offsets": [0, 8]}, "does not give the position and shape of model.norm.weight"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path: Path, one: dict[str, Any], told: str) -> None:
    write_checkpoint(tmp_path, LLAMA)
    text = json.dumps({"model.norm.weight": one}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ConfigError, match=rf"model\.safetensors is broken: .*{told}"):
        check_weights(tmp_path, read_decoder(tmp_path))


def test_other_files_beside_the_index_are_not_read(tmp_path: Path) -> None:
    """As `consolidated.safetensors`, which holds the same weights by Mistral's names."""
    write_checkpoint(tmp_path, LLAMA, num_files=2)
    write_safetensors(tmp_path / "consolidated.safetensors", {"norm.weight": np.ones(3, np.float32)})
    check_weights(tmp_path, read_decoder(tmp_path))


@pytest.mark.parametrize(("bits", "most"), [(4, 1.6), (8, 0.6)])
def test_a_quantized_weight_is_near(bits: int, most: float) -> None:
    """Within half a step, and the scale's rounding; with 4 bits the ends of a range may be cut by a tenth."""
    random = np.random.RandomState(0)
    rows = random.standard_normal((40, 3, 32)).astype(np.float32)
    rows *= 10.0 ** random.randint(-2, 2, (40, 3, 1)).astype(np.float32)
    rows[0] = 0
    rows[1] = np.abs(rows[1]) + 5
    numbers, zero, scale = quantize(rows, bits)
    assert numbers.max() == 2**bits - 1
    steps = scale.astype(np.float32)
    error = np.abs((numbers.astype(np.float32) - zero) * steps - rows)
    assert (error[0] == 0).all()
    assert (error <= most * steps).all()
    assert np.sqrt(np.square(error).mean()) < 0.31 * np.sqrt(np.square(steps).mean())


# -- the engine ----------------------------------------------------------------------------------------------------


def checked(directory: Path | str, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        engines.check("openvino", str(directory), EngineConfig(Config(engine_options=options)))
    return str(caught.value)


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "find_spec", lambda name: None)
    monkeypatch.setenv("LMI_CACHE", str(tmp_path / "cache"))


def test_a_known_checkpoint_needs_no_converter(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", LLAMA)
    (directory / "tokenizer.json").write_text("{}")
    for options in ({}, {"quantization": "int8"}, {"quantization": "int4", "group_size": 128}):
        engines.check("openvino", str(directory), EngineConfig(Config(engine_options=options)))
    (directory / "config.json").write_text(json.dumps({**CASES[LLAMA], "vocab_size": 319}))
    assert "embed_tokens.weight has the shape [320, 64], but config.json requires [319, 64]" in checked(directory)


def test_an_unknown_one_needs_it_and_is_told_why(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", LLAMA)
    (directory / "tokenizer.json").write_text("{}")
    (directory / "config.json").write_text(json.dumps({**CASES[LLAMA], "model_type": "mixtral"}))
    assert f"Run: {install('lmi-handler[convert]')}" in checked(directory)
    assert "because its model_type is mixtral; supported: llama" in checked(directory)
    quantized = checked(directory, quantization="int4")
    assert quantized.startswith(f"option.quantize: {directory} cannot be quantized, because its model_type is mixtral")


def test_what_has_a_form_of_its_own_is_not_quantized(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    own = "cannot be quantized, unlike a Hugging Face checkpoint; omit the option"
    assert checked(tmp_path / "model.gguf", quantization="int8") == f"option.quantize: {tmp_path}/model.gguf {own}"
    assert checked("demo", quantization="int4") == f"option.quantize: the demo model {own}"


def test_a_group_size_without_4_bits_is_refused(tmp_path: Path) -> None:
    for options in ({"group_size": 64}, {"group_size": 64, "quantization": "int8"}):
        assert checked(tmp_path, **options).startswith("option.group_size requires option.quantize=int4")


def test_the_log_says_which_converter_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(conversion, "run_converter", lambda script, source, target, *more: target.mkdir())
    directory = write_checkpoint(tmp_path / "model", LLAMA)
    conversion.convert(directory, tmp_path / "cache")
    assert " without torch; this happens once" in caplog.text
    monkeypatch.setattr(conversion, "converter_is_installed", lambda: True)
    (directory / "config.json").write_text(json.dumps({**CASES[LLAMA], "model_type": "mixtral"}))
    conversion.convert(directory, tmp_path / "cache")
    assert " with optimum-intel, because its model_type is mixtral" in caplog.text
