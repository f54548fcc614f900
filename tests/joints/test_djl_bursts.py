"""Java and the worker: a burst whose counts wrap at 16 bits, with a bug among it; each client gets its own answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from handler.serving.model import ServedModel
from tests.doubles.djl_java import Request, RollingBatch
from tests.doubles.djl_modules import modes, wire
from tests.stepped import Bench, ask, benches, text_of

__all__ = ["benches"]

SIZE = 256
ATTRIBUTES = {f"{number:02x}": "" for number in range(256)}
"""SageMaker's custom attributes, 1,024 characters of `NN=;`, as DJL Serving splits them."""


def test_a_burst_of_256_with_long_attributes_loses_only_what_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    works: Any = ServedModel.open

    def breaks(model: Any, headers: Any, **more: Any) -> Any:
        return works(model, None if "bug" in headers else headers, **more)

    monkeypatch.setattr(ServedModel, "open", breaks)
    bench, version = Bench(), wire.installed_version()
    java = RollingBatch(wire.Reader(version.length).read, modes.Rolling(bench.model, bench.loop, version).answer)
    neighbour = Request(json.dumps(ask("n m", 40, stream=True)).encode(), {})
    burst = [Request(json.dumps(ask(f"w{number}", 3)).encode(), ATTRIBUTES) for number in range(SIZE)]
    bad = burst[100]
    bad.headers = {**ATTRIBUTES, "bug": "yes"}
    java.step(neighbour)
    java.step(*burst)
    assert sum(len(request.headers) for request in burst) > 65_535
    while java.live:
        java.step()
    assert (bad.status, b"internal error: TypeError" in bad.answer) == (500, True), bad.answer
    others = [number for number in range(SIZE) if burst[number] is not bad]
    assert {burst[number].status for number in others} == {200}
    assert [text_of(burst[number].answer) for number in others] == [f" w{number}" * 3 for number in others]
    assert (neighbour.status, text_of(neighbour.answer)) == (200, " n m" * 20)
