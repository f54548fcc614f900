"""The API's document: valid, complete, and true of what the dialects take and answer."""

from __future__ import annotations

import functools
import importlib
import json
import pkgutil
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, ValidationError

from handler import protocols
from handler.config.config import Config
from handler.core.framing import dumps
from handler.core.values import Task
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.parameters import Parameter, Table, parameters
from handler.protocols.kernel.readers import integer, number
from handler.protocols.kernel.schema import ref, schema_of_reader, schema_of_type
from handler.protocols.lmi.request import TABLE
from handler.protocols.openapi import DESCRIPTIONS, DocumentedRoute, components, document
from handler.protocols.operations import INFERENCE, OPERATIONS, example_response
from handler.protocols.registry import INVOCATIONS, POOLED_ROUTES, ROUTES, DispatchByField, choose, dialects, routes
from tests.app.server import serve
from tests.one_test import in_one_test
from tests.parameter_matrix import CHAT_VALUES, TENSOR_VALUES, VALUES
from tests.servers import LiveServer, http
from tests.unit.protocols.answers import DIALECTS
from tests.unit.protocols.test_golden import CASES, GOLDEN, schema_of
from tests.unit.protocols.test_golden import OPENAI_CASES as OPENAI_CASES

ECHO = ServerContext("echo")


def validator(schema: Any, *, closed: bool = False) -> Draft202012Validator:
    """Of a schema that may refer to components.

    Args:
        closed: names that a component does not list are refused.
    """
    return root(closed).evolve(schema=schema)


def problems(api: dict[str, Any]) -> list[str]:
    """Where it is no document of OpenAPI 3.1."""
    from openapi_spec_validator import OpenAPIV31SpecValidator  # 0.2 s, which no other worker needs

    return [str(error) for error in OpenAPIV31SpecValidator(api).iter_errors()]


@functools.cache
def root(closed: bool) -> Draft202012Validator:
    """What others evolve from, so that references are found in one document that is walked once."""
    return Draft202012Validator({"components": {"schemas": shapes(closed)}})


@functools.cache
def shapes(closed: bool) -> dict[str, Any]:
    found = components(ECHO)
    return {name: {**shape, "additionalProperties": False} for name, shape in found.items()} if closed else found


def values_of(kind: str, body: str) -> list[Any]:
    """What a body holds: one document, a stream's values, or text."""
    if kind == "application/json":
        return [json.loads(body)]
    if kind not in ("application/jsonlines", "text/event-stream"):
        return [body]
    lines = [line for line in body.splitlines() if line.strip() and not line.startswith("event: ")]
    lines = [line.removeprefix("data: ") for line in lines if not line.endswith("[DONE]")]
    assert lines
    return [json.loads(line) for line in lines]


# -- the document ------------------------------------------------------------------------------------------------------


def test_it_is_valid() -> None:
    """With keys, sessions, and the requests of every mode, each under a path of its own; the server's has neither."""
    routes = [
        *(DocumentedRoute(f"/{{model}}/{mode}", ["POST"], one, takes_calls=True) for mode, one in INVOCATIONS.items()),
        *(DocumentedRoute(path, [method]) for method, path in OPERATIONS),
    ]
    found = json.loads(dumps(document(routes, ECHO, locked=True, has_sessions=True)))
    assert problems(found) == []
    assert "anyOf" not in found["paths"]["/{model}/dynamic_batch"]["post"]["requestBody"]


def test_the_server_has_every_route_that_is_described_and_no_other(echo_server: LiveServer) -> None:
    api = http.get(echo_server.url + "/api-doc/openapi.json").json()
    served = {(method.upper(), path) for path, item in api["paths"].items() for method in item.keys() - {"parameters"}}
    inference = {("POST", path) for path in ("/", *ROUTES)} | {
        ("POST", path)
        for path in ("/invocations", "/predictions/{model}", "/predictions/{model}/{version}", "/models/{model}/invoke")
    }
    assert served == set(OPERATIONS) | inference
    for path, item in api["paths"].items():
        names = {one["name"] for one in item.get("parameters", [])}
        assert names == set(re.findall(r"\{(\w+)\}", path))


