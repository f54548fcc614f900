"""Embeddings of the engine grpc in front of doubles: vectors as the client wants them, faults, and what is refused."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from handler import engines
from handler.config.config import Config
from handler.core.errors import ConfigError
from handler.core.values import Finish, Pooling, Task
from handler.engines.base import EngineConfig, EngineRequest, Output
from handler.engines.grpc.client import CONTRACTS, find_contract
from handler.engines.grpc.engine import GrpcPooling, command
from handler.engines.remote import engine as remote_engine
from handler.engines.remote import servers
from tests.doubles.grpc_servers import HANG, GrpcServer, Status, listening, vector
from tests.one_test import in_one_test
from tests.process.engines.openai.test_bad_servers import PATIENCE
from tests.servers import wait_for
from tests.unit.engines.pooling_models import write_model

KINDS = ("vllm", "sglang")
IDS = [2, 11, 12, 3]
LENGTH = math.hypot(*vector(IDS))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("bert"), "bert", "cls")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_engine, "_PAUSE", 0.01)
    monkeypatch.setattr(servers, "_PAUSE", 0.01)


@contextlib.contextmanager
def serving(kind: str = "vllm", **model: Any) -> Iterator[GrpcServer]:
    with listening(kind) as server:
        server.model |= {"is_generation": False, "vocab_size": 60, "eos_token_ids": [], **model}
        yield server


def config(model: Path, *found: GrpcServer, timeout: float = PATIENCE, kind: str = "vllm") -> EngineConfig:
    given = {
        "base_url": tuple(server.url for server in found),
        "base_url_kind": kind,
        "base_url_connect_timeout": 5.0,
        "base_url_timeout": timeout,
    }
    return EngineConfig(Config(engine_options=given), model=model, task=Task.EMBEDDING)


@contextlib.contextmanager
def engine(config: EngineConfig) -> Iterator[GrpcPooling]:
    made = engines.load("grpc", config)
    assert isinstance(made, GrpcPooling)
    try:
        yield made
    finally:
        made.close()


EMBED = Pooling("embed")


def ask(found: GrpcPooling, pooling: Pooling = EMBED, ids: list[int] = IDS, key: int = 1) -> Output:
    found.add(EngineRequest(key, ids, pooling))
    ended: list[Output] = []

    def answered() -> bool:
        ended.extend(found.step().others)
        return bool(ended)

    wait_for(answered, PATIENCE, "no answer comes")
    (output,) = ended
    assert output.key == key
    return output


def embedded(output: Output) -> list[float]:
    assert (output.finish, output.error) == (Finish.EOS, None)
    assert output.extras is not None
    assert output.extras.vector is not None
    return list(output.extras.vector)


NORMALIZED = pytest.approx([one / LENGTH for one in vector(IDS)], abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_as_the_client_wants_them(model: Path, kind: str) -> None:
    with serving(kind) as server, engine(config(model, server, kind=kind)) as found:
        assert (found.info.dimensions, found.info.max_total_tokens) == (4, 40)
        assert embedded(ask(found)) == NORMALIZED
        assert list(server.embedded[-1].tokenized.input_ids) == IDS
        half = math.hypot(*vector(IDS)[:2])
        assert embedded(ask(found, Pooling("embed", dimensions=2))) == pytest.approx(
            [one / half for one in vector(IDS)[:2]], abs=1e-6
        )
        assert embedded(ask(found, Pooling("embed", normalize=None))) == NORMALIZED, "what the server does"
        with pytest.raises(ValueError, match="normalize=false is not supported: the server normalizes its embeddings"):
            ask(found, Pooling("embed", normalize=False))
    with serving(kind) as server:
        server.normalizes = False
        with engine(config(model, server, kind=kind)) as found:
            assert embedded(ask(found)) == NORMALIZED
            for normalize in (False, None):
                assert embedded(ask(found, Pooling("embed", normalize=normalize))) == vector(IDS)


@in_one_test(
    ("answer", "plain"),
    [
        (lambda server: b"\xff\xff\xff", "sent a message that cannot be read"),
        (lambda server: server.messages.EmbedResponse(), "sent a message that cannot be read"),
        (lambda server: server.messages.EmbedResponse(embedding=[1, math.nan, 1, 1]), "sent a message that cannot be"),
        (lambda server: server.messages.EmbedResponse(embedding=[1, 2]), "sent an embedding of 2 numbers"),
        (lambda server: Status(grpc.StatusCode.INTERNAL, "down"), "answered INTERNAL"),
        (lambda server: HANG, "sent no token for 0.3 s"),
    ],
)
def test_a_fault_is_tried_elsewhere_and_at_last_named(model: Path, answer: Any, plain: str) -> None:
    timeout = 0.3 if "0.3 s" in plain else PATIENCE
    with serving() as server, engine(config(model, server, timeout=timeout)) as found:
        server.embeddings = [answer(server) for _ in range(3)]
        error = ask(found).error
        assert error is not None
        assert plain in error
        server.embeddings = []
        assert embedded(ask(found, key=2)) == NORMALIZED


def test_another_server_is_asked_after_a_fault(model: Path) -> None:
    with serving() as ill, serving() as well, engine(config(model, ill, well)) as found:
        ill.embeddings = [Status(grpc.StatusCode.INTERNAL, "down")]
        well.embeddings = [Status(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy")]
        assert embedded(ask(found)) == NORMALIZED


def test_who_leaves_ends_the_call_at_the_server(model: Path) -> None:
    with serving() as server, engine(config(model, server)) as found:
        server.embeddings = [HANG]
        found.add(EngineRequest(1, IDS, EMBED))
        wait_for(lambda: found.step() and len(server.embedded) == 2, PATIENCE, "it is not asked")
        found.cancel(1)
        assert server.left.acquire(timeout=PATIENCE)
        assert embedded(ask(found, key=2)) == NORMALIZED


def test_what_the_server_refuses_is_the_clients_own_fault(model: Path) -> None:
    with serving(max_context_length=6) as server, engine(config(model, server)) as found:
        output = ask(found, ids=[2] * 7)
        assert (output.refused, output.error) == (True, "the prompt is longer than the maximum model length")


def test_a_model_for_something_else_is_named_at_the_start(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(is_generation=True) as server, pytest.raises(ConfigError, match="serves a model that generates text"):
        engines.load("grpc", config(model, server))
    with serving() as server:
        monkeypatch.setattr(server, "embedding", lambda _: Status(grpc.StatusCode.UNIMPLEMENTED, "Method not found!"))
        with pytest.raises(ConfigError, match="answered UNIMPLEMENTED"):
            engines.load("grpc", config(model, server))
    find_contract.cache_clear()
    with (
        listening("trtllm") as server,
        pytest.raises(ConfigError, match="TensorRT-LLM's gRPC server does not implement Embed"),
    ):
        engines.load("grpc", config(model, server, kind="auto"))


@in_one_test(("kind", "mode"), [("vllm", "max"), ("sglang", "mean"), ("sglang", "max")])
def test_a_server_that_pools_in_another_way_is_refused_at_the_start(tmp_path: Path, kind: str, mode: str) -> None:
    model = write_model(tmp_path / kind / mode, "bert", mode)
    with (
        serving(kind) as server,
        pytest.raises(ConfigError, match=f"{mode} pooling, which {kind} servers do not support"),
    ):
        engines.load("grpc", config(model, server, kind=kind))


@in_one_test(
    ("task", "kind", "pooling", "words"),
    [
        (
            Task.RERANK,
            "vllm",
            "auto",
            "the model is for rerank, but no gRPC contract supports scores or classification",
        ),
        (Task.CLASSIFICATION, "auto", "auto", "no gRPC contract supports scores or classification"),
        (Task.EMBEDDING, "trtllm", "auto", "TensorRT-LLM's gRPC server does not implement Embed"),
        (
            Task.EMBEDDING,
            "vllm",
            "cls",
            "option.pooling=cls: the server always uses the pooling that the model's files specify",
        ),
    ],
)
def test_what_no_server_does_is_refused_before_the_start(
    model: Path, task: Task, kind: str, pooling: str, words: str
) -> None:
    options = {"base_url": ("grpc://x:1",), "base_url_kind": kind}
    given = EngineConfig(Config(engine_options=options, pooling=pooling), task=task)
    with pytest.raises(ConfigError) as raised:
        engines.check("grpc", str(model), given)
    assert words in str(raised.value)


def test_a_started_server_is_told_to_embed(model: Path) -> None:
    found = {}
    for kind, contract in CONTRACTS.items():
        options = Config(engine_options={"engine_python": "python3", "engine_flags": ("--x",)})
        found[kind] = command(contract, model, options, contract.embedding_flags("mean"))[-6:]
    assert found["vllm"][1:] == [
        *("--runner", "pooling", "--pooler-config", '{"seq_pooling_type": "MEAN", "use_activation": false}'),
        "--x",
    ]
    assert found["sglang"][-2:] == ["--is-embedding", "--x"]
