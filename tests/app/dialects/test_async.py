"""LMI's async mode over HTTP: which bodies it answers, with what headers, beside which routes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.app.server import serve
from tests.servers import LiveServer, http

ASYNC = ("--engine", "echo", "-o", "option.async_mode=true", "-o", "option.rolling_batch=disable")
TWO = {"max_new_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "a b"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with serve(*ASYNC) as found:
        yield found


def test_a_whole_answer_has_its_length(server: LiveServer) -> None:
    found = server.post({"inputs": "a b", "parameters": TWO})
    assert found.content == b'{"generated_text":" a b"}\n'
    assert found.headers["content-type"] == "application/json"
    assert found.headers["content-length"] == str(len(found.content))


@pytest.mark.parametrize("path", ["/invocations", "/predictions/model", "/models/model/invoke"])
def test_a_stream_is_lines_on_every_route(server: LiveServer, path: str) -> None:
    found = server.post({"inputs": "a b", "parameters": TWO, "stream": True}, path)
    assert found.headers["content-type"] == "application/jsonlines"
    first, last, *ends = found.text.split("\n")
    assert '"generated_text":null' in first
    assert '"generated_text":" a b"' in last
    assert ends == ["", "", ""]


def test_chats_and_prompts_stream_openais_chunks_as_lines(server: LiveServer) -> None:
    for body in (CHAT, {"prompt": "a b", "max_tokens": 2}):
        found = server.post({"model": "lmi", **body, "stream": True})
        assert found.headers["content-type"] == "application/jsonlines"
        assert found.text.endswith('"finish_reason":"length"}]}\n\n')
        assert "data:" not in found.text


def test_openais_own_routes_stay_openais(server: LiveServer) -> None:
    found = server.post({"model": "lmi", **CHAT, "stream": True}, "/v1/chat/completions")
    assert found.headers["content-type"].startswith("text/event-stream")
    assert found.text.endswith("data: [DONE]\n\n")
    listed = http.get(server.url + "/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["model", "lmi"]


def test_text_is_a_prompt(server: LiveServer) -> None:
    found = http.post(server.url + "/invocations", content=b"a b", headers={"content-type": "text/plain"})
    assert found.json()["generated_text"].startswith(" a b")


def test_what_has_no_effect_is_reported(server: LiveServer) -> None:
    parameters = {**TWO, "n": 2, "num_beams": 3, "topk": 1, "return_token_ids": True}
    found = server.post({"inputs": "a", "parameters": parameters})
    assert found.status_code == 200
    told = "parameters.num_beams, parameters.topk, parameters.n, parameters.return_token_ids"
    assert found.headers["x-lmi-ignored-parameters"] == told
    assert "x-lmi-ignored-parameters" not in server.post({"prompt": "a", "return_token_ids": True}).headers


def test_a_prompt_of_embeddings_is_refused(server: LiveServer) -> None:
    for path, body, named in (
        ("/invocations", {"inputs": "a", "parameters": {"prompt_embeds": "aa"}}, "parameters.prompt_embeds"),
        ("/invocations", {"prompt": "a", "prompt_embeds": "aa"}, "prompt_embeds"),
        ("/v1/completions", {"prompt": "a", "prompt_embeds": ["aa"]}, "prompt_embeds"),
    ):
        found = server.post(body, path)
        assert found.status_code in (400, 424)
        assert f"{named}=" in found.text
        assert "is not supported: a prompt is text or token ids" in found.text
    assert server.post({"prompt": "a", "prompt_embeds": None}).status_code == 200


def test_refusals_have_vllms_statuses(server: LiveServer) -> None:
    for body, status, begins in (
        ([], 424, "Input parsing failed: the body must be a JSON object"),
        ({"text": "a"}, 424, "Input parsing failed: the body must be a JSON object"),
        ({"inputs": "a", "parameters": {"top_p": "x"}}, 424, "Input parsing failed: parameters.top_p="),
        ({"inputs": "a", "model": "b"}, 404, "Model not found: b; served here: lmi, model"),
        ({"inputs": "a", "parameters": {"max_new_tokens": 10**8}}, 424, "parameters.max_new_tokens="),
        ({**CHAT, "max_tokens": 10**8}, 400, "max_tokens="),
    ):
        found = server.post(body)
        assert (found.status_code, found.json()["code"]) == (status, status), found.text
        assert found.json()["error"].startswith(begins)
        assert set(found.json()) == {"error", "code"}


SESSION = "x-amzn-sagemaker-session-id"
NEW, CLOSE = {"requestType": "NEW_SESSION"}, {"requestType": "CLOSE"}


def test_sessions_are_on_and_lmis(server: LiveServer) -> None:
    found = server.post(NEW, headers={SESSION: "NEW_SESSION"})
    id = found.headers[SESSION].partition("; Expires=")[0]
    assert (found.status_code, found.json()) == (200, {"result": f"Session {id} created"})
    for header in (id, "NEW_SESSION", ""):
        assert server.post({"inputs": "a b", "parameters": TWO}, headers={SESSION: header}).status_code == 200
    found = server.post(CLOSE, headers={SESSION: id})
    assert (found.status_code, found.headers["x-amzn-sagemaker-closed-session-id"]) == (200, id)
    for body, header, told in (
        ({"inputs": "a"}, id, f"session not found: {id}"),
        ({**CHAT, "stream": True}, "nobody", "session not found: nobody"),
        (CLOSE, id, f"session not found: {id}"),
        (CLOSE, "", "Session ID is required in request headers to close a session"),
        ({"requestType": "END"}, "", "requestType='END': must be NEW_SESSION or CLOSE"),
    ):
        found = server.post(body, headers={SESSION: header})
        assert (found.status_code, found.json()) == (424, {"error": f"Input parsing failed: {told}", "code": 424})


def test_without_sessions_only_requests_about_them_fail() -> None:
    """LMI's option broke every request."""
    with serve(*ASYNC, "-o", "option.enable_stateful_sessions=false") as server:
        for body, header in ((NEW, ""), (CLOSE, "x"), ({"inputs": "a"}, "x"), (CHAT, "NEW_SESSION")):
            found = server.post(body, headers={SESSION: header})
            assert found.status_code == 424
            assert "stateful sessions not enabled" in found.json()["error"]
        assert server.post({"inputs": "a b", "parameters": TWO}).status_code == 200
        assert server.post(CHAT).status_code == 200


