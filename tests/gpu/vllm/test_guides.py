"""Guides tried with vLLM's own classes: honest ones pass, bad ones harm nobody's stream."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from handler import engines
from handler.config.config import Config
from handler.core.values import StructuredOutput
from handler.engines.base import EngineConfig
from handler.engines.structured_output.validator import StructuredOutputValidator
from tests import vllm_forks
from tests.gpu.vllm.test_served import PROMPT
from tests.servers import ANSWER_LIMIT, LiveServer, http
from tests.unit.engines.schema_cases import CASES, NONE, Case, written

pytestmark = pytest.mark.vllm

PATIENCE = 120  # seconds by the clock

HONEST: dict[str, dict[str, Any]] = {
    "fields": {f"field_{n}": {"type": ("string", "integer", "boolean")[n % 3]} for n in range(100)},
    "enum": {"one": {"enum": [f"value number {n}" for n in range(300)]}},
    "formats": {"day": {"type": "string", "format": "date"}, "id": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{6}$"}},
    "lengths": {"text": {"type": "string", "maxLength": 2000}, "list": {"type": "array", "maxItems": 50}},
}
TREE = {
    "$defs": {
        "node": {"type": "object", "properties": {"below": {"type": "array", "items": {"$ref": "#/$defs/node"}}}}
    },
    "$ref": "#/$defs/node",
}


def name(case: Case) -> str:
    return json.dumps(case.schema)[:80]


def schema(properties: dict[str, Any]) -> str:
    return json.dumps({"type": "object", "properties": properties, "required": list(properties)})


GOOD = [
    *(StructuredOutput("json_schema", schema(properties)) for properties in HONEST.values()),
    StructuredOutput("json_schema", json.dumps(TREE)),
    StructuredOutput("regex", r"[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}"),
    StructuredOutput("choice", json.dumps([f"choice {n}" for n in range(256)])),
    StructuredOutput("grammar", 'root ::= term (("+" | "-") term)*\nterm ::= [0-9]+ | "(" root ")"'),
]

_WORDS = " ".join(f"w{n}?" for n in range(100)), "\n".join(f'w{n} ::= [a-z]+ " "' for n in range(100))

_MANY = "many ::= many many many | many many | "

BAD = {
    "patterns": lambda n: schema(
        {f"p{i}": {"type": "string", "pattern": f"^(a{{1,50}}){{1,5{n}}}$"} for i in range(100)}
    ),
    "branches": lambda n: f"root ::= (([a-z]{{1,1000}}){{1,1000}}){{1,100{n}}}",
    "ambiguous": lambda n: f"root ::= many\n{_MANY} [^x{n}]",
    "endless": lambda n: f'root ::= root root | [a-z {n}] | ""',
    "endless behind a prefix": lambda n: f'root ::= [a-z]{{30{n}}} many\nmany ::= many many | [a-z] | ""',
    "behind a prefix": lambda n: f"root ::= [a-z]{{300{n}}} many\nmany ::= many many | [a-z]",
    "loops behind a prefix": lambda n: f"root ::= [a-z]{{300{n}}} (([a-z]+ [ ]?)+ [,]?)+",
    "words that may come behind a prefix": lambda n: f"root ::= [a-z]{{300{n}}} {_WORDS[0]}\n{_WORDS[1]}",
    "later": lambda n: f'root ::= "Once upon a time there were {n} kings" many\n{_MANY} [^x]',
}
"""Guides of a kind, by number: the first is costly to check, the others pass that and cost more with every token."""

AT_NIGHT = ("behind a prefix", "loops behind a prefix", "words that may come behind a prefix")
"""Of those that are costly behind a prefix the endless one is tried at each change."""


def kind(name: str) -> str:
    return "guided_json" if name == "patterns" else "guided_grammar"


@pytest.fixture(scope="module", params=[2.0])
def checks(hf_demo: Path, request: pytest.FixtureRequest) -> Iterator[StructuredOutputValidator]:
    config = EngineConfig(
        Config(max_model_len=2048, kv_cache_gib=1, engine_options={"enforce_eager": True}), model=hf_demo
    )
    found = StructuredOutputValidator(partial(engines.structured_output_check, "vllm", config), seconds=request.param)
    with vllm_forks.engines():
        found.start()
        yield found
    found.close()


@pytest.mark.parametrize("checks", [30.0], indirect=True)  # a slow machine is no fault of theirs
@pytest.mark.parametrize("structured_output", GOOD, ids=lambda structured_output: structured_output.value[:40])
def test_an_honest_one_passes(checks: StructuredOutputValidator, structured_output: StructuredOutput) -> None:
    assert checks.check(structured_output).result(PATIENCE) == ""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name in AT_NIGHT else name for name in BAD]
)
def test_a_bad_one_is_refused(checks: StructuredOutputValidator, name: str) -> None:
    why = checks.check(StructuredOutput("json_schema" if name == "patterns" else "grammar", BAD[name](0))).result(
        PATIENCE
    )
    assert ("is cyclic" if name.startswith("endless") else "the engine ") in why
    assert "more than" in why or "is cyclic" in why


def cyclic_tag(content: dict[str, Any]) -> StructuredOutput:
    tag = {"type": "structural_tag", "format": {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}}
    return StructuredOutput("structural_tag", json.dumps(tag))


@pytest.mark.parametrize(
    "structured_output",
    [
        StructuredOutput("json_schema", '{"anyOf": [{"$ref": "#"}, {"type": "string"}]}'),
        StructuredOutput(
            "json_schema", '{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'
        ),
        cyclic_tag({"type": "grammar", "grammar": 'root ::= s\ns ::= s s s | [a-z] | ""'}),
        cyclic_tag({"type": "json_schema", "json_schema": {"anyOf": [{"$ref": "#"}, {"type": "string"}]}}),
    ],
    ids=["schema", "references", "grammar in a tag", "schema in a tag"],
)
def test_what_leads_back_to_itself_is_refused(
    checks: StructuredOutputValidator, structured_output: StructuredOutput
) -> None:
    assert "cyclic" in checks.check(structured_output).result(PATIENCE)


@pytest.mark.parametrize("kind", ["regex", "json_schema"])
@pytest.mark.parametrize("expression", ["[a-z]{300}(([a-z]+ ?)+,?)+", "(([a-z]+)+)+x", "(" * 30 + "a"])
def test_a_hostile_expression_is_harmless_or_refused_in_words(
    checks: StructuredOutputValidator, kind: str, expression: str
) -> None:
    """In a schema, xgrammar 0.2 makes an automaton of a pattern, which is costly to make but not to follow."""
    text = expression if kind == "regex" else schema({"a": {"type": "string", "pattern": expression}})
    why = checks.check(StructuredOutput(kind, text)).result(PATIENCE)
    assert kind == "json_schema" or why
    assert not any(word in why for word in ("Check failed", "fsm", ".cc", "Error"))


def test_what_vllm_itself_refuses_is_refused_in_its_words(checks: StructuredOutputValidator) -> None:
    assert "nvalid grammar" in checks.check(StructuredOutput("grammar", "root ::= (")).result(PATIENCE)


@pytest.mark.parametrize("case", [case for case in CASES if not case.lost], ids=name)
def test_a_keyword_is_followed(checks: StructuredOutputValidator, case: Case) -> None:
    xgrammar = pytest.importorskip("xgrammar")
    assert checks.check(StructuredOutput("json_schema", json.dumps(case.schema))).result(PATIENCE) == ""
    grammar = xgrammar.Grammar.from_json_schema(json.dumps(case.schema))
    accepts = partial(pytest.importorskip("xgrammar.testing")._is_grammar_accept_string, grammar)
    assert case.valid is NONE or accepts(written(case.valid))
    assert case.invalid is NONE or not accepts(written(case.invalid))


@pytest.mark.parametrize("case", [case for case in CASES if case.lost], ids=name)
def test_a_keyword_that_would_be_lost_is_refused_by_its_name(checks: StructuredOutputValidator, case: Case) -> None:
    why = checks.check(StructuredOutput("json_schema", json.dumps(case.schema))).result(PATIENCE)
    assert f"xgrammar does not enforce the schema's {case.lost}" in why


@pytest.mark.parametrize(
    ("odd", "can"),
    [
        ({"type": "integer", "multipleOf": 5}, True),
        ({"type": "string", "pattern": "^a", "maxLength": 9}, True),
        ({"type": "integer", "not": {"const": 3}}, False),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, False),
    ],
)
def test_guidance_is_named_where_it_can(checks: StructuredOutputValidator, odd: dict[str, Any], can: bool) -> None:
    why = checks.check(StructuredOutput("json_schema", schema({"odd": odd}))).result(PATIENCE)
    assert why.endswith(": set option.guided_decoding_backend=guidance") == can, why
    assert "the schema's properties.odd." in why


@pytest.mark.parametrize("backend", ["xgrammar", "guidance", "outlines"])
def test_a_backend_need_not_support_every_kind(hf_demo: Path, backend: str) -> None:
    options = {"enforce_eager": True, "guided_decoding_backend": backend}
    config = EngineConfig(Config(max_model_len=2048, kv_cache_gib=1, engine_options=options), model=hf_demo)
    found = StructuredOutputValidator(partial(engines.structured_output_check, "vllm", config), seconds=30)
    with vllm_forks.engines():
        found._sandbox.start()  # a slow start is no fault of the first
        for one in (StructuredOutput("choice", '["a", "b"]'), StructuredOutput("regex", "[a-z]{2}")):
            assert found.check(one).result(PATIENCE) == ""
        why = found.check(StructuredOutput("grammar", 'root ::= "a"')).result(PATIENCE)
        assert why.startswith("Outlines") if backend == "outlines" else why == ""
    found.close()


def test_what_vllm_has_another_backend_for_is_refused(checks: StructuredOutputValidator) -> None:
    """It looks where nothing refers to."""
    unused = {"$defs": {"unused": {"type": "integer", "multipleOf": 5}}, "type": "integer"}
    why = checks.check(StructuredOutput("json_schema", json.dumps(unused))).result(PATIENCE)
    assert re.search(r"only option\.guided_decoding_backend=\w+ supports every part", why)


def test_the_first_guide_of_a_client_decides_nothing_for_others(server: LiveServer) -> None:
    """The first to use the server. Outlines, which the first one would choose, has no grammars."""
    two_patterns = {"type": "object", "patternProperties": {"^a": {"type": "string"}, "^b": {"type": "integer"}}}
    first = server.post({"inputs": PROMPT, "parameters": {"guided_json": two_patterns, "max_new_tokens": 8}})
    then = server.post({"inputs": PROMPT, "parameters": {"guided_grammar": 'root ::= "yes" | "no"'}})
    assert (first.status_code, then.status_code) == (424, 200), (first.text, then.text)
    assert "parameters.guided_json: " in first.json()["error"]
    assert then.json()["generated_text"] in ("yes", "no")


def stream(server: LiveServer, tokens: int) -> tuple[int, float]:
    """How many tokens came, and the longest time between two."""
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": tokens, "ignore_eos_token": True}, "stream": True}
    count, gap, last = 0, 0.0, 0.0
    with http.stream("POST", f"{server.url}/invocations", json=body, timeout=ANSWER_LIMIT) as answer:
        for line in answer.iter_lines():
            now = time.monotonic()
            gap, last = max(gap, now - last if last else 0.0), now
            count += json.loads(line)["token"]["id"] >= 0
    return count, gap


@pytest.mark.nightly
def test_bad_guides_harm_no_neighbour(server: LiveServer, record_property: Any) -> None:
    """A bad one of each kind, sent at once, while four clients read."""
    quiet = stream(server, 100)
    with ThreadPoolExecutor(16) as pool:
        neighbours = [pool.submit(stream, server, 400) for _ in range(4)]
        time.sleep(0.5)

        def attack(name: str) -> httpx.Response:
            body = {"inputs": PROMPT, "parameters": {kind(name): BAD[name](1), "max_new_tokens": 200}}
            return http.post(f"{server.url}/invocations", json=body, timeout=280)  # each check has seconds of CPU time

        attacks = [pool.submit(attack, name) for name in BAD]
        answers = [future.result() for future in attacks]
        read = [future.result() for future in neighbours]
    gaps = [round(gap, 2) for _, gap in read]
    print(f"longest gap alone {quiet[1]:.2f} s, of neighbours {gaps} s; {sorted(a.status_code for a in answers)}")
    assert [count for count, _ in read] == [400] * 4
    assert max(gaps) < 40, "an engine that is stuck is stuck for a minute"
    assert {answer.status_code for answer in answers} <= {424, 503}
    told = [answer.json()["error"] for answer in answers if answer.status_code == 424]
    assert all(one.startswith(("parameters.guided_json: the engine", "parameters.guided_grammar: the")) for one in told)
    assert server.metric("lmi_engine_restarts_total") == 0
    person = {"type": "object", "properties": {"name": {"enum": ["Ann", "Bob"]}}, "required": ["name"]}
    good = server.post({"inputs": PROMPT, "parameters": {"guided_json": person, "max_new_tokens": 40}})
    assert json.loads(good.json()["generated_text"])["name"] in ("Ann", "Bob")
