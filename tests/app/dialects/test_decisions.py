"""Decisions on a real server: bodies that clients were recorded to send, forms, all modes, and several questions."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.app.server import AppServer, serve
from tests.doubles import tiny
from tests.servers import LiveServer, http, options, post_bytes, wait_for
from tests.user_files import write_adapter

DOT = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="  # a pixel
)
NOUL = {"type": "noul", "instructions": "Is it urgent?"}

TYPESAFE: dict[str, Any] = {
    "state": {"t": "hi"},
    "model": "jev-latest",
    "questions": {
        "n": {"type": "noul", "instructions": "yes?"},
        "c": {"type": "choice", "instructions": "w", "criteria": {"a": None, "b": "bee"}},
        "s": {"type": "score", "instructions": "r", "criteria": ["x", {"k": 1}]},
    },
}
"""typesafe-sdk 0.7.5's body; that of @ai-sdk/typesafe-ai 3.0.0 has the same fields."""

VERCEL: dict[str, Any] = {
    "model": "m",
    "input": [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "hi"},
                {"type": "input_json", "data": {"a": 1}},
                {"type": "input_text", "text": "[1,2]"},
            ],
        }
    ],
    "questions": [
        {"type": "predicate", "name": "b", "instructions": "fruit?\n\nCriteria for true:\nyes it is"},
        {
            "type": "choice",
            "name": "c",
            "instructions": "which",
            "choices": [{"value": "x"}, {"value": "y", "description": "why"}],
        },
        {
            "type": "score",
            "name": "s",
            "instructions": "how",
            "levels": [{"label": "0", "description": "low"}, {"label": "1", "description": '{"k":1}'}],
        },
    ],
}
"""The body of @ai-sdk/openai 4.0.118."""

LANGCHAIN: dict[str, Any] = {
    "model": "m",
    "input": [{"role": "user", "content": "h"}, {"role": "user", "content": "t"}],
    "questions": [{"type": "predicate", "name": "u", "instructions": "Urgent?"}],
}
"""The body of langchain-openai 1.7.4."""


@pytest.fixture(scope="module")
def server() -> Iterator[AppServer]:
    with serve("--engine", "echo", *options("option.served_model_name=m")) as server:
        server.wait_ready()
        yield server


def ask(server: LiveServer, path: str, body: Any, status: int = 200, **headers: str) -> Any:
    found = http.post(server.url + path, json=body, headers=headers)
    assert found.status_code == status, found.text
    return found.json()


def check_openai(found: dict[str, Any], body: dict[str, Any]) -> None:
    """Check a response as @ai-sdk/openai does: a result for each question under its name, numbers from 0 to 1."""
    assert [(answer["type"], answer["name"]) for answer in found["answers"]] == [
        (question["type"], question["name"]) for question in body["questions"]
    ]
    for answer in found["answers"]:
        options = answer.get("probabilities", [answer])
        assert all(0 <= option["probability"] <= 1 for option in options)
        assert all(type(option.get("value", "")) in (str, int) for option in options)
        assert 0 <= answer.get("confidence", 0) <= 1
    usage = found["usage"]
    assert usage["input_tokens_details"].keys() == {"cached_tokens", "cache_write_tokens"}
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


@pytest.mark.parametrize("path", ["/v1/systemone", "/invocations"])
def test_what_typesafes_clients_send(server: AppServer, path: str) -> None:
    found = ask(server, path, TYPESAFE)
    assert found["model"] == "m"
    n, c, s = (found["answers"][name] for name in "ncs")
    assert n.keys() == {"type", "noul"}
    assert c["probabilities"].keys() == {"a", "b"}
    assert s["legend"] == {"0": "x", "1": {"k": 1}}
    assert isinstance(found["usage"]["input_tokens"], int)


@pytest.mark.parametrize("path", ["/v1/systemone", "/invocations"])
def test_a_level_in_the_legend_has_all_digits_of_its_numbers(server: AppServer, path: str) -> None:
    level = {"account": 1 << 64}
    body = {"state": "", "questions": {"q": {"type": "score", "criteria": ["x", level]}}}
    assert ask(server, path, body)["answers"]["q"]["legend"] == {"0": "x", "1": level}


@pytest.mark.parametrize("path", ["/v1/decisions", "/invocations"])
@pytest.mark.parametrize("body", [VERCEL, LANGCHAIN], ids=["vercel", "langchain"])
def test_what_openais_clients_send(server: AppServer, path: str, body: dict[str, Any]) -> None:
    check_openai(ask(server, path, body), body)


def test_what_strands_sends_has_no_model(server: AppServer) -> None:
    question = {"type": "choice", "instructions": "urgent", "criteria": {"true": None, "false": None}}
    found = ask(server, "/invocations", {"state": "s", "questions": {"urgent": question}})
    assert found["answers"]["urgent"]["choice"] in ("true", "false")


@pytest.mark.parametrize(
    "mode",
    [
        "option.rolling_batch=disable",
        "option.tgi_compat=true",
        "option.openai_compat=true",
        "option.async_mode=true",
    ],
)
def test_invocations_reads_both_apis_in_every_mode(mode: str) -> None:
    with serve("--engine", "echo", *options(mode, "option.served_model_name=m")) as server:
        server.wait_ready()
        for path in ("/invocations", "/v1/systemone"):
            assert [*ask(server, path, TYPESAFE)["answers"]] == ["n", "c", "s"]
        for path in ("/invocations", "/v1/decisions"):
            check_openai(ask(server, path, VERCEL), VERCEL)
        refused = ask(server, "/invocations", {"state": "s", "questions": {"q": {"type": "essay"}}}, 422)
        assert refused["detail"][0]["loc"] == ["body", "questions", "q", "type"]


