"""LoRA adapters through the embedded server: DJL's and SageMaker's calls, and adapters that come and go under load.

The echo engine begins as many words later as an adapter's id says, so an answer shows which adapter made it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler.config.loader import read_config
from handler.serving.check import check
from tests.app.server import AppServer, serve
from tests.servers import LiveServer, http, wait_for
from tests.user_files import write_adapter, write_model

HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
WORDS = 200
PROMPT = " ".join(f"w{i}" for i in range(WORDS))
PACED = ("-o", "option.echo_tokens_per_second=50")
ANYWHERE = "option.enable_lora=true\noption.adapters_root=/\noption.adapters_code=true\n"
LORA = ("-o", "option.enable_lora=true", "-o", "option.adapters_root=/", "-o", "option.adapters_code=true")
ECHO = ("--engine", "echo", *LORA, "-o", "option.engine_isolation=process")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an adapter `a`, one `b`, and one that is broken."""
    directory = tmp_path_factory.mktemp("files")
    for name in ("a", "b", "broken"):
        write_adapter(directory / name)
    (directory / "broken" / "adapter_model.safetensors").unlink()
    return directory


@pytest.fixture(scope="module")
def shared() -> Iterator[AppServer]:
    with serve(*ECHO, *PACED) as server:
        yield server


@pytest.fixture
def server(shared: AppServer) -> Iterator[AppServer]:
    """With no adapter in it."""
    yield shared
    shared.wait_ready()
    for entry in call(shared, "GET").json()["adapters"]:
        assert call(shared, "DELETE", "/" + entry["name"]).status_code == 200


def call(server: LiveServer, method: str, path: str = "", prefix: str = "", **more: Any) -> httpx.Response:
    return http.request(method, f"{server.url}{prefix}/adapters{path}", timeout=60, **more)


def register(server: LiveServer, name: str, src: Path | str, **more: Any) -> httpx.Response:
    return call(server, "POST", params={"name": name, "src": str(src), **more})


def told(response: httpx.Response) -> tuple[int, str]:
    value = response.json()
    assert value["code"] == response.status_code
    return response.status_code, value["message"]


def generate(server: LiveServer, adapter: str, tokens: int = 3, **more: Any) -> httpx.Response:
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": tokens}, **more}
    return server.post(body, headers={HEADER: adapter} if adapter else {})


def id_of(response: httpx.Response, tokens: int = 3) -> int:
    """The id of the adapter that made an answer, 0 for none, which must be whole and of that one alone."""
    assert response.status_code == 200, response.text
    words = json.loads(response.text.splitlines()[-1])["generated_text"].split()
    first = int(words[0][1:])
    assert words == [f"w{(first + i) % WORDS}" for i in range(tokens)]
    return first


def test_a_query_registers_an_adapter_that_is_used_and_unregistered(server: LiveServer, files: Path) -> None:
    response = register(server, "a", files / "a")
    number = response.json()["id"]
    assert (response.status_code, response.json()) == (200, {"status": "Adapter a registered", "id": number})
    assert id_of(generate(server, "a")) > 0
    assert id_of(generate(server, "")) == 0
    entry = {"name": "a", "id": number, "src": str(files / "a"), "preload": True, "pin": False}
    assert call(server, "GET", "/a").json() == entry
    assert call(server, "GET").json() == {"adapters": [entry]}
    response = call(server, "DELETE", "/a")
    assert (response.status_code, response.json()) == (200, {"status": "Adapter a unregistered"})
    assert generate(server, "a").status_code == 424
    assert call(server, "GET").json() == {"adapters": []}


@pytest.mark.parametrize("attributes", ["", "adapter=a"])
def test_a_query_and_custom_attributes_name_a_requests_adapter(
    server: LiveServer, files: Path, attributes: str
) -> None:
    register(server, "a", files / "a")
    headers = {"X-Amzn-SageMaker-Custom-Attributes": attributes} if attributes else {}
    query = "" if attributes else "?adapter=a"
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 3}}
    assert id_of(server.post(body, f"/invocations{query}", headers=headers)) > 0
    missing = server.post(body, f"/invocations{query.replace('=a', '=b')}", headers={
        name: value.replace("=a", "=b") for name, value in headers.items()
    })  # fmt: skip
    assert (missing.status_code, "'b': no adapter with that name is registered" in missing.text) == (424, True)