def test_chats_may_have_openais_form_all_the_same() -> None:
    with serve(*ASYNC, "-o", "option.openai_compat=true") as server:
        assert server.post({**CHAT, "stream": True}).headers["content-type"].startswith("text/event-stream")
        assert server.post({"inputs": "a b", "parameters": TWO}).content == b'{"generated_text":" a b"}\n'


def test_served_names_replace_lmi() -> None:
    with serve(*ASYNC, "-o", "option.served_model_name=abc") as server:
        assert server.post({"prompt": "a", "max_tokens": 1}).json()["model"] == "abc"
        assert server.post({"inputs": "a", "model": "lmi"}).status_code == 404


def test_the_name_in_answers_is_listed_where_any_is_served() -> None:
    with serve(*ASYNC, "-o", "option.served_model_name=*") as server:
        assert server.post({"prompt": "a", "max_tokens": 1}).json()["model"] == "lmi"
        assert [model["id"] for model in http.get(server.url + "/v1/models").json()["data"]] == ["model", "lmi"]


@pytest.mark.parametrize("name", ["truncate", "truncate_prompt_tokens"])
def test_a_prompt_is_cut_to_what_leaves_room_for_the_answer(name: str) -> None:
    words = [f"w{number}" for number in range(50)]
    with serve(*ASYNC, "-o", "option.max_model_len=32") as server:
        body = {"inputs": " ".join(words), "parameters": {"max_new_tokens": 8, name: -1}}
        assert server.post(body).json()["generated_text"].split() == words[-24:-16]
        refused = server.post({**body, "parameters": {"max_new_tokens": 8}})
        assert (refused.status_code, "50 tokens" in refused.text) == (424, True)
        chat = {"messages": [{"role": "user", "content": body["inputs"]}], "truncate_prompt_tokens": -1}
        assert server.post(chat).json()["usage"] == {"prompt_tokens": 31, "completion_tokens": 1, "total_tokens": 32}
        short = server.post({"prompt": "a b", "max_tokens": 2, "truncate_prompt_tokens": -1})
        assert short.json()["choices"][0]["text"] == " a b"
        long = server.post({"prompt": "a b", "max_tokens": 40, "truncate_prompt_tokens": -1})
        assert (long.status_code, "max_tokens=40" in long.text) == (400, True)
