"""Embeddings of SGLang: they are the server's own, from token ids, and each fault ends one request."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest

from handler import engines
from handler.config.config import Config
from handler.core.errors import ConfigError
from handler.core.values import Finish, Pooling, Task
from handler.engines.base import EngineConfig, EngineRequest, Output
from handler.engines.openai.sglang.embeddings import SglangPooling
from handler.engines.remote import engine as remote_engine
from handler.engines.remote import servers
from tests.doubles.sglang_server import SglangServer, listening
from tests.one_test import in_one_test
from tests.process.engines.openai.test_bad_servers import PATIENCE
from tests.unit.engines.pooling_models import write_model

EMBED = Pooling("embed")
IDS = [5, 6, 7]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_engine, "_PAUSE", 0.01)
    monkeypatch.setattr(servers, "_PAUSE", 0.01)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that pools to the last token, and normalizes."""
    path = write_model(tmp_path_factory.mktemp("bert"), "bert")
    (path / "modules.json").write_text(
        json.dumps(
            [
                {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
                {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
                {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
            ]
        )
    )
    (path / "1_Pooling").mkdir(exist_ok=True)
    set_mode(path, "lasttoken")
    return path


def set_mode(path: Path, mode: str) -> None:
    names = ("cls_token", "mean_tokens", "lasttoken")
    modes = {f"pooling_mode_{name}": name == mode for name in names}
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 8, **modes}))


def config(model: Path, *found: SglangServer, task: Task = Task.EMBEDDING, **more: Any) -> EngineConfig:
    given = {
        "base_url": tuple(server.url for server in found),
        "base_url_kind": "sglang",
        "base_url_connect_timeout": 5.0,
        "base_url_timeout": PATIENCE,
        **more,
    }
    return EngineConfig(Config(engine_options=given), model=model, task=task)


@contextlib.contextmanager
def engine(model: Path, *found: SglangServer, **more: Any) -> Iterator[SglangPooling]:
    made = engines.load("openai", config(model, *found, **more))
    assert isinstance(made, SglangPooling)
    try:
        yield made
    finally:
        made.close()


def ask(found: SglangPooling, ids: Sequence[int] = IDS, pooling: Pooling = EMBED, key: int = 1) -> Output:
    found.add(EngineRequest(key, ids, pooling))
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        for output in found.step().others:
            if output.finish is not None:
                return output
    raise AssertionError("no result")


def vector(output: Output) -> list[float]:
    assert output.finish is Finish.EOS, output.error
    assert output.extras is not None
    assert output.extras.vector is not None
    return [*output.extras.vector]


def test_an_embedding_is_the_servers_own(model: Path) -> None:
    with listening(dimensions=8, context=32) as server, engine(model, server) as found:
        assert (found.info.dimensions, found.info.max_total_tokens) == (8, 32 - 6)
        assert vector(ask(found)) == pytest.approx(server.embedding(IDS), abs=1e-6)
        assert server.received[-1].body == {"input_ids": IDS}
        shorter = numpy.array(server.embedding(IDS)[:3])
        wanted = (shorter / numpy.linalg.norm(shorter)).tolist()
        assert vector(ask(found, pooling=EMBED._replace(dimensions=3))) == pytest.approx(wanted, abs=1e-6)
        with pytest.raises(ValueError, match="normalize=false is not supported: the server normalizes its embeddings"):
            ask(found, pooling=EMBED._replace(normalize=False))


def test_what_the_server_does_not_normalize_is_normalized_here(model: Path) -> None:
    with listening(dimensions=8, normalizes=False) as server, engine(model, server) as found:
        plain = server.embedding(IDS)
        assert vector(ask(found, pooling=EMBED._replace(normalize=False))) == pytest.approx(plain)
        assert vector(ask(found)) == pytest.approx((numpy.array(plain) / numpy.linalg.norm(plain)).tolist(), abs=1e-6)


@in_one_test(
    ("settings", "words"),
    [
        ({}, "does not compute embeddings: start it with --is-embedding"),
        ({"dimensions": 8, "info": {"disaggregation_mode": "prefill"}}, "--disaggregation-mode prefill"),
        ({"dimensions": 8, "key": "secret"}, "401"),
    ],
)
def test_a_server_that_cannot_compute_them_is_refused_at_startup(
    model: Path, settings: dict[str, Any], words: str
) -> None:
    with listening(**settings) as server, pytest.raises(ConfigError) as refused:
        engines.load("openai", config(model, server))
    assert words in str(refused.value)


def test_other_ways_to_pool_and_scores_are_refused(model: Path) -> None:
    with listening(dimensions=8) as server:
        set_mode(model, "mean_tokens")
        try:
            with pytest.raises(ConfigError, match="mean pooling, which SGLang does not support"):
                engines.load("openai", config(model, server))
        finally:
            set_mode(model, "lasttoken")
        with pytest.raises(ConfigError, match="servers of the kind sglang score only texts, not tokens"):
            engines.load("openai", config(model, server, task=Task.RERANK))


def response(body: bytes, status: int = 200) -> list[bytes]:
    return [
        b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body)),
        body,
    ]


def encoded(values: Sequence[Any], count: int = len(IDS)) -> bytes:
    return json.dumps({"embedding": [*values], "meta_info": {"prompt_tokens": count}}).encode()


@in_one_test(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        encoded([1.0] * 7),
        encoded([]),
        encoded([None] * 8),
        encoded(["x"] * 8),
        encoded([1.0] * 8, count=2),
    ],
)
def test_a_bad_response_fails_one_request(model: Path, body: bytes) -> None:
    with listening(dimensions=8) as server, engine(model, server) as found:
        server.scripts = [response(body)] * 3
        failed = ask(found)
        assert failed.finish is Finish.ERROR
        server.scripts = []
        assert vector(ask(found, key=2)) == pytest.approx(server.embedding(IDS), abs=1e-6)


def test_a_text_that_the_server_would_shorten_fails(model: Path) -> None:
    with listening(dimensions=8) as server, engine(model, server) as found:
        server.truncates, server.context = True, 32
        failed = ask(found, ids=[5] * 40)
        assert failed.finish is Finish.ERROR
        assert "the sglang server accepts fewer tokens per request than this handler" in str(failed.error)


def test_another_server_takes_over(model: Path) -> None:
    with listening(dimensions=8) as first, listening(dimensions=8) as second, engine(model, first, second) as found:
        first.scripts = [response(b"", 500)] * 9
        for key in range(1, 5):
            assert vector(ask(found, key=key)) == pytest.approx(second.embedding(IDS), abs=1e-6)


def test_servers_with_other_dimensions_are_left_out(model: Path) -> None:
    with listening(dimensions=8) as first, listening(dimensions=9) as second, engine(model, first, second) as found:
        for key in range(1, 5):
            assert len(vector(ask(found, key=key))) == 8
        assert len([one for one in second.received if one.body["input_ids"] == IDS]) == 0