def test_a_body_registers_as_sagemaker_does(server: LiveServer, files: Path) -> None:
    body = {"name": "sql", "src": str(files / "a"), "preload": True, "pin": False}
    response = call(server, "POST", json=body, headers={"X-Amzn-SageMaker-Adapter-Alias": "mine"})
    assert (response.status_code, response.json()["status"]) == (200, "Adapter mine registered")
    assert id_of(generate(server, "sql")) > 0
    assert call(server, "DELETE", "/sql").status_code == 200


def test_a_model_may_stand_before_it(server: LiveServer, files: Path) -> None:
    prefix = "/models/model"
    assert call(server, "POST", prefix=prefix, params={"name": "a", "src": files / "a"}).status_code == 200
    assert call(server, "GET", "/a", prefix).json()["name"] == "a"
    assert call(server, "POST", "/a/update", prefix).json() == {"status": "Adapter a updated"}
    assert call(server, "DELETE", "/a", prefix).status_code == 200
    for method, path in (("GET", ""), ("POST", ""), ("GET", "/a"), ("DELETE", "/a"), ("POST", "/a/update")):
        assert told(call(server, method, path, "/models/other")) == (
            404,
            "The model other was not found; served here: model",
        )


def test_without_preload_it_is_loaded_when_it_is_used(server: LiveServer, files: Path) -> None:
    assert register(server, "a", f"file://{files / 'a'}", preload="false").status_code == 200
    assert call(server, "GET", "/a").json()["preload"] is False
    assert id_of(generate(server, "a")) > 0


@pytest.mark.parametrize(
    ("given", "status", "words"),
    [
        ({"src": "/a"}, 400, "Parameter name is required."),
        ({"name": "a"}, 400, "Parameter src is required."),
        ({"name": "a", "src": "s3://bucket/a"}, 400, "src=s3://bucket/a: must be a directory on this machine"),
        ({"name": "a", "src": "a"}, 400, "src=a: must be an absolute path"),
        ({"name": "../a", "src": "{files}/a"}, 400, "name='../a': must be"),
        ({"name": "a\r\nX-Evil: 1", "src": "{files}/a"}, 400, "name='a\\r\\nX-Evil: 1': must be"),
        ({"name": "", "src": "{files}/a"}, 400, "name='': must be a non-empty string"),
        ({"name": "a", "src": "{files}/a", "pin": "true"}, 400, "pin=true is not supported"),
        ({"name": "a", "src": "{files}/a", "preload": "yes"}, 400, "preload='yes': must be true or false"),
        ({"name": "a", "src": "{files}/none"}, 424, "there is no such directory"),
        ({"name": "a", "src": "{files}/broken"}, 424, "contains neither adapter_model.safetensors nor"),
    ],
)
@pytest.mark.parametrize("way", ["query", "body"])
def test_what_cannot_be_registered(
    server: LiveServer, files: Path, given: dict[str, str], status: int, words: str, way: str
) -> None:
    given = {name: value.format(files=files) for name, value in given.items()}
    response = call(server, "POST", params=given) if way == "query" else call(server, "POST", json=given)
    assert response.status_code == status, response.text
    assert words in told(response)[1]
    assert "x-evil" not in response.headers
    assert call(server, "GET").json() == {"adapters": []}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"name": 1, "src": "/a"}', "name=1: must be a non-empty string"),
        (b'{"name": "a", "src": "/a", "pin": 1}', "pin=1: must be true or false"),
        (b'{"name": "b", "src": "/a"}', "name has different values in the query and in the body"),
    ],
)
def test_bodies_that_make_no_sense(server: LiveServer, body: bytes, words: str) -> None:
    response = call(server, "POST", params={"name": "a"} if b'"b"' in body else {}, content=body)
    assert (response.status_code, words in told(response)[1]) == (400, True), response.text