@pytest.mark.parametrize("task", list(Task))
def test_each_route_has_a_group_and_a_sentence_of_its_own(task: Task) -> None:
    of_inference = {"/invocations": choose(Config(), task), **routes("tgi", task)}
    found = document(
        [
            *(DocumentedRoute(path, ["POST"], dialect) for path, dialect in of_inference.items()),
            *(DocumentedRoute(path, [method]) for method, path in OPERATIONS),
        ],
        ECHO,
        locked=False,
    )
    assert of_inference.keys() <= INFERENCE.keys()
    operations = [one for item in found["paths"].values() for name, one in item.items() if name != "parameters"]
    shared = [text for text, count in Counter(one["summary"] for one in operations).items() if count > 1]
    assert not shared
    assert {one["tags"][0] for one in operations} == {tag["name"] for tag in found["tags"]}


def test_every_example_has_its_shape() -> None:
    for dialect in dialects().values():
        described = dialect.description
        validator(ref(described.request)).validate(described.example)
        if described.response is not None:
            validator(schema_of_type(described.response), closed=True).validate(example_response(dialect))
            assert example_response.__wrapped__(dialect) == example_response(dialect), "two starts show two documents"
    for operation in OPERATIONS.values():
        for _, kind, example in operation.responses.values():
            validator(schema_of_type(kind), closed=True).validate(example)
        if operation.body is not None:
            validator(operation.body).validate(operation.body["example"])


@in_one_test(
    "options",
    [
        (),
        ("option.tgi_compat=true",),
        ("option.rolling_batch=disable",),
        ("option.root_schema=mindie",),
        ("option.openai_compat=true",),
        ("option.tgi_version=2.4",),
        *((f"option.task={task.value}",) for task in POOLED_ROUTES),
    ],
    ids=["lmi", "tgi_compat", "dynamic_batch", "mindie", "openai_compat", "tgi_version", *POOLED_ROUTES],
)
def test_every_example_gets_the_answer_that_is_described(options: tuple[str, ...]) -> None:
    options = (*options, "option.max_model_len=512")  # where an echo ends that has no limit of its own
    with serve("--engine", "echo", *(part for option in options for part in ("-o", option))) as server:
        api = http.get(server.url + "/api-doc/openapi.json").json()
        described = Draft202012Validator({"components": api["components"]})
        tried = 0
        for path, item in api["paths"].items():
            for method in item.keys() - {"parameters"}:
                tried += _try(server, described, method, path, item[method])
        assert tried >= 11


@pytest.mark.parametrize("mode", ["lmi", "dynamic_batch"])
def test_sessions_are_described_where_they_are_on(tmp_path: Path, mode: str) -> None:
    options = ["option.enable_stateful_sessions=true", f"option.sessions_path={tmp_path}"]
    options += ["option.rolling_batch=disable"] * (mode == "dynamic_batch")
    with serve("--engine", "echo", *(part for option in options for part in ("-o", option))) as server:
        api = http.get(server.url + "/api-doc/openapi.json").json()
        operation = api["paths"]["/invocations"]["post"]
        root = Draft202012Validator({"components": api["components"]})
        assert _try(server, root, "post", "/invocations", operation) >= 2
        described = root.evolve(schema=operation["requestBody"]["content"]["application/json"]["schema"])
        opened = server.post({"requestType": "NEW_SESSION"})
        id = opened.headers["x-amzn-sagemaker-session-id"].partition(";")[0]
        closed = server.post({"requestType": "CLOSE"}, headers={"x-amzn-sagemaker-session-id": id})
        assert closed.status_code == 200
    assert described.is_valid({"requestType": "CLOSE"})
    assert not described.evolve(schema=api["components"]["schemas"]["SessionCall"]).is_valid({"requestType": "END"})
    told = {name for found in (opened, closed) for name in found.headers if "session" in name}
    for path, item in api["paths"].items():
        others = ("adapter", "tokenize", "/v1/files", "/v1/batches", "/v1/messages/batches", "/v1/conversations")
        if "requestBody" not in item.get("post", {}) or any(name in path for name in others):
            continue
        asked = {one["name"].lower() for one in item["post"].get("parameters", [])}
        answered = {name for name in item["post"]["responses"]["200"].get("headers", {}) if "session" in name}
        takes_calls = path.startswith(("/invocations", "/predictions")) or path == "/models/{model}/invoke"
        assert (path, answered) == (path, told if takes_calls else set())
        assert (path, asked) == (path, {"x-amzn-sagemaker-session-id"})


