"""LMI's async mode and dynamic batching over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from handler.config.config import Config
from handler.core.errors import GenerationFailed, Unavailable
from handler.scheduler.batcher import MAX_OVERTAKES
from handler.serving.request.gate import BatchGate
from tests.app.server import serve
from tests.servers import LiveServer, http, wait_for
from tests.services import begin, load_echo
from tests.unit.http.connection import settle

# -- LMI's async mode over HTTP: which bodies it answers, with what headers, beside which routes -----------------------


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
        assert found.text.endswith('"finish_reason":"length","stop_reason":null}]}\n\n')
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
        assert "is not supported: a prompt must be text or token ids" in found.text
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
        assert [model["id"] for model in http.get(server.url + "/v1/models").json()["data"]] == ["abc", "model"]


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


# -- dynamic batching: lists, order, who shares a batch, who waits, and who fails alone --------------------------------


DYNAMIC = ("--engine", "echo", "-o", "option.rolling_batch=disable")


@pytest.fixture(scope="module")
def dynamic_server() -> Iterator[LiveServer]:
    with serve(*DYNAMIC, "-o", "batch_size=4", "-o", "max_batch_delay=50") as found:
        yield found


def test_a_list_is_answered_in_order(dynamic_server: LiveServer) -> None:
    found = dynamic_server.post({"inputs": ["a", "b c", "d"], "parameters": {"max_new_tokens": 2}})
    assert found.json() == [{"generated_text": text} for text in (" a a", " b c", " d d")]


def test_requests_of_other_parameters_share_a_batch_and_bad_ones_fail(dynamic_server: LiveServer) -> None:
    bodies = [
        {"inputs": "a", "parameters": {"max_new_tokens": 1}},
        {"inputs": "b", "parameters": {"max_new_tokens": 3}},
        {"inputs": "c", "parameters": {"top_p": 9}},
        {"inputs": ["d", "   "], "parameters": {"max_new_tokens": 3}},
        {"inputs": ["e"], "parameters": {"max_new_tokens": 2, "do_sample": True}},
    ]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(dynamic_server.post, bodies))
    assert [answer.status_code for answer in answers] == [200, 200, 424, 424, 200]
    assert answers[1].json() == [{"generated_text": " b b b"}]
    assert "top_p" in answers[2].json()["error"]
    assert "no tokens" in answers[3].json()["error"]


def test_details_are_refused_with_the_route_that_has_them(dynamic_server: LiveServer) -> None:
    body = {"inputs": "a", "parameters": {"details": True, "max_new_tokens": 1}}
    assert "route=/generate" in dynamic_server.post(body).json()["error"]
    routed = dynamic_server.post(body, headers={"X-Amzn-SageMaker-Custom-Attributes": "route=/generate"})
    assert routed.json()["details"]["generated_tokens"] == 1


def test_streaming_lines() -> None:
    with serve(*DYNAMIC, "-o", "option.enable_streaming=true") as server:
        found = server.post({"inputs": "a b", "parameters": {"max_new_tokens": 3}})
        assert found.headers["content-type"] == "application/jsonlines"
        assert found.text == '{"outputs":[" a"]}\n{"outputs":[" b"]}\n{"outputs":[" a"]}\n'


def test_a_list_streams_a_line_a_step_with_the_next_token_of_each_prompt() -> None:
    with serve(*DYNAMIC, "-o", "option.enable_streaming=true") as server:
        found = server.post({"inputs": ["a b", "c", "d"], "parameters": {"max_new_tokens": 2}})
        assert found.headers["content-type"] == "application/jsonlines"
        assert found.text == '{"outputs":[" a"," c"," d"]}\n{"outputs":[" b"," c"," d"]}\n'


def gate(size: int = 2, delay: float = 0.05, max_queued: int = 10) -> BatchGate:
    return BatchGate(Config(batch_size=size, max_batch_delay=round(delay * 1000), job_queue_size=max_queued))


async def enter(found: BatchGate, log: list[str], name: str, hold: float) -> None:
    turn = found.join()
    try:
        await found.wait(turn)
        log.append(f"+{name}")
        await asyncio.sleep(hold)
    finally:
        found.leave(turn)
    log.append(f"-{name}")


def test_a_full_batch_starts_at_once_and_the_next_when_it_has_ended() -> None:
    async def story() -> None:
        found, log = gate(delay=60), list[str]()
        began = time.monotonic()
        await asyncio.gather(
            *(enter(found, log, name, hold) for name, hold in (("a", 0.01), ("b", 0.05), ("c", 0), ("d", 0)))
        )
        assert (set(log[:2]), log[2:4]) == ({"+a", "+b"}, ["-a", "-b"])
        assert set(log[4:]) == {"+c", "+d", "-c", "-d"}
        assert time.monotonic() - began < 30  # nobody waited for the delay

    asyncio.run(story())


def test_a_batch_that_does_not_fill_starts_after_the_delay() -> None:
    async def story() -> None:
        log: list[str] = []
        began = time.monotonic()
        await enter(gate(), log, "a", 0)
        assert time.monotonic() - began > 0.04

    asyncio.run(story())


def test_one_that_goes_away_while_waiting_or_running_leaves_no_trace() -> None:
    async def story() -> None:
        found, log = gate(size=1), list[str]()
        running = asyncio.ensure_future(enter(found, log, "a", 60))
        waiting = asyncio.ensure_future(enter(found, log, "b", 60))
        await settle()
        waiting.cancel()
        running.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        await asyncio.wait_for(enter(found, log, "c", 0), 30)
        assert log == ["+a", "+c", "-c"]

    asyncio.run(story())


async def enter_line(found: BatchGate, log: list[str], name: str) -> None:
    turn = found.join(line=True)
    try:
        await found.wait(turn)
        log.append(name)
    finally:
        found.leave(turn)


def test_lines_of_batches_wait_behind_others_which_overtake_ten_times() -> None:
    async def story() -> str:
        found, log = gate(size=1, max_queued=25), list[str]()
        running = asyncio.ensure_future(enter(found, log, "", 60))
        lines = []
        for _ in range(25):
            await settle()
            lines.append(asyncio.ensure_future(enter_line(found, log, "l")))
        await settle()
        others = [asyncio.ensure_future(enter(found, log, "i", 0)) for _ in range(25)]
        await settle()
        assert found.num_waiting == 25, "lines do not use the queue's places"
        lines.pop().cancel()
        running.cancel()
        await asyncio.wait_for(asyncio.gather(*lines, *others), 30)
        return "".join(name for name in log if name in ("+i", "l")).replace("+", "")

    assert asyncio.run(story()) == ("i" * MAX_OVERTAKES + "l") * 2 + "iiiii" + "l" * 22


def test_a_batch_has_so_many_lines_of_batches() -> None:
    async def story() -> list[int]:
        found, seen = BatchGate(Config(batch_size=4, max_batch_delay=0, predict_timeout=0.0), max_lines=2), list[int]()
        lines = [found.join(line=True) for _ in range(5)]
        while lines:
            while not (started := [line for line in lines if line.done()]):
                await asyncio.sleep(0)
            seen.append(len(started))
            for line in started:
                lines.remove(line)
                found.leave(line)
        return seen

    assert asyncio.run(asyncio.wait_for(story(), 30)) == [2, 2, 1]


def test_the_queue_is_bounded() -> None:
    async def story() -> None:
        found, log = gate(size=1, max_queued=1), list[str]()
        tasks = [asyncio.ensure_future(enter(found, log, name, 0.05)) for name in "ab"]
        await settle()
        with pytest.raises(Unavailable, match="job_queue_size"):
            await enter(found, log, "c", 0)
        await asyncio.gather(*tasks)

    asyncio.run(story())


def test_waiting_too_long_for_a_batch_is_an_error() -> None:
    async def story() -> None:
        found = BatchGate(Config(max_batch_delay=0, predict_timeout=0.05))
        log: list[str] = []
        running = asyncio.ensure_future(enter(found, log, "a", 60))
        await settle()
        with pytest.raises(Unavailable, match="predict_timeout"):
            await enter(found, log, "b", 0)
        assert found.num_waiting == 0
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await asyncio.wait_for(enter(found, log, "c", 0), 30)

    asyncio.run(story())


def test_a_client_that_goes_away_as_its_batch_starts_leaves_no_trace() -> None:
    """Cancelled between being let in and noticing it."""

    async def story() -> None:
        found, log = gate(size=1, delay=60), list[str]()
        going = asyncio.ensure_future(enter(found, log, "a", 0))
        await asyncio.sleep(0)
        going.cancel()
        with pytest.raises(asyncio.CancelledError):
            await going
        await asyncio.wait_for(enter(found, log, "b", 0), 30)

    asyncio.run(story())


def test_the_queue_is_seen_from_outside() -> None:
    slow = ("-o", "option.echo_tokens_per_second=20", "-o", "job_queue_size=1", "-o", "max_batch_delay=0")
    with serve(*DYNAMIC, *slow) as server, ThreadPoolExecutor(2) as pool:
        running = [pool.submit(server.post, {"inputs": "a", "parameters": {"max_new_tokens": 30}}) for _ in range(2)]
        wait_for(lambda: server.metric("lmi_queued_requests") == 1, 5, "nobody waits")
        assert server.post({"inputs": "a"}).status_code == 503
        assert [future.result().status_code for future in running] == [200, 200]


def test_a_request_that_fails_while_waiting_lets_the_next_batch_begin() -> None:
    def ask(tokens: int) -> dict[str, Any]:
        return {"inputs": "a", "parameters": {"max_new_tokens": tokens}}

    async def story() -> None:
        options = ("option.rolling_batch=disable", "batch_size=1", "option.echo_tokens_per_second=100")
        model = await load_echo(*options)
        model.start()
        await model.availability.opened
        try:
            running, ran = begin(model, ask(10))
            while not running.begun:
                await settle()
            waiting, failed = begin(model, ask(5))
            following, followed = begin(model, ask(3))
            await asyncio.sleep(0.02)
            assert not ran.done(), "the others wait for it"
            waiting.fail(GenerationFailed("gone"))
            await asyncio.wait_for(asyncio.gather(ran, failed, followed), 10)
            assert (running.status, waiting.status, following.status) == (200, 424, 200)
            assert model.driver.batcher.num_tokens == 10 + 3
        finally:
            model.close()

    asyncio.run(story())