def test_a_number_names_an_adapter_across_updates_and_never_another(files: Path) -> None:
    with serve(*ECHO) as server:

        def ask(number: int) -> httpx.Response:
            return server.post({"inputs": PROMPT, "parameters": {"max_new_tokens": 3, "lora_task_id": [number]}})

        numbers = []
        for name, src in (("a", "a"), ("b", "broken"), ("b", "none"), ("b", "b")):
            response = register(server, name, files / src)
            numbers.append(response.json().get("id"))
        assert numbers == [1, None, None, 2]
        assert call(server, "POST", "/a/update").json() == {"status": "Adapter a updated"}
        assert call(server, "POST", "/a/update", params={"src": files / "none"}).status_code == 424
        assert [(entry["name"], entry["id"]) for entry in call(server, "GET").json()["adapters"]] == [
            ("a", 1),
            ("b", 2),
        ]
        for number, name in ((1, "a"), (2, "b")):
            assert id_of(ask(number)) == id_of(generate(server, name))
        assert call(server, "DELETE", "/a").status_code == 200
        assert register(server, "a", files / "a").json()["id"] == 3
        refused = ask(1)
        assert (refused.status_code, "no adapter with that number" in refused.text) == (424, True), refused.text
        assert id_of(ask(3)) == id_of(generate(server, "a"))


def test_statuses_of_names_that_are_taken_or_unknown(server: LiveServer, files: Path) -> None:
    assert register(server, "a", files / "a").status_code == 200
    assert told(register(server, "a", files / "b")) == (409, "The adapter a already exists")
    assert call(server, "GET", "/a").json()["src"] == str(files / "a")
    for method, path in (("GET", "/b"), ("DELETE", "/b"), ("POST", "/b/update")):
        assert told(call(server, method, path)) == (404, "The adapter b was not found")
    assert told(call(server, "POST", "/a/update", params={"name": "b"}))[0] == 400
    response = call(server, "PUT", "/a")
    assert (response.status_code, response.headers["allow"]) == (405, "GET, HEAD, DELETE")
    assert call(server, "POST", params=[("name", "a"), ("name", "b")]).status_code == 400


def test_names_that_mean_nothing_are_reported(server: LiveServer, files: Path) -> None:
    response = register(server, "a", files / "a", prompt_prefix="x")
    assert (response.status_code, response.headers["x-lmi-ignored-parameters"]) == (200, "prompt_prefix")


def test_names_that_mean_nothing_are_refused_where_that_is_asked_for(files: Path) -> None:
    with serve(*ECHO, "-o", "option.unknown_parameters=refuse") as server:
        assert told(register(server, "a", files / "a", rank="8")) == (
            400, "unknown parameter 'rank'; known: name, src, preload, pin",
        )  # fmt: skip
        assert register(server, "a", files / "a").status_code == 200


def test_without_enable_lora_every_call_says_so_and_so_does_the_log(tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapters" / "a")
    (tmp_path / "serving.properties").write_text("option.llm_engine=echo\n")
    with serve("--properties", str(tmp_path / "serving.properties")) as server:
        for method, path in (("GET", ""), ("POST", ""), ("GET", "/a"), ("DELETE", "/a"), ("POST", "/a/update")):
            status, message = told(call(server, method, path))
            assert status == 400
            assert message == "LoRA is not enabled: echo: it was started without option.enable_lora=true"
        assert "option.enable_lora=true" in generate(server, "a").text
        assert f"the adapters in {tmp_path / 'adapters'} are not loaded: echo: it was started without" in server.log


def test_a_hundred_adapters_in_pages_and_none_is_crossed(server: LiveServer, files: Path) -> None:
    names = [f"n{i}" for i in range(105)]
    for name in names:
        assert register(server, name, files / "a").status_code == 200
    first = call(server, "GET").json()
    assert [entry["name"] for entry in first["adapters"]] == names[:100]
    assert first["nextPageToken"] == "100"
    second = call(server, "GET", params={"next_page_token": "100"}).json()
    assert [entry["name"] for entry in second.pop("adapters")] == names[100:]
    assert second == {}
    assert call(server, "GET", params={"limit": "2", "next_page_token": "3"}).json()["nextPageToken"] == "5"
    assert len(call(server, "GET", params={"limit": "1000"}).json()["adapters"]) == 100
    assert told(call(server, "GET", params={"limit": "x"}))[0] == 400

    with ThreadPoolExecutor(32) as threads:
        ids = list(threads.map(lambda name: id_of(generate(server, name, 20, stream=True), 20), names))
    assert ids == [ids[0] + i for i in range(105)]  # in the order of registering, which the echo shows


def test_adapters_come_and_go_while_streams_run(server: LiveServer, files: Path) -> None:
    assert register(server, "a", files / "a").status_code == 200
    id = id_of(generate(server, "a"))
    with ThreadPoolExecutor(8) as threads:
        running = [threads.submit(generate, server, "a" if i % 2 else "", 100, stream=True) for i in range(8)]
        for i in range(20):
            assert register(server, f"x{i}", files / ("broken" if i % 3 == 0 else "b")).status_code == (
                424 if i % 3 == 0 else 200
            )
            if i % 3:
                assert id_of(generate(server, f"x{i}", 2), 2) > id
                assert call(server, "DELETE", f"/x{i}").status_code == 200
        assert [id_of(stream.result(), 100) for stream in running] == [0, id] * 4


def test_unregistering_refuses_at_once_and_leaves_what_runs(server: LiveServer, files: Path) -> None:
    assert register(server, "a", files / "a").status_code == 200
    id = id_of(generate(server, "a"))
    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(generate, server, "a", 100, stream=True) for _ in range(4)]
        wait_for(lambda: server.metric("lmi_active_sequences") == 4, 5, "they do not run")
        assert call(server, "DELETE", "/a").status_code == 200
        refused = generate(server, "a")
        assert not any(stream.done() for stream in running)
        assert (refused.status_code, "no adapter with that name" in refused.text) == (424, True), refused.text
        assert [id_of(stream.result(), 100) for stream in running] == [id] * 4
    assert register(server, "a", files / "a").status_code == 200
    assert id_of(generate(server, "a")) > id


