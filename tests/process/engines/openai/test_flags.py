"""The engine openai in front of servers whose flags change what becomes of structured output."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from handler.core.values import Finish, Sampling, StructuredOutput
from handler.engines.base import EngineRequest
from handler.engines.remote import engine as remote_engine
from tests.doubles import tiny
from tests.process.engines.openai.server import DONE, HEAD, Server, enforcing, event, listening, status
from tests.process.engines.openai.test_bad_servers import engine, one, run

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


def test_a_server_is_asked_once_and_again_after_a_while_and_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as server, engine(server) as found:
        server.always = enforcing
        for key in (1, 2):
            assert one(found, RULED, key=key) == OBEYED
        assert num_ruled(server) == 3 + 2
        server.scripts = [(status(500),)]
        assert one(found, FREE, key=3) == ([5, 5], Finish.LENGTH, ""), "tried again"
        server.always = REASONING
        assert "does not enforce" in one(found, RULED, key=4).error
        monkeypatch.setattr(remote_engine, "_TRUST", 0.0)
        found._enforcing.clear()
        server.always = enforcing
        assert one(found, RULED, key=5) == OBEYED
        server.always = REASONING
        assert "does not enforce" in one(found, RULED, key=6).error


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
        assert not found._parts