def test_equal_requests_have_equal_numbers_alone_and_among_others(server: AppServer) -> None:
    alone = ask(server, "/v1/systemone", {**TYPESAFE, "questions": {"n": TYPESAFE["questions"]["n"]}})
    among = ask(server, "/v1/systemone", TYPESAFE)
    assert alone["answers"]["n"] == among["answers"]["n"]


def test_the_header_is_the_id_of_the_response_and_errors_have_it_too(server: AppServer) -> None:
    found = http.post(server.url + "/v1/systemone", json=TYPESAFE)
    assert found.headers["x-typesafe-request-id"] == found.json()["id"]
    refused = http.post(server.url + "/v1/systemone", json={})
    assert refused.headers["x-typesafe-request-id"].startswith("decision-")
    assert refused.status_code == 422


# -- forms -------------------------------------------------------------------------------------------------------------


def form(server: AppServer, document: Any, parts: tuple[str, ...] = ("asset-0",), status: int = 200) -> Any:
    text = document if isinstance(document, str) else json.dumps(document)
    files: list[tuple[str, Any]] = [("request", (None, text, "application/json"))]
    files += [(part, (part, DOT, "image/png")) for part in parts]
    found = http.post(server.url + "/v1/systemone", files=files)
    assert found.status_code == status, found.text
    return found.json()


ASSETS = {"<image:0>": {"type": "image", "part": "asset-0"}}


def test_a_forms_image_replaces_its_name_in_texts(server: AppServer) -> None:
    body = {"state": {"photo": "<image:0>"}, "questions": {"q": NOUL}}
    found = form(server, {**body, "assets": ASSETS})
    encoded = {"<image:0>": {"type": "image", "format": "png", "data_base64": base64.b64encode(DOT).decode()}}
    assert ask(server, "/v1/systemone", {**body, "assets": encoded})["answers"] == found["answers"]


@pytest.mark.parametrize(
    ("document", "parts", "words"),
    [
        ({"state": "x"}, ("asset-0",), "is not the part of an asset"),
        ({"state": "<image:0>", "assets": ASSETS}, (), "is not a file of the form"),
        ({"state": "<image:0>", "assets": {"<image:0>": {"type": "image"}}}, (), "either data_base64 or part"),
        ("{", (), "not valid JSON"),
        ("[]", (), "must be a JSON object"),
    ],
)
def test_a_wrong_form_is_refused_by_its_part(
    server: AppServer, document: Any, parts: tuple[str, ...], words: str
) -> None:
    body = document if isinstance(document, str) else {**document, "questions": {"q": NOUL}}
    assert words in form(server, body, parts, 422)["detail"][0]["msg"]


def test_other_content_types_are_refused_with_what_is_read(server: AppServer) -> None:
    found = http.post(server.url + "/v1/systemone", content="x", headers={"content-type": "text/csv"})
    assert found.status_code == 415
    assert "with the JSON document as the part 'request'" in found.text


def test_a_part_needs_a_form(server: AppServer) -> None:
    body = {"state": "<image:0>", "assets": ASSETS, "questions": {"q": NOUL}}
    assert ask(server, "/v1/systemone", body, 422)["detail"][0]["loc"] == ["body", "assets", "<image:0>", "part"]


# -- what stands around a request --------------------------------------------------------------------------------------


def test_a_full_queue_refuses_all_questions() -> None:
    room = options("option.max_rolling_batch_size=1", "job_queue_size=1", "option.echo_tokens_per_second=20")
    long = {"inputs": "a", "parameters": {"max_new_tokens": 100_000}}
    with serve("--engine", "echo", *room) as server, contextlib.ExitStack() as held:
        for _ in range(2):
            connection = held.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            connection.sendall(post_bytes(long))
        wait_for(lambda: server.metric("lmi_queued_requests") == 1, 5, "nobody waits")
        found = http.post(server.url + "/v1/systemone", json=TYPESAFE)
        assert found.status_code == 429, found.text
        assert found.json()["error"]["code"] == "rate_limit_exceeded"
        assert int(found.headers["retry-after"]) >= 1


def test_a_state_that_is_too_long_is_refused_with_the_question() -> None:
    with serve("--engine", "echo", *options("option.max_model_len=64")) as server:
        server.wait_ready()
        body = {"state": "a " * 100, "questions": {"short": NOUL}}
        found = ask(server, "/v1/systemone", body, 400)["error"]
        assert found["message"].startswith("'state with questions.short' has ")
        assert found["code"] == "context_length_exceeded"


def test_a_label_that_is_no_single_token_is_refused_with_the_question(tmp_path: Any) -> None:
    directory = tiny.make(tmp_path / "tiny")
    with serve("--engine", "echo", *options(f"option.echo_tokenizer={directory}")) as server:
        server.wait_ready()
        found = ask(server, "/v1/systemone", {"state": "a", "questions": {"q": NOUL}}, 400)
        assert found["error"]["message"].startswith("state with questions.q: the label 'yes' is not a single token")


def test_an_adapter_may_be_the_model(tmp_path: Any) -> None:
    write_adapter(tmp_path / "sql")
    lora = options("option.enable_lora=true", "option.adapters_root=/")
    with serve("--engine", "echo", *lora) as server:
        server.wait_ready()
        assert http.post(f"{server.url}/adapters?name=sql&src={tmp_path / 'sql'}").status_code == 200
        assert ask(server, "/v1/systemone", {**TYPESAFE, "model": "sql"})["model"] == "sql"


def test_models_are_listed_for_both_sdks(server: AppServer) -> None:
    found = http.get(server.url + "/v1/models").json()
    assert [model["id"] for model in found["data"]] == [model["name"] for model in found["models"]]
    assert all(model.keys() == {"name", "description", "release_date"} for model in found["models"])