def test_an_update_is_for_new_requests_and_running_ones_keep_the_old(server: LiveServer, files: Path) -> None:
    assert register(server, "a", files / "a").status_code == 200
    id = id_of(generate(server, "a"))
    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(generate, server, "a", 100, stream=True) for _ in range(4)]
        wait_for(lambda: server.metric("lmi_active_sequences") == 4, 5, "they do not run")
        assert told(call(server, "POST", "/a/update", params={"src": files / "broken"}))[0] == 424
        assert id_of(generate(server, "a")) == id
        response = call(server, "POST", "/a/update", json={"src": str(files / "b")})
        assert (response.status_code, response.json()) == (200, {"status": "Adapter a updated"})
        assert id_of(generate(server, "a")) > id
        assert [id_of(stream.result(), 100) for stream in running] == [id] * 4
    assert call(server, "GET", "/a").json()["src"] == str(files / "b")


def test_no_request_fails_while_its_adapter_is_updated_over_and_over(server: LiveServer, files: Path) -> None:
    assert register(server, "a", files / "a").status_code == 200

    def ask(_: int) -> int:
        return id_of(generate(server, "a", 2), 2)

    with ThreadPoolExecutor(8) as threads:
        asked = threads.map(ask, range(100))
        for _ in range(50):
            assert call(server, "POST", "/a/update").status_code == 200
        assert len(set(asked)) > 1


def test_of_calls_that_register_one_name_at_once_one_succeeds(server: LiveServer, files: Path) -> None:
    for round in range(5):
        with ThreadPoolExecutor(10) as threads:
            answers = list(threads.map(lambda i: register(server, "a", files / "ab"[i % 2]), range(10)))
        assert sorted(answer.status_code for answer in answers) == [200] + [409] * 9
        with ThreadPoolExecutor(10) as threads:
            answers = list(threads.map(lambda _: call(server, "DELETE", "/a"), range(10)))
        assert sorted(answer.status_code for answer in answers) == [200] + [404] * 9, round


def test_a_killed_engines_successor_knows_them_all_in_app(server: AppServer, files: Path) -> None:
    for name in ("a", "b"):
        assert register(server, name, files / name).status_code == 200
    before = [id_of(generate(server, name)) for name in ("a", "b")]
    os.kill(server.engine_pid(), signal.SIGKILL)
    wait_for(lambda: server.ping() == 503, 5, "nobody noticed")
    assert told(register(server, "c", files / "a")) == (503, "the engine is not ready: no adapter can be loaded")
    assert call(server, "DELETE", "/c").status_code == 404
    server.wait_ready()
    assert [id_of(generate(server, name)) for name in ("a", "b")] == before
    assert register(server, "c", files / "a").status_code == 200


