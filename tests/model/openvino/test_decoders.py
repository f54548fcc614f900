"""Checkpoints of the Llama, Qwen and Gemma families, converted here: tokens and log-probabilities of transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from handler import engines
from handler.config.config import Config
from handler.core.errors import ConfigError
from handler.core.values import Sampling
from handler.engines.base import EngineConfig, EngineRequest, Step
from handler.engines.openvino.decoder.convert import quantize
from tests.checkpoints.decoders import CASES, GOLDEN, NUM_TOKENS, prompt, weights, write_checkpoint, write_safetensors
from tests.label_batches import Text, check_batch
from tests.random_models import byte_tokenizer

pytestmark = pytest.mark.model

WANTED = json.loads(GOLDEN.read_text())
SAMPLING = Sampling(max_new_tokens=NUM_TOKENS, ignore_eos=True, prompt_logprobs=True)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LMI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def config(**options: Any) -> EngineConfig:
    names = options.keys() & {"quantization", "group_size"}
    engine_options: dict[str, Any] = {name: options.pop(name) for name in names}
    return EngineConfig(Config(dtype="fp32", engine_options=engine_options, **options))


def load(directory: Path, config: EngineConfig) -> Any:
    engines.check("openvino", str(directory), config)
    model = engines.prepare("openvino", str(directory), config)
    return engines.load("openvino", EngineConfig(config.options, model=model))


def answers(engine: Any, prompts: Sequence[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Return the answers' ids, and the log-probabilities of prompts and answers."""
    found: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
    for key, ids in enumerate(prompts, 1):
        engine.add(EngineRequest(key, ids, SAMPLING))
    running = set(range(1, len(prompts) + 1))
    while running:
        step = engine.step()
        for output in step.others:
            assert output.error is None
            ids, logprobs = found[output.key - 1]
            logprobs += (output.prompt_logprobs or [None])[1:]
            ids += output.ids
            logprobs += output.logprobs
            running -= {output.key} if output.finish else set()
        for key, id, logprob in zip(step.keys, step.ids, step.logprobs, strict=True):
            found[key - 1][0].append(id)
            found[key - 1][1].append(logprob)
    return found


def check(found: tuple[list[int], list[float]], name: str, within: float = 1e-3) -> None:
    assert found[0] == WANTED[name]["ids"]
    np.testing.assert_allclose(found[1], WANTED[name]["logprobs"], atol=within)


