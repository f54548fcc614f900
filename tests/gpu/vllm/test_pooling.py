"""vLLM's vectors and scores are those of transformers' own classes (tests/golden/engines/pooling.json)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest

from handler import engines
from handler.config.config import Config
from handler.core.text import Prompt, Vocabulary
from handler.core.values import NO_EXTRAS, Delta, Pooling, Request, StructuredOutput, Task
from handler.engines.base import EngineConfig
from handler.engines.process.engine_process import Spec
from handler.engines.process.supervisor import EngineSupervisor, State
from handler.engines.trtllm.sampling import structured_output_check
from handler.scheduler.batcher import Batcher
from tests import vllm_forks
from tests.checkpoints.decoders import CASES, transformers_values, write_checkpoint
from tests.checkpoints.decoders import GOLDEN as DECODERS_GOLDEN
from tests.unit.engines.pooling_models import GOLDEN, TEXTS, second, write_model

pytestmark = [pytest.mark.vllm, pytest.mark.nightly]

WANTED = json.loads(GOLDEN.read_text())


def computed(batcher: Batcher, requests: list[tuple[list[int], Pooling]]) -> list[Any]:
    ids = [batcher.submit(Request("", pooling=ask), Prompt("", ids, Vocabulary([]))) for ids, ask in requests]
    found: dict[int, Delta] = {}
    while len(found) < len(ids):
        found |= {delta.id: delta for delta in batcher.step(1.0)}
    assert not [delta.error for delta in found.values() if delta.error]
    return [(found[id].extras or NO_EXTRAS).vector for id in ids]


@pytest.mark.parametrize(
    ("name", "mode", "task"),
    [("bert", "mean", Task.EMBEDDING), ("bert reranker", "logits", Task.RERANK)],
)
def test_numbers_are_those_of_transformers_alone_and_in_company_with_vllm(
    tmp_path: Path, name: str, mode: str, task: Task
) -> None:
    model = write_model(tmp_path, name, mode)
    config = EngineConfig(
        Config(
            dtype="fp32",
            kv_cache_gib=1,
            max_rolling_batch_size=8,
            engine_options={"enforce_eager": True, "gpu_memory_utilization": 0.15},
        ),
        model=model,
        task=task,
    )
    kind = "embed" if task is Task.EMBEDDING else "score"
    requests = [
        (ids, Pooling(kind, normalize=False, second=second(ids) if task is Task.RERANK else None)) for ids in TEXTS
    ]
    assert engines.prepare("vllm", str(model), EngineConfig(Config(dtype="fp32"), task=task)) == model
    with vllm_forks.engines():
        engine = EngineSupervisor(Spec("vllm", config), load_timeout=280)
    check_numbers(engine, requests, WANTED[name][mode])


@pytest.mark.timeout(300)  # vLLM is imported anew
def test_a_server_by_grpc_computes_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    options = {
        "engine_python": sys.executable,
        "engine_flags": ("--enforce-eager", "--kv-cache-memory-bytes", str(1 << 28)),
        "base_url_kind": "vllm",
        "base_url_connect_timeout": 5.0,
        "base_url_timeout": 60.0,
    }
    model = write_model(tmp_path, "bert", "mean")
    config = EngineConfig(Config(dtype="fp32", engine_options=options), model=model, task=Task.EMBEDDING)
    engine = EngineSupervisor(Spec("grpc", config), load_timeout=280)
    check_numbers(engine, [(ids, Pooling("embed", normalize=False)) for ids in TEXTS], WANTED["bert"]["mean"])


def check_numbers(engine: EngineSupervisor, requests: list[tuple[list[int], Pooling]], wanted: list[Any]) -> None:
    """Compare the numbers of all requests at once, and of each alone, with those of transformers."""
    try:
        batcher = Batcher(engine)
        while not engine.ready:
            assert engine.state is not State.CLOSED, engine.reason
            batcher.step(1.0)
        assert engine.info is not None
        assert (engine.info.max_total_tokens, engine.info.dimensions) == (40, len(wanted[0]))
        together = computed(batcher, requests)
        alone = [vector for request in requests for vector in computed(batcher, [request])]
    finally:
        engine.close()
    for found in (together, alone):
        numpy.testing.assert_allclose(numpy.array(found), wanted, atol=1e-4)


# -- decoders ----------------------------------------------------------------------------------------------------------
# The expected values of tests/model/openvino/test_decoders.py, computed again by the installed transformers.


DECODERS_WANTED = json.loads(DECODERS_GOLDEN.read_text())


@pytest.mark.parametrize("name", CASES)
def test_the_golden_file_is_what_transformers_computes(tmp_path: Path, name: str) -> None:
    found = transformers_values(write_checkpoint(tmp_path, name), name)
    assert found["ids"] == DECODERS_WANTED[name]["ids"]
    assert found["logprobs"] == pytest.approx(DECODERS_WANTED[name]["logprobs"], abs=1e-3)


# -- the check of TensorRT-LLM's guides, with the xgrammar that vLLM's environment has ---------------------------------


def test_tensorrt_llm_gets_what_costs_little_a_token(hf_demo: Path) -> None:
    check = structured_output_check(
        EngineConfig(Config(engine_options={"guided_decoding_backend": "xgrammar"}), model=hf_demo)
    )
    check(StructuredOutput("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}'))
    check(StructuredOutput("json_object", ""))
    check(StructuredOutput("choice", '["a", "b"]'))
    check(StructuredOutput("regex", "[a-z]{1,4}"))
    with pytest.raises(ValueError, match="takes the engine more than"):
        check(StructuredOutput("grammar", "root ::= [a-z]{300} s\ns ::= s s | [a-z]"))
    with pytest.raises(ValueError, match="is cyclic"):
        check(StructuredOutput("json_schema", '{"anyOf": [{"$ref": "#"}, {"type": "string"}]}'))
