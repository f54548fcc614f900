"""Checkpoints of language models with random weights, and what transformers computes with them.

`python -m tests.checkpoints.decoders` writes tests/golden/engines/decoders.json; it needs torch
and transformers, the tests do not.
Two programs never compute the same last bits, so the weights are such that the first two logits differ by at least GAP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from handler.engines.openvino.decoder.config import read_decoder
from handler.engines.openvino.decoder.convert import shapes

GOLDEN = Path(__file__).parents[1] / "golden" / "engines" / "decoders.json"
GAP = 0.01
NUM_PROMPT, NUM_TOKENS = 40, 16

_SIZES = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
_WIDE = {"head_dim": 32}
_GEMMA = {**_WIDE, "sliding_window": 12, "query_pre_attn_scalar": 24}


def _config(model_type: str, architecture: str, **values: Any) -> dict[str, Any]:
    return {**_SIZES, "model_type": model_type, "architectures": [architecture], **values}


CASES: dict[str, dict[str, Any]] = {
    "llama": _config("llama", "LlamaForCausalLM"),
    "llama 3.1, tied, biases": _config(
        "llama", "LlamaForCausalLM", tie_word_embeddings=True, rope_scaling=_LLAMA3, rope_theta=5e5,
        attention_bias=True, mlp_bias=True,
    ),
    "llama, linear, no shared keys": _config(
        "llama", "LlamaForCausalLM", num_key_value_heads=4, rope_scaling={"type": "linear", "factor": 4.0},
    ),
    "mistral, window": _config("mistral", "MistralForCausalLM", **_WIDE, sliding_window=12),
    "mistral": _config("mistral", "MistralForCausalLM", sliding_window=None),
    "ministral": _config(
        "ministral", "MinistralForCausalLM", **_WIDE, sliding_window=12,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "qwen2, yarn": _config("qwen2", "Qwen2ForCausalLM", rope_scaling=_YARN),
    "qwen2, windows": _config(
        "qwen2", "Qwen2ForCausalLM", use_sliding_window=True, sliding_window=10, max_window_layers=1,
        tie_word_embeddings=True,
    ),
    "qwen3": _config("qwen3", "Qwen3ForCausalLM", **_WIDE, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "gemma": _config("gemma", "GemmaForCausalLM", **_WIDE),
    "gemma 2 without attention caps": _config(
        "gemma2", "Gemma2ForCausalLM", **_GEMMA, attn_logit_softcapping=None, final_logit_softcapping=5.0
    ),
    "gemma 3": _config(
        "gemma3_text", "Gemma3ForCausalLM", **_GEMMA, sliding_window_pattern=2, rope_local_base_freq=1e4,
        rope_theta=1e6, rope_scaling={"rope_type": "linear", "factor": 2.0},
    ),
}  # fmt: skip


def prompt(name: str) -> list[int]:
    """Return a prompt of random ids."""
    return [int(id) for id in _random(name).randint(10, _SIZES["vocab_size"], NUM_PROMPT)]


def _random(name: str) -> np.random.RandomState:
    return np.random.RandomState(sum(name.encode()))


def write_checkpoint(directory: Path, name: str, kind: str = "F32", num_files: int = 1, **values: Any) -> Path:
    """Write config.json and the weights; no tokenizer.

    Args:
        kind: F32, F16 or BF16.
        num_files: more than one have an index.
        values: in the place of config.json's.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = {**CASES[name], **values}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = weights(directory, name)
    if num_files == 1:
        write_safetensors(directory / "model.safetensors", tensors, kind)
        return directory
    names = [*tensors]
    place: dict[str, str] = {}
    for index in range(num_files):
        file = f"model-{index + 1:05}-of-{num_files:05}.safetensors"
        place |= dict.fromkeys(names[index::num_files], file)
        write_safetensors(directory / file, {one: tensors[one] for one in names[index::num_files]}, kind)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))
    return directory


def weights(directory: Path, name: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return random weights of a model's shapes, float32."""
    decoder, random = read_decoder(directory), _random(name)
    found = {}
    for tensor, shape in shapes(decoder):
        values = random.standard_normal(shape).astype(np.float32)
        if tensor.endswith("norm.weight"):
            values = values * np.float32(0.3) + np.float32(0 if decoder.is_gemma else 1)
            values *= np.float32(8 if tensor == "model.norm.weight" else 1)
        else:
            values *= np.float32(0.1 if "embed_tokens" in tensor else 0.3)
        found[tensor] = values
    return found


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray[Any, Any]], kind: str = "F32") -> None:
    """Write a file; a BF16 number is the upper half of the float32."""
    header, parts, end = {}, [], 0
    for name, values in tensors.items():
        stored = values.astype(np.float16 if kind == "F16" else np.float32)
        data = (stored.view(np.uint32) >> 16).astype(np.uint16).tobytes() if kind == "BF16" else stored.tobytes()
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": [end, end + len(data)]}
        parts.append(data)
        end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


def transformers_values(directory: Path, name: str) -> dict[str, Any]:
    """Compute greedy tokens and log-probabilities of prompt and answer by transformers; needs torch."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    ids, gaps = torch.tensor([prompt(name)]), []
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            best = model(ids).logits[0, -1].topk(2)
            gaps.append(float(best.values[0] - best.values[1]))
            ids = torch.cat([ids, best.indices[:1][None]], 1)
        scores = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    assert min(gaps) >= GAP, f"{name}: {min(gaps)}"
    return {"ids": ids[0, NUM_PROMPT:].tolist(), "logprobs": [round(value, 5) for value in scores.tolist()]}


if __name__ == "__main__":
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as scratch:
        found = {
            name: transformers_values(write_checkpoint(Path(scratch) / str(index), name), name)
            for index, name in enumerate(CASES)
        }
    GOLDEN.write_text(
        "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in found.items()) + "\n}\n"
    )