AT_EACH_CHANGE = ("llama", "ministral", "qwen2, yarn", "qwen3", "gemma 3")
"""One of each family; the others vary its options."""


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The name of a checkpoint, and the engine that its tests share: what is slow is to convert and to load it."""
    name = request.param
    directory = write_checkpoint(tmp_path_factory.mktemp("model"), name, num_files=2 if name == "llama" else 1)
    tokenizer.save_pretrained(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMI_CACHE", str(tmp_path_factory.mktemp("cache")))
        return name, load(directory, config(max_num_batched_tokens=16))


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name not in AT_EACH_CHANGE)) for name in CASES],
    indirect=True,
)
def test_tokens_and_log_probabilities_are_those_of_transformers(family: tuple[str, Any]) -> None:
    """Windows are shorter than the prompt, which is computed in three parts, in company of its own beginning."""
    name, engine = family
    found = answers(engine, [prompt(name), prompt(name)[:5]])
    check(found[0], name)
    assert len(found[1][0]) == NUM_TOKENS


@pytest.mark.parametrize("family", AT_EACH_CHANGE, indirect=True)
def test_labels_in_a_batch_of_32_have_the_numbers_of_transformers(family: tuple[str, Any]) -> None:
    name, engine = family
    text = Text([*prompt(name), *WANTED[name]["ids"]], WANTED[name]["logprobs"], len(prompt(name)))
    scored, greedy = SAMPLING._replace(prompt_top_logprobs=3), SAMPLING._replace(prompt_logprobs=False)
    check_batch(engine, lambda: [engine.step()], [text], greedy, scored, greedy._replace(do_sample=True, seed=7))
    assert engine.step() == Step.of([])


@pytest.mark.parametrize("kind", ["F16", "BF16"])
@pytest.mark.nightly
def test_weights_of_16_bits_stay_so(tmp_path: Path, tokenizer: Any, cache: Path, kind: str) -> None:
    name = "qwen3"
    directory = write_checkpoint(tmp_path / "model", name, kind)
    tokenizer.save_pretrained(directory)
    exact = write_checkpoint(tmp_path / "exact", name)
    tensors = {
        tensor: (values.view(np.uint32) & 0xFFFF0000).view(np.float32) if kind == "BF16" else values.astype(np.float16)
        for tensor, values in weights(exact, name).items()
    }
    write_safetensors(exact / "model.safetensors", tensors)
    tokenizer.save_pretrained(exact)
    [found], [wanted] = (answers(load(one, config()), [prompt(name)]) for one in (directory, exact))
    assert found[0] == wanted[0]
    np.testing.assert_allclose(found[1], wanted[1], atol=1e-4)
    sizes = sorted(path.stat().st_size for path in cache.glob("converted/*/openvino_model.bin"))
    assert sizes[0] < 0.52 * sizes[1]


@pytest.mark.parametrize(
    ("options", "group", "size"),
    [
        ({"quantization": "int8"}, 0, 0.3),
        ({"quantization": "int4", "group_size": 64}, 64, 0.24),
        ({"quantization": "int4"}, 32, 0.25),
    ],
)
@pytest.mark.nightly
def test_quantized_weights_are_computed_as_they_are(
    tmp_path: Path, tokenizer: Any, cache: Path, options: dict[str, Any], group: int, size: float
) -> None:
    """As a checkpoint of the numbers that they stand for. Rows of 96 have groups of 32 at most."""
    name = "gemma 2 without attention caps"
    directory, rounded = (write_checkpoint(tmp_path / one, name) for one in ("model", "rounded"))
    found = {}
    for tensor, values in weights(directory, name).items():
        bits = 8 if not group or "embed" in tensor else 4
        length = values.shape[-1] if bits == 8 else 32 if values.shape[-1] == 96 else group
        found[tensor] = values if values.ndim == 1 else restored(values, bits, length)
    write_safetensors(rounded / "model.safetensors", found)
    for one in (directory, rounded):
        tokenizer.save_pretrained(one)
    [quantized], [wanted] = (
        answers(load(one, config(**more)), [prompt(name)]) for one, more in ((directory, options), (rounded, {}))
    )
    assert quantized[0] == wanted[0]
    np.testing.assert_allclose(quantized[1], wanted[1], atol=0.01)
    small, large = sorted(path.stat().st_size for path in cache.glob("converted/*/openvino_model.bin"))
    assert small < size * large


def restored(values: Any, bits: int, group: int) -> Any:
    numbers, zero, scale = quantize(values.reshape(values.shape[0], -1, group), bits)
    return ((numbers.astype(np.float32) - zero) * scale.astype(np.float32)).reshape(values.shape)


def test_an_output_matrix_that_is_not_the_embeddings_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    """Where config.json says that they are one; transformers' versions differ in which they take."""
    directory = write_checkpoint(tmp_path / "model", "llama")
    tensors = weights(directory, "llama")
    write_checkpoint(directory, "llama", tie_word_embeddings=True)
    write_safetensors(directory / "model.safetensors", tensors)
    tokenizer.save_pretrained(directory)
    with pytest.raises(ConfigError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load(directory, config())
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    write_safetensors(directory / "model.safetensors", tensors)
    assert load(directory, config()).info.max_total_tokens == 512


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    directory = write_checkpoint(tmp_path / "model", "llama")
    with pytest.raises(ConfigError, match="has no tokenizer"):
        load(directory, config())
