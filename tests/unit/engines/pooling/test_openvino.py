"""OpenVINO's vectors are those of transformers' own classes, alone and in company (golden)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy
import pytest

from handler import engines
from handler.config.config import Config
from handler.core.errors import ConfigError
from handler.core.values import Finish, Pooling, Task
from handler.engines.base import EngineConfig, EngineRequest, Output
from handler.engines.huggingface.pooling import HfPoolingTokenizer
from handler.engines.openvino.pooling import OpenVinoPooling
from tests.unit.engines.pooling.models import GOLDEN, MODES, TEXTS, second, write_model

WANTED = json.loads(GOLDEN.read_text())
KINDS = {"bert classifier": Task.CLASSIFICATION, "bert reranker": Task.RERANK, "xlm-roberta reranker": Task.RERANK}


def load(model: Path, task: Task, **options: Any) -> Any:
    return engines.load("openvino", EngineConfig(Config(dtype="fp32", **options), model, task=task))


def run(engine: Any) -> list[Output]:
    found: list[Output] = []
    while step := engine.step().others:
        found += step
    return found


def computed(engine: Any, requests: Iterable[tuple[int, list[int], Pooling]]) -> dict[int, Any]:
    for key, ids, pooling in requests:
        engine.add(EngineRequest(key, ids, pooling))
    outputs = run(engine)
    assert all(output.finish is Finish.EOS and not output.ids for output in outputs)
    return {output.key: output.extras.vector for output in outputs if output.extras}


@pytest.mark.parametrize(
    ("name", "mode"),
    [*zip(["bert", "bert", "xlm-roberta", "xlm-roberta"], MODES, strict=True), *((name, "logits") for name in KINDS)],
)
def test_numbers_are_those_of_transformers_alone_and_in_company(tmp_path: Path, name: str, mode: str) -> None:
    kind = {Task.CLASSIFICATION: "classify", Task.RERANK: "score"}.get(KINDS.get(name, Task.EMBEDDING), "embed")
    pairs = name == "bert reranker"
    requests = [
        (key, ids, Pooling(kind, normalize=False, second=second(ids) if pairs else None))
        for key, ids in enumerate(TEXTS, 1)
    ]
    engine = load(write_model(tmp_path, name, mode), KINDS.get(name, Task.EMBEDDING))
    together = computed(engine, requests)
    assert [len(run(engine)) for _ in range(2)] == [0, 0]
    alone = {key: vector for request in requests for key, vector in computed(engine, [request]).items()}
    for found in (together, alone):
        rows = numpy.array([found[key] for key in sorted(found)])
        numpy.testing.assert_allclose(rows, WANTED[name][mode], atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_an_option_chooses_how_tokens_become_a_texts_vector(tmp_path: Path, mode: str) -> None:
    engine = load(write_model(tmp_path, "bert", "mean"), Task.EMBEDDING, pooling=mode)
    found = computed(engine, [(1, TEXTS[0], Pooling("embed", normalize=False))])
    numpy.testing.assert_allclose(found[1], WANTED["bert"][mode][0], atol=1e-4)


def test_texts_of_like_length_share_a_step(tmp_path: Path) -> None:
    engine = load(write_model(tmp_path, "bert"), Task.EMBEDDING, max_num_batched_tokens=40, max_rolling_batch_size=3)
    assert (engine.info.dimensions, engine.info.max_total_tokens) == (64, 40)
    lengths = [10, 30, 11, 9, 10, 31, 40]
    for key, length in enumerate(lengths):
        engine.add(EngineRequest(key, [5] * length, Pooling("embed")))
    engine.cancel(4)
    steps = []
    while outputs := engine.step().others:
        steps.append([lengths[output.key] for output in outputs])
    assert steps == [[10, 11, 9], [30], [31], [40]]


def test_the_graph_has_to_be_for_the_task(tmp_path: Path) -> None:
    model = write_model(tmp_path, "bert")
    with pytest.raises(ConfigError, match=r"for option\.task=rerank the graph has to give logits; it gives last"):
        load(model, Task.RERANK)


def test_a_directory_of_openvinos_serves_too(tmp_path: Path) -> None:
    import openvino

    from handler.engines.openvino.pooling import bert_graph

    model = write_model(tmp_path, "bert")
    openvino.save_model(bert_graph(model), model / "openvino_model.xml", compress_to_fp16=False)
    (model / "model.safetensors").unlink()
    assert engines.prepare("openvino", str(model), EngineConfig(Config(dtype="fp32"), task=Task.EMBEDDING)) == model
    found = computed(load(model, Task.EMBEDDING), [(1, TEXTS[0], Pooling("embed", normalize=False))])
    numpy.testing.assert_allclose(found[1], WANTED["bert"]["mean"][0], atol=1e-4)


def test_other_families_need_the_converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "model", "bert")
    assert engines.prepare("openvino", str(model), EngineConfig(task=Task.EMBEDDING)) == model
    (model / "config.json").write_text(json.dumps({"model_type": "mpnet", "architectures": ["MPNetModel"]}))
    monkeypatch.setenv("LMI_CACHE", str(tmp_path / "cache"))
    with pytest.raises(
        ConfigError, match=r"has to be converted first, which needs: pip install 'lmi-handler\[convert\]'"
    ):
        engines.check("openvino", str(model), EngineConfig(task=Task.EMBEDDING))
    (model / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        engines.check("openvino", str(model), EngineConfig(task=Task.EMBEDDING))


def test_the_demo_model_generates_text() -> None:
    for model in (None, "demo"):
        with pytest.raises(ConfigError, match=r"option\.task=rerank: the demo model generates text"):
            engines.check("openvino", model, EngineConfig(task=Task.RERANK))


def test_the_tokenizer_is_the_models(tmp_path: Path) -> None:
    config = EngineConfig(model=write_model(tmp_path, "bert"), task=Task.EMBEDDING)
    tokenizer = engines.load_tokenizer("openvino", config)
    assert isinstance(tokenizer, HfPoolingTokenizer)
    assert tokenizer.encode("w7 w8").ids == [2, 7, 8, 3]
    assert OpenVinoPooling is type(engines.load("openvino", config))


def test_old_names_of_tensors_are_known(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    file = write_model(tmp_path, "bert") / "model.safetensors"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = {f"bert.{name}": value for name, value in load_file(str(file)).items()}
    for new, before in old.items():
        tensors = {name.replace(new, before): value for name, value in tensors.items()}
    save_file(tensors, str(file))
    found = computed(load(tmp_path, Task.EMBEDDING), [(1, TEXTS[0], Pooling("embed", normalize=False))])
    numpy.testing.assert_allclose(found[1], WANTED["bert"]["mean"][0], atol=1e-4)
    save_file({"embeddings.word_embeddings.weight": numpy.zeros((2, 2), numpy.float32)}, str(file))
    with pytest.raises(ConfigError, match=r"have no tensor embeddings\.position_embeddings\.weight"):
        load(tmp_path, Task.EMBEDDING)