def test_sessions_are_not_described_where_they_are_off(echo_server: LiveServer) -> None:
    assert "session" not in http.get(echo_server.url + "/api-doc/openapi.json").text.lower()


def _try(server: LiveServer, described: Draft202012Validator, method: str, path: str, operation: Any) -> int:
    """Send the examples of an operation; return how many.

    Args:
        described: holds the document's components.
    """
    if "/adapters" in path:  # which echo has not without its option; tests/app/test_adapters.py
        return 0
    where = server.url + path.replace("{model}", "model").replace("{id}", "model").replace("{version}", "1")
    media = operation.get("requestBody", {"content": {}})["content"].get("application/json", {})
    bodies = [example["value"] for example in media.get("examples", {}).values()]
    bodies = bodies or [media.get("schema", {}).get("example")]
    for body in bodies:
        found = http.request(method, where, json=body, headers={"accept": "text/html"})
        kind = found.headers["content-type"].partition(";")[0]
        answer = operation["responses"][str(found.status_code)]["content"][kind]
        shape = described.evolve(schema=answer["schema"])
        for value in values_of(kind, found.text):
            shape.validate(value)
        for example in [answer.get("example"), *(one["value"] for one in answer.get("examples", {}).values())]:
            if example is not None:
                shape.validate(example)
    return len(bodies)


def test_adapter_calls_have_the_statuses_of_their_document() -> None:
    calls = {
        "list": ("GET", ""), "register": ("POST", ""), "describe": ("GET", "/{adapter}"),
        "unregister": ("DELETE", "/{adapter}"), "update": ("POST", "/{adapter}/update"),
    }  # fmt: skip
    document = (Path(__file__).parents[3] / "docs" / "adapters.md").read_text()
    rows = re.findall(r"^\| (\d{3}) \| ([a-z, ]+) \|", document, re.MULTILINE)
    for name, (method, path) in calls.items():
        listed = {int(status) for status, names in rows if name in names.split(", ")}
        assert set(OPERATIONS[method, "/adapters" + path].responses) == listed, name
        assert set(OPERATIONS[method, "/models/{model}/adapters" + path].responses) == listed | {404}, name


# -- the bodies, held against the golden files -------------------------------------------------------------------------


def dialect_of(name: str) -> str:
    """The dialect that reads a case's body."""
    schema = DIALECTS[schema_of(name)]
    return (schema.dialect_of(CASES[name][1]) if isinstance(schema, DispatchByField) else schema).name


DIALECT_OF_FILE = {
    **{name: dialect_of(name) for name in CASES},
    **{f"openai/{name}": "openai_chat" if name.startswith("chat/") else "openai_completions" for name in OPENAI_CASES},
}


def test_every_dialect_has_golden_files() -> None:
    without = set(dialects()) - set(DIALECT_OF_FILE.values())
    assert not without, (
        f"no golden case asks {', '.join(sorted(without))}: write tests/unit/protocols/golden/NAME.py, "
        "as handler/protocols/README.md says"
    )


def test_golden_files_are_as_described() -> None:
    failed = {}
    for name in DIALECT_OF_FILE:
        try:
            _check_golden_file(name)
        except (AssertionError, ValidationError) as error:
            failed[name] = str(error)
    assert not failed, "\n\n".join(f"{name}: {told}" for name, told in failed.items())


def _check_golden_file(name: str) -> None:
    asked, _, answered = (GOLDEN / f"{name}.txt").read_text().partition("\n< ")
    head, _, body = answered.partition("\n")
    status, kind = head.partition(";")[0].split(" ", 1)
    dialect, values = DESCRIPTIONS[DIALECT_OF_FILE[name]], values_of(kind, body)
    if status != "200":
        framed = kind != "application/json" and dialect.refuses_in_frame
        for value in values:
            validator(schema_of_type(dialect.failure if framed else dialect.error), closed=True).validate(value)
        return
    # TGI refuses under 200 where a stream was asked for; the files of OpenAI's hold only a part of each body.
    if "error" not in values[0] and not name.startswith("openai/"):
        validator(ref(dialect.request)).validate(json.loads(asked.removeprefix("> ")))
    if kind == "text/plain":
        assert dialect.texts
        return
    assert kind == "application/json" or kind in dialect.streams
    answer = dialect.response if kind == "application/json" else dialect.chunk | (dialect.failure or dialect.error)
    for value in values:
        validator(schema_of_type(answer), closed=True).validate(value)


