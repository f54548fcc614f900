"""The engine openai in front of servers whose flags change what becomes of structured output."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from handler.core.values import Finish, Sampling, StructuredOutput
from handler.engines import base
from handler.engines.base import EngineRequest
from handler.engines.remote import engine as remote_engine
from tests.doubles import tiny
from tests.process.engines.openai.server import DONE, HANG, HEAD, Received, Server, enforcing, event, listening, status
from tests.process.engines.openai.test_bad_servers import PATIENCE, engine, one, run

RULED = Sampling(max_new_tokens=2, logprobs=False, structured_output=StructuredOutput("choice", '["ab"]'))
FREE = RULED._replace(structured_output=None)
OBEYED = ([ord("a"), ord("b")], Finish.LENGTH, "")
THOUGHT_END = 9
REASONING = partial(enforcing, thought_end=THOUGHT_END)
"""vLLM with --reasoning-parser."""

REFUSAL = "to the client: the {} server does not enforce structured output on this prompt"


def num_ruled(server: Server) -> int:
    """The number of requests with structured output."""
    return sum("structured_outputs" in request.body for request in server.received)


@pytest.mark.parametrize(("kind", "owner"), [("vllm", "vllm"), ("dynamo", "nvidia"), ("lmi", "lmi-handler")])
def test_structured_output_that_a_server_drops_is_refused(kind: str, owner: str) -> None:
    with listening(owner=owner) as server, engine(server, base_url_kind=kind) as found:
        server.always = partial(enforcing, thought_end=-1)
        assert one(found, RULED).error.startswith(REFUSAL.format(kind))
        assert one(found, FREE, key=2) == ([5, 5], Finish.LENGTH, "")
        server.always = enforcing
        assert one(found, RULED, key=3) == OBEYED


def test_a_prompt_in_which_the_thought_has_ended_is_served() -> None:
    with listening() as server, engine(server) as found:
        server.always = REASONING
        assert "--reasoning-parser" in one(found, RULED).error
        found.add(EngineRequest(2, [1, THOUGHT_END], RULED))
        assert run(found, 2)[2] == OBEYED


def test_a_server_is_asked_once_later_again_and_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as server, engine(server) as found:
        server.always = enforcing
        for key in (1, 2):
            assert one(found, RULED, key=key) == OBEYED
        assert num_ruled(server) == 3 + 2
        server.scripts = [(status(500),)]
        assert one(found, FREE, key=3) == ([5, 5], Finish.LENGTH, ""), "tried again"
        server.always = REASONING
        assert "does not enforce" in one(found, RULED, key=4).error
        monkeypatch.setattr(remote_engine, "TRUST", 0.0)
        found._servers[0].enforces_until = 0.0
        server.always = enforcing
        assert one(found, RULED, key=5) == OBEYED
        server.always = REASONING
        assert "does not enforce" in one(found, RULED, key=6).error


def test_a_busy_server_is_not_asked_again() -> None:
    with listening() as server, engine(server) as found:
        server.always = enforcing
        assert one(found, RULED) == OBEYED
        server.scripts = [(status(429),)]
        assert one(found, RULED, key=2) == OBEYED
        assert num_ruled(server) == 3 + 1 + 2


def test_questions_about_a_prompt_have_the_cache_salt_of_its_request() -> None:
    with listening() as server, engine(server) as found:
        server.always = REASONING
        found.add(EngineRequest(1, [1, THOUGHT_END], RULED._replace(cache_salt="tenant")))
        assert run(found, 1)[1] == OBEYED
        salts = {(tuple(one.body["prompt"]), one.body.get("cache_salt")) for one in server.received}
        assert salts == {((0,), None), ((1, THOUGHT_END), "tenant")}


def test_tokens_that_answer_questions_end_the_silence_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ahead = time.monotonic, [0.0]
    monkeypatch.setattr(base, "time", SimpleNamespace(monotonic=lambda: clock() + ahead[0]))
    monkeypatch.setattr(base, "_STANDSTILL", 1e9)

    def slow(received: Received) -> Sequence[bytes]:
        ahead[0] += 40
        return REASONING(received)

    with listening() as server, engine(server, timeout=90.0) as found:
        server.always = slow
        found.add(EngineRequest(1, [1, THOUGHT_END], RULED))
        ids: list[int] = []
        others: list[base.Output] = []
        deadline = clock() + PATIENCE
        while not others and clock() < deadline:
            found._end_silent()
            step = found.step()
            ids, others = ids + step.ids, step.others
            ids += [id for output in others for id in output.ids]  # if the last token and the end came together
        assert ahead[0] == 40 * 7
        assert (ids, [output.error for output in others]) == (OBEYED[0], [None])


def test_requests_at_the_same_time_share_their_questions() -> None:
    with listening() as server, engine(server) as found:
        server.always = REASONING
        for key in range(10):
            found.add(EngineRequest(key, [1, THOUGHT_END], RULED))
        assert list(run(found, *range(10)).values()) == [OBEYED] * 10
        assert num_ruled(server) == 3 + 3 + 10


def test_a_question_outlives_the_request_that_asked_first() -> None:
    with listening() as server, engine(server) as found:
        server.always = enforcing
        for key in (1, 2):
            found.add(EngineRequest(key, [1, 2], RULED))
        while not server.received:
            found._run_once()
        found.cancel(1)
        assert run(found, 2)[2] == OBEYED
        assert num_ruled(server) == 3 + 1


def test_a_question_ends_with_the_last_request_that_waits_for_it() -> None:
    with listening((HEAD, HANG), (HEAD, HANG)) as server, engine(server, timeout=0.3) as found:
        server.always = enforcing
        for key in (1, 2):
            found.add(EngineRequest(key, [1, 2], RULED))
        assert all("sent no token for 0.3 s" in result.error for result in run(found, 1, 2).values())
        assert server.left.acquire(timeout=PATIENCE)
        found.add(EngineRequest(3, [1, 2], RULED))
        while len(server.received) < 2:
            found.step()
        found.cancel(3)
        assert server.left.acquire(timeout=PATIENCE)
        assert one(found, RULED, key=4) == OBEYED
        assert num_ruled(server) == 2 + 3 + 1


def test_end_tokens_of_the_model_are_sent_along(tmp_path: Path) -> None:
    """vLLM leaves out those of generation_config.json with --generation-config vllm."""
    with listening() as server, engine(server, model=tiny.make(tmp_path)) as found:
        server.always = enforcing
        assert one(found, FREE._replace(stop_token_ids=(9,))).finish is Finish.LENGTH
        assert one(found, FREE._replace(stop_token_ids=(9,), ignore_eos=True), key=2).finish is Finish.LENGTH
        assert [request.body["stop_token_ids"] for request in server.received] == [[9, *tiny.EOS], [9]]
        server.scripts = [(HEAD, event(5), event(tiny.EOS[1], finish="stop", stop_reason=tiny.EOS[1]), DONE)]
        assert one(found, FREE, key=3) == ([5, tiny.EOS[1]], Finish.EOS, "")


def test_a_server_that_refuses_structured_output_says_so_itself() -> None:
    with (
        listening((status(400, {"error": {"message": "no backend", "code": 400}}),)) as server,
        engine(server) as found,
    ):
        assert one(found, RULED).error == "to the client: no backend"


def test_a_server_that_fails_while_it_is_asked_is_tried_again() -> None:
    with listening((status(500),)) as server, engine(server) as found:
        server.always = enforcing
        assert one(found, RULED) == OBEYED


def test_a_client_that_leaves_meanwhile_leaves_nothing_behind() -> None:
    with listening() as server, engine(server) as found:
        server.always = enforcing
        found.add(EngineRequest(1, [1, 2], RULED))
        found.cancel(1)
        assert one(found, RULED, key=2) == OBEYED
        assert found._steps.is_empty