def test_those_beside_the_model_are_there_from_the_start(tmp_path: Path) -> None:
    for name in ("z", "a"):
        write_adapter(tmp_path / "adapters" / name)
    write_adapter(tmp_path / "adapters-of-others" / "b")
    (tmp_path / "serving.properties").write_text(f"option.llm_engine=echo\n{ANYWHERE}")
    with serve("--properties", str(tmp_path / "serving.properties")) as server:
        assert [(entry["name"], entry["id"]) for entry in call(server, "GET").json()["adapters"]] == [
            ("a", 1),
            ("z", 2),
        ]
        assert [id_of(generate(server, name)) for name in ("a", "z")] == [1, 2]
        write_adapter(tmp_path / "adapters" / "later")
        assert register(server, "later", "later").status_code == 200
        assert register(server, "b", "../adapters-of-others/b").status_code == 200


@pytest.mark.parametrize(
    ("name", "broken", "words"),
    [("a", True, "the adapter a cannot be used: src="), ("not a name", False, "the adapter not a name cannot be used")],
)
def test_a_broken_one_beside_the_model_fails_the_start_by_name_in_app(
    tmp_path: Path, name: str, broken: bool, words: str
) -> None:
    path = write_adapter(tmp_path / "adapters" / name)
    if broken:
        (path / "adapter_config.json").unlink()
    (tmp_path / "serving.properties").write_text(f"option.llm_engine=echo\n{ANYWHERE}")
    with (
        pytest.raises(AssertionError, match=rf"the server ended:\n(.*\n)*lmi: {words}"),
        serve("--properties", str(tmp_path / "serving.properties")),
    ):
        pass


def test_there_may_be_as_many_as_sagemaker_says(files: Path) -> None:
    env = {"SAGEMAKER_MAX_NUMBER_OF_ADAPTERS_IN_MEMORY": "2"}
    with serve(*ECHO, env=env) as server:
        for name in ("a", "b"):
            assert register(server, name, files / "a").status_code == 200
        assert told(register(server, "c", files / "a"))[0] == 507
        assert call(server, "POST", "/a/update").status_code == 200
        assert call(server, "DELETE", "/a").status_code == 200
        assert register(server, "c", files / "a").status_code == 200


VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=20), st.sampled_from(["a", "/", "true"]))


@given(
    method=st.sampled_from(["GET", "POST", "DELETE", "PUT"]),
    path=st.sampled_from(["", "/a", "/a/update", "/%2e%2e", "/%00", "/a%0d%0ab", "/a/b/c"]),
    query=st.dictionaries(
        st.sampled_from(["name", "src", "preload", "pin", "limit", "next_page_token", "x"]), st.text()
    ),
    body=st.binary(max_size=30) | st.dictionaries(st.sampled_from(["name", "src", "preload", "pin", "x"]), VALUES),
)
def test_no_call_is_too_odd_for_an_answer(
    server: LiveServer, method: str, path: str, query: dict[str, str], body: bytes | dict[str, Any]
) -> None:
    query = {name: value.encode(errors="ignore").decode() for name, value in query.items()}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = call(server, method, path, params=query, content=content)
    assert response.status_code in (200, 400, 404, 405, 424), response.text
    assert response.status_code != 200 or method == "GET"
    assert response.headers["content-type"] == "application/json"
    assert response.json()


@pytest.mark.parametrize("name", ["nobody", "../a", "a, b", "a\tb", "é".encode(), "x" * 1000])
def test_a_header_with_another_name_is_refused(server: LiveServer, files: Path, name: Any) -> None:
    assert register(server, "a", files / "a").status_code == 200
    response = server.post({"inputs": "a"}, headers={HEADER: name})
    assert response.status_code == 424, response.text


def test_a_stopping_server_lets_a_stream_with_an_adapter_end(files: Path) -> None:
    with serve(*ECHO, *PACED) as server, ThreadPoolExecutor(1) as threads:
        assert register(server, "a", files / "a").status_code == 200
        stream = threads.submit(generate, server, "a", 60, stream=True)
        wait_for(lambda: server.metric("lmi_active_sequences") == 1, 5, "it does not run")
        assert server.stop() == 0
        assert id_of(stream.result(), 60) == 1


