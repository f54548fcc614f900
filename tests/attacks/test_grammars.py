"""Hostile grammars, expressions and schemas for a real engine, while neighbours stream answers and ping."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.watch import answering
from tests.servers import LiveServer, http, serve

pytestmark = pytest.mark.timeout(300)

LONGEST_STREAM = 5.0  # CPU seconds of the server's that a neighbour's four tokens may take
SECONDS = "1"  # of CPU time that a text may take before it is refused

ATTACKS: dict[str, Callable[[int], dict[str, Any]]] = {
    "a cyclic rule": lambda n: {"grammar": f'root ::= s\ns ::= s s s s | [a-z] | "" | "{n}"'},
    "a cyclic rule after a prefix": lambda n: {"grammar": f'root ::= [a-z]{{{n}}} s\ns ::= s s s s | [a-z] | ""'},
    "an ambiguous rule after a prefix": lambda n: {"grammar": f"root ::= [a-z]{{{n}}} s\ns ::= s s | [a-z]"},
    "loops in loops after a prefix": lambda n: {"grammar": f"root ::= [a-z]{{{n}}} y+\ny ::= z+\nz ::= [a-z]+"},
    "a huge automaton": lambda n: {"regex": f"[ab]*a[ab]{{{n}}}"},
    "a schema that leads to itself": lambda n: {"json": {"anyOf": [{"$ref": "#"}, {"const": n}]}},
}
"""By name, the parameter of a request; each number makes another one."""


def ask(**parameters: Any) -> Any:
    return {"inputs": "Tell me.", "parameters": {"max_new_tokens": 100, **parameters}}


@pytest.fixture(scope="module")
def server(demo_model: Path) -> Iterator[LiveServer]:
    with serve(str(demo_model), "-o", f"option.guide_timeout={SECONDS}") as server:
        server.wait_ready()
        assert server.post(ask(guided_choice=["a", "b"])).status_code == 200  # the process has started
        yield server


def test_hostile_texts_are_refused_while_a_neighbours_answer_goes_on(server: LiveServer) -> None:
    def stream() -> None:
        answer = server.post({**ask(max_new_tokens=4), "stream": True})
        assert answer.status_code == 200
        assert '"generated_text"' in answer.text, answer.text

    with answering(server), answering(server, stream, LONGEST_STREAM):
        for number, (name, make) in enumerate(ATTACKS.items(), 100):
            parameter = {f"guided_{kind}": text for kind, text in make(number).items()}
            answer = server.post(ask(**parameter))
            assert answer.status_code == 424, (name, answer.text)
            assert "guided_" in answer.text, (name, answer.text)
    assert http.get(server.url + "/ping", timeout=10).status_code == 200
    assert server.metric("lmi_engine_restarts_total") == 0