def test_the_shapes_refuse_what_is_something_else() -> None:
    wrong = {
        "LmiAnswer": {"text": "x"},
        "LmiLine": {"token": {"id": "1", "text": "", "log_prob": 0}},
        "TgiAnswer": {"generated_text": 1},
        "TgiEvent": {"index": 0, "token": {}, "generated_text": None, "details": None},
        "LmiChatAnswer": {"choices": []},
        "LmiRequest": {"inputs": 1},
        "ChatRequest": {"messages": []},
    }
    for name, value in wrong.items():
        assert not validator(ref(name)).is_valid(value), name


# -- parameters, held against their readers ----------------------------------------------------------------------------


def _tables() -> dict[str, Mapping[str, Parameter]]:
    """The parameters of each table in `handler/protocols/`, by where it stands or by the dialect."""
    found: dict[int, tuple[str, Table]] = {}
    for module in pkgutil.walk_packages(protocols.__path__, f"{protocols.__name__}."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, Table):
                found.setdefault(id(value), (f"{module.name.removeprefix('handler.protocols.')}.{name}", value))
    for name, dialect in dialects().items():
        if hasattr(dialect, "table"):
            found.setdefault(id(dialect.table), (name, dialect.table))
    return {place: table.parameters for place, table in found.values()}


TABLES = _tables()
EXAMPLES = {"lmi.chat.TABLE": CHAT_VALUES, "lmi.request.TABLE": {**VALUES, **TENSOR_VALUES}}
"""Values that are right."""


@in_one_test("name", TABLES)
def test_every_parameter_says_what_it_takes(name: str) -> None:
    values = EXAMPLES.get(name, {})
    for parameter, found in TABLES[name].items():
        assert schema_of_reader(found.read), parameter
        shape = parameters({parameter: found}, ECHO)[parameter]
        assert Draft202012Validator(shape).is_valid(None), parameter
        if parameter in values and values[parameter][0] is not None and not _is_refused_by_all(parameter):
            assert Draft202012Validator(shape).is_valid(values[parameter][0]), parameter


def test_the_tables_with_values_are_found() -> None:
    assert EXAMPLES.keys() < TABLES.keys()


def _is_refused_by_all(name: str) -> bool:
    """No engine does it, and the shape says so."""
    return name in {"watermark", "prompt_embedding_table", "prompt_vocab_size", "lora_weights", "lora_config",
                    "draft_input_ids", "draft_logits"}  # fmt: skip


SOME = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False, width=32),
    st.text(max_size=3),
    st.lists(st.one_of(st.integers(-2, 5), st.text(max_size=2), st.lists(st.integers(-1, 3), max_size=2)), max_size=3),
    st.dictionaries(st.sampled_from(["1", "5", "x", "type", "value"]), st.integers(-200, 200), max_size=2),
)


@given(value=SOME)
def test_what_a_reader_takes_its_shape_takes(value: Any) -> None:
    for table in TABLES.values():
        for name, found in table.items():
            if found.informed or name.startswith("guided_decoding_"):  # they look at more than the value
                continue
            try:
                taken = value is None or found.read(value) is not NotImplemented
            except ValueError:
                taken = False
            if taken:
                shape = parameters({name: found}, ECHO)[name]
                assert Draft202012Validator(shape).is_valid(value), name


@given(value=st.one_of(st.integers(-5, 5), st.floats(-5, 5, width=32), st.booleans(), st.text(max_size=2)))
def test_numbers_have_the_bounds_that_are_described(value: Any) -> None:
    """Both ways, but for what is nothing in 32 bits, and 1.0, which JSON does not tell from 1."""
    for read in (integer(-2, 3), number(-1, 2), number(0, 1, above=True), number(0, 1, below=True), number(0)):
        shape = schema_of_reader(read)
        try:
            read(value)
            taken = True
        except ValueError:
            taken = False
        if not (isinstance(value, float) and (value.is_integer() or abs(value) < 1e-37)):
            assert Draft202012Validator(shape).is_valid(value) is taken


def test_what_the_engine_lacks_is_said() -> None:
    lacking = ServerContext("some", unsupported={"min_p": "it cannot"})
    found = parameters(TABLE.parameters, lacking)
    assert found["min_p"]["description"] == "Refused: the engine some does not support it: it cannot"
    assert "description" not in found["top_p"]