@pytest.mark.parametrize(
    "form",
    [
        "a={a} b={b}",
        '{{"name": "a", "path": "{a}"}}',
        '[{{"name": "a", "path": "{a}", "base_model_name": "m"}}, "b={b}"]',
    ],
)
@pytest.mark.parametrize("variable", ["", "SM_VLLM_LORA_MODULES"])
def test_adapters_are_loaded_by_vllms_lora_modules(
    files: Path, form: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = form.format(a=files / "a", b=files / "b")
    if variable:
        monkeypatch.setenv(variable, value)
    with serve(*ECHO, *([] if variable else ["-o", f"option.lora_modules={value}"])) as server:
        server.wait_ready()
        loaded = [entry["name"] for entry in call(server, "GET").json()["adapters"]]
        assert loaded == (["a", "b"] if "b={b}" in form else ["a"])


# -- formatters of an adapter's own: a model.py in its directory, for requests that name it ----------------------------


OUTPUT = """
from djl_python.output_formatter import output_formatter


@output_formatter
def sign(output):
    return {"by": %r, "chunk": isinstance(output, str)}
"""
INPUT = """
from djl_python.input_parser import input_formatter


@input_formatter
def read(decoded_payload):
    return {"inputs": decoded_payload["question"], "parameters": {"max_new_tokens": 1, "details": True}}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and three adapters: `plain` has no model.py, `own` an output formatter, `asks` an input formatter."""
    directory = tmp_path_factory.mktemp("model")
    properties = write_model(directory, OUTPUT % "base")
    properties.write_text(f"option.llm_engine=echo\n{ANYWHERE}")
    for name, text in {"plain": "", "own": OUTPUT % "own", "asks": INPUT}.items():
        path = write_adapter(directory / "adapters" / name)
        if text:
            (path / "model.py").write_text(text)
    return directory


@pytest.fixture(scope="module")
def formatters_server(home: Path) -> Iterator[AppServer]:
    with serve("--properties", str(home / "serving.properties")) as server:
        server.wait_ready()
        yield server


def ask(server: AppServer, body: dict[str, Any], adapter: str = "") -> httpx.Response:
    return server.post({"inputs": "a b", **body}, headers={HEADER: adapter} if adapter else {})


@pytest.mark.parametrize(("adapter", "by"), [("", "base"), ("plain", "base"), ("own", "own"), ("asks", "base")])
def test_each_adapter_has_its_own_or_the_models(formatters_server: AppServer, adapter: str, by: str) -> None:
    body = {"question": "a b"}
    assert ask(formatters_server, body, adapter).json() == {"by": by, "chunk": False}
    if adapter:
        for named in ({"adapters": adapter}, {"adapters": [adapter]}):
            assert ask(formatters_server, {**body, **named}).json()["by"] == by
        streamed = ask(formatters_server, {**body, "adapters": adapter, "stream": True})
        assert streamed.text.startswith(f'{{"by": "{by}", "chunk"')
        chat = {"inputs": None, "messages": [{"role": "user", "content": "hi"}], "model": adapter}
        assert ask(formatters_server, chat).json()["by"] == "base"  # `model` chooses weights alone, as in LMI


def test_an_adapters_input_formatter_reads_its_requests_alone(formatters_server: AppServer) -> None:
    found = ask(formatters_server, {}, "asks")
    assert (found.status_code, "input formatter 'read' of model.py raised KeyError" in found.text) == (424, True)
    assert ask(formatters_server, {}, "own").status_code == 200


def test_an_input_formatter_runs_on_its_thread_though_its_adapter_has_gone(tmp_path: Path) -> None:
    properties = write_model(tmp_path, "")
    properties.write_text(f"option.llm_engine=echo\n{ANYWHERE}")
    path, ran_on = write_adapter(tmp_path / "asks"), tmp_path / "thread"
    note = f"    pathlib.Path({str(ran_on)!r}).write_text(threading.current_thread().name)\n    return"
    (path / "model.py").write_text("import pathlib, threading\n" + INPUT.replace("    return", note))
    body = b'{"question": "a b"}'
    head = ("POST /invocations HTTP/1.1", "Host: localhost", f"{HEADER}: asks", "Content-Type: application/json")
    more = (f"Content-Length: {len(body)}", "Expect: 100-continue", "Connection: close", "", "")
    with serve("--properties", str(properties)) as server:
        server.wait_ready()
        assert register(server, "asks", path).status_code == 200
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            connection.sendall("\r\n".join((*head, *more)).encode())
            assert connection.recv(100).startswith(b"HTTP/1.1 100"), "its head has been read"
            assert call(server, "DELETE", "/asks").status_code == 200
            connection.sendall(body)
            while connection.recv(4096):
                pass
    assert ran_on.read_text() == "formatter"


def test_a_broken_one_is_not_registered_and_an_update_runs_it_again(
    formatters_server: AppServer, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "late")
    url = f"{formatters_server.url}/adapters"
    (path / "model.py").write_text("import nowhere_at_all\n")
    found = http.post(url, params={"name": "late", "src": str(path)})
    assert (found.status_code, "model.py, line 1: ModuleNotFoundError" in found.text) == (424, True)
    assert http.get(f"{url}/late").status_code == 404
    for by in ("first", "second"):
        (path / "model.py").write_text(OUTPUT % by)
        target = url if by == "first" else f"{url}/late/update"
        assert http.post(target, params={"name": "late", "src": str(path)}).status_code == 200
        assert ask(formatters_server, {}, "late").json()["by"] == by
    (path / "model.py").write_text(OUTPUT.replace("%r", "__name__"))
    assert http.post(url, params={"name": "my-late.one", "src": str(path)}).status_code == 200
    assert ask(formatters_server, {}, "my-late.one").json()["by"] == "ns_my_late_one"
    assert http.delete(f"{url}/my-late.one").status_code == 200
    (path / "model.py").write_text(OUTPUT % "second")
    assert http.post(f"{url}/late/update", params={"src": str(path)}).status_code == 200
    (path / "model.py").write_text("1 / 0\n")
    assert http.post(f"{url}/late/update", params={"src": str(path)}).status_code == 424
    assert ask(formatters_server, {}, "late").json()["by"] == "second"
    assert http.delete(f"{url}/late").status_code == 200
    assert ask(formatters_server, {}).json()["by"] == "base"


def test_the_check_names_a_broken_one(home: Path, tmp_path: Path) -> None:
    properties = write_model(tmp_path, "")
    properties.write_text(f"option.llm_engine=echo\n{ANYWHERE}")
    path = write_adapter(tmp_path / "adapters" / "a")
    (path / "model.py").write_text("def (\n")
    (told,) = [problem.message for problem in check(read_config(properties=properties, environ={}))]
    assert told.startswith(f"{path}/model.py, line 1: SyntaxError")
    assert not list(check(read_config(properties=home / "serving.properties", environ={})))


# -- where adapters may be ---------------------------------------------------------------------------------------------


def test_adapters_come_from_the_model_and_a_root_and_code_from_the_model_alone(tmp_path: Path) -> None:
    home, root, elsewhere = tmp_path / "model", tmp_path / "root", tmp_path / "elsewhere"
    home.mkdir()
    properties = write_model(home, "")
    for directory in (home / "late", root / "plain", root / "codes", elsewhere / "away"):
        write_adapter(directory)
    for directory in (home / "late", root / "codes", elsewhere / "away"):
        (directory / "model.py").write_text(f"open({str(directory / 'ran')!r}, 'w').close()\n" + OUTPUT % "adapter")
    (root / "link").symlink_to(elsewhere / "away")
    lines = f"option.llm_engine=echo\noption.enable_lora=true\noption.adapters_root={root}\n"
    properties.write_text(lines)
    with serve("--properties", str(properties)) as server:
        assert register(server, "late", home / "late").status_code == 200
        assert register(server, "plain", root / "plain").status_code == 200
        for name, src in (
            ("a", elsewhere / "away"),
            ("b", root / "link"),
            ("c", f"{root}/../elsewhere/away"),
            ("d", f"file://{elsewhere}/away"),
            ("e", "/etc"),
            ("f", "/nowhere"),
        ):
            found = register(server, name, src)
            assert (
                found.status_code,
                "only from the model's directory and from option.adapters_root" in found.text,
            ) == (
                400,
                True,
            )
        update = call(server, "POST", "/plain/update", params={"src": str(elsewhere / "away")})
        assert update.status_code == 400
        refused = register(server, "codes", root / "codes")
        assert (refused.status_code, "set option.adapters_code=true" in refused.text) == (424, True)
        assert call(server, "POST", "/late/update").status_code == 200
    ran = [path.parent.name for path in tmp_path.rglob("ran")]
    assert ran == ["late"]
    properties.write_text(lines + "option.adapters_code=true\n")
    with serve("--properties", str(properties)) as server:
        assert register(server, "codes", root / "codes").status_code == 200
        assert ask(server, {}, "codes").json()["by"] == "adapter"
