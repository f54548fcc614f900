"""Several engine processes behind one server: kills, hangs, conversations, adapters, metrics."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from handler.core.text import Prompt
from handler.core.values import Request
from handler.engines.process.replicas import Router, Workload
from tests.app.server import AppServer, refused_start, serve
from tests.app.test_engine_failures import stream
from tests.app.test_sessions import opened
from tests.process_tree import descendants
from tests.servers import http, wait_for
from tests.user_files import write_adapter

pytestmark = pytest.mark.long

STREAMS = 32
ECHO = ("--engine", "echo", "-o", "option.enable_lora=true", "-o", "option.adapters_root=/")


@contextlib.contextmanager
def replicas(count: int | str, *options: str, rate: int = 40, env: dict[str, str] | None = None) -> Iterator[AppServer]:
    options = (f"replicas={count}", f"echo_tokens_per_second={rate}", *options)
    with serve(*ECHO, *(word for one in options for word in ("-o", f"option.{one}")), env=env) as server:
        yield server


def engines() -> list[int]:
    """Process ids, in the order of the replicas."""
    return sorted(pid for pid, command in descendants(os.getpid()).items() if "engine_process" in command)


def figures(server: AppServer, name: str) -> list[float]:
    lines = http.get(server.url + "/metrics").text.splitlines()
    return [float(line.split()[1]) for line in lines if line.startswith(f"lmi_replica_{name}{{")]


def ping(server: AppServer) -> tuple[int, dict[str, Any]]:
    found = http.get(server.url + "/ping")
    return found.status_code, found.json().get("replicas")


def ask(words: str, tokens: int = 3) -> dict[str, Any]:
    return {"inputs": words, "parameters": {"max_new_tokens": tokens}}


@pytest.mark.parametrize(("count", "number"), [(2, signal.SIGKILL), (4, signal.SIGSTOP)])
def test_a_replica_that_is_lost_takes_only_its_own_streams(count: int, number: signal.Signals) -> None:
    with (
        replicas(count, "engine_timeout=2", "max_rolling_batch_size=64", rate=20) as server,
        ThreadPoolExecutor(STREAMS + 8) as pool,
    ):
        futures = [pool.submit(stream, server, ask(f"w{index}", 160)) for index in range(STREAMS)]
        wait_for(lambda: sum(figures(server, "active_sequences")) == STREAMS, 20, "the streams do not run")
        share = figures(server, "active_sequences")
        assert max(share) - min(share) <= 4, "they are spread"
        begun = figures(server, "generated_tokens_total")
        wait_for(lambda: figures(server, "generated_tokens_total")[0] > begun[0] + share[0], 10, "they have no tokens")
        victim = engines()[0]
        os.kill(victim, number)
        if number == signal.SIGSTOP:  # nobody can know at once
            wait_for(lambda: figures(server, "generated_tokens_total")[1] > 30 * share[1], 10, "the others stand still")
        else:
            wait_for(lambda: ping(server)[1]["ready"] == count - 1, 5, "nobody has noticed")
        new = [pool.submit(server.post, ask(f"n{index}")) for index in range(8)]
        for index, future in enumerate(new):
            assert future.result(10).json() == {"generated_text": f" n{index}" * 3}
        assert not all(future.done() for future in futures), "they were served at once"
        assert ping(server)[0] == 200
        ends = [future.result(30) for future in futures]
        lost = [lines for lines in ends if "error" in lines[-1]]
        assert len(lost) == share[0]
        for index, lines in enumerate(ends):
            *tokens, last = lines
            assert {line["token"]["text"] for line in tokens} <= {f" w{index}"}, "nobody gets another's tokens"
            assert sum("error" in line for line in lines) == (lines in lost)
            if lines in lost:
                assert "replica 0: engine failure" in last["error"]
            else:
                assert last["generated_text"] == f" w{index}" * 160
        wait_for(lambda: ping(server) == (200, {"ready": count, "total": count}), 20, "it does not come back")
        assert figures(server, "restarts_total") == [1] + [0] * (count - 1)
        assert server.metric("lmi_engine_restarts_total") == 1
        assert "replica 0 is ready again" in server.log
        before = figures(server, "requests_total")
        for index in range(count):
            server.post(ask(f"again{index}"))
        assert figures(server, "requests_total") == [one + 1 for one in before], "it serves beside the others again"


@pytest.mark.parametrize(("number", "streams"), [(signal.SIGKILL, True), (signal.SIGSTOP, False)])
def test_what_has_no_token_yet_is_answered_whole_by_another_replica(number: signal.Signals, streams: bool) -> None:
    count, clients = 3, 24
    with (
        replicas(count, "engine_timeout=8", "max_rolling_batch_size=16", rate=1) as server,
        ThreadPoolExecutor(clients) as pool,
    ):
        victim = engines()[0]
        os.kill(victim, signal.SIGSTOP)  # so that none of its requests begins
        bodies = [ask(f"w{index}", 3) for index in range(clients)]
        if streams:
            futures = [pool.submit(stream, server, body) for body in bodies]
        else:
            futures = [pool.submit(lambda body: [server.post(body).json()], body) for body in bodies]
        wait_for(lambda: sum(figures(server, "active_sequences")) == clients, 10, "the requests do not run")
        os.kill(victim, number)
        for index, future in enumerate(futures):
            *tokens, last = future.result(30)
            assert last["generated_text"] == f" w{index}" * 3
            assert "error" not in last
            assert [line["token"]["text"] for line in tokens] == [f" w{index}"] * (2 if streams else 0)
        given = figures(server, "requests_total")
        moved = sum(given) - clients
        assert moved > 0
        assert moved in given, "each request of the victim moves once, and no other"
        wait_for(lambda: ping(server) == (200, {"ready": count, "total": count}), 20, "it does not come back")
        assert sum(figures(server, "active_sequences")) == 0


def test_a_client_that_leaves_a_silent_replica_is_not_moved() -> None:
    with replicas(2, "engine_timeout=8", rate=1) as server, ThreadPoolExecutor(1) as pool:
        other = pool.submit(server.post, ask("x", 6))
        wait_for(lambda: sum(figures(server, "active_sequences")) == 1, 10, "it does not run")
        os.kill(engines()[1], signal.SIGSTOP)
        with contextlib.suppress(Exception):
            http.post(server.url + "/invocations", json=ask("y", 3), timeout=0.7)
        assert other.result(20).json() == {"generated_text": " x" * 6}
        assert sum(figures(server, "requests_total")) == 2


def test_a_request_that_kills_is_moved_once_and_the_last_replica_lives() -> None:
    with replicas(3, "echo_cues=true") as server:
        assert "engine failure" in server.post(ask("<die>")).json()["error"]
        assert ping(server)[1]["ready"] >= 1
        wait_for(lambda: ping(server)[1]["ready"] == 3, 20, "they do not come back")
        assert sum(figures(server, "restarts_total")) == 2


def test_ping_is_503_while_no_replica_can_serve() -> None:
    with replicas(2) as server:
        for pid in engines():
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: ping(server) == (503, {"ready": 0, "total": 2}), 5, "the ping still says 200")
        assert server.post(ask("a")).json() == {"generated_text": " a a a"}, "it has waited"
        assert ping(server)[0] == 200


@contextlib.contextmanager
def chosen() -> Iterator[dict[int, list[int]]]:
    """The replicas of each conversation's turns, by its number, as the servers of this process choose them."""
    found: dict[int, list[int]] = defaultdict(list)
    choose = Router.choose

    def noted(router: Router, request: Request, prompt: Prompt, loads: Sequence[Workload]) -> int:
        replica = choose(router, request, prompt, loads)
        (number,) = set(re.findall(r"conversation (\d+)", prompt.text))
        found[int(number)].append(replica)
        return replica

    with mock.patch.object(Router, "choose", noted):
        yield found


@pytest.mark.parametrize("together", [True, False])
def test_ten_conversations_of_ten_turns_stay_and_spread_in_app(together: bool) -> None:
    """Neither replica runs by over a fourth of its 32 places more than the other: none has to move."""
    with chosen() as turns, replicas(2, "enable_prefix_caching=true", rate=200) as server:

        def turn(messages: list[dict[str, str]]) -> None:
            body = {"model": "model", "messages": messages, "max_tokens": 5}
            answer = server.post(body, "/v1/chat/completions").json()["choices"][0]["message"]
            messages += [answer, {"role": "user", "content": "and then?"}]

        def ten_turns(messages: list[dict[str, str]]) -> None:
            for _ in range(10):
                turn(messages)

        talks = [[{"role": "user", "content": f"conversation {number}"}] for number in range(10)]
        if together:
            with ThreadPoolExecutor(10) as pool:
                list(pool.map(ten_turns, talks))
        else:
            for talk in [*talks, *talks[::-1]] * 5:  # in turn they would alternate where nothing keeps them
                turn(talk)
        went = Counter(replica for places in turns.values() for replica in places)
        assert figures(server, "requests_total") == [went[0], went[1]]
    assert {number: len(places) for number, places in turns.items()} == dict.fromkeys(range(10), 10)
    stayed = sum(now == before for places in turns.values() for before, now in pairwise(places))
    assert stayed >= 0.9 * 90
    homes = Counter(Counter(places).most_common(1)[0][0] for places in turns.values())
    assert min(homes[0], homes[1]) >= 3, "both have conversations"


def test_adapters_are_on_all_and_come_back_with_a_replica(tmp_path: Path) -> None:
    files = {name: write_adapter(tmp_path / name) for name in ("a", "b")}

    def answers() -> set[str]:
        with ThreadPoolExecutor(4) as pool:
            found = pool.map(lambda at: server.post({**ask(f"0 1 2 3 4 5 6 7 8 {at}", 1), "adapters": "a"}), range(4))
            return {one.json()["generated_text"] for one in found}

    with replicas(2) as server:
        assert http.post(server.url + "/adapters", params={"name": "a", "src": str(files["a"])}).status_code == 200
        assert answers() == {" 1"}, "the adapter's id says how many words are left out"
        assert http.post(server.url + "/adapters/a/update", params={"src": str(files["b"])}).status_code == 200
        assert answers() == {" 2"}
        os.kill(engines()[1], signal.SIGKILL)
        wait_for(lambda: ping(server)[1]["ready"] == 1, 5, "nobody has noticed")
        assert answers() == {" 2"}
        wait_for(lambda: ping(server)[1]["ready"] == 2, 10, "it does not come back")
        assert answers() == {" 2"}
        assert http.delete(server.url + "/adapters/a").status_code == 200
        missing = http.post(server.url + "/adapters", params={"name": "c", "src": str(tmp_path / "c")})
        assert missing.status_code == 424
        assert ping(server) == (200, {"ready": 2, "total": 2})


def test_a_session_stays_on_its_replica(tmp_path: Path) -> None:
    with replicas(2, "enable_stateful_sessions=true", f"sessions_path={tmp_path}", rate=200) as server:
        for _ in range(2):  # the first request of each goes to another replica
            header = {"x-amzn-sagemaker-session-id": opened(server)}
            before = figures(server, "requests_total")
            for number in range(4):
                assert server.post(ask(f"{number}"), headers=header).status_code == 200
            found = zip(before, figures(server, "requests_total"), strict=True)
            assert sorted(now - earlier for earlier, now in found) == [0, 4]
        assert figures(server, "requests_total") == [4, 4]


def test_each_replica_has_its_share_of_the_cores() -> None:
    with replicas(2) as server:
        cores = [os.sched_getaffinity(pid) for pid in engines()]
        assert set().union(*cores) == os.sched_getaffinity(0)
        assert "2 replicas of echo" in server.log
        workers = http.get(server.url + "/models/model").json()[0]["models"][0]["workerGroups"][0]
        assert [workers["minWorkers"], len(workers["workers"])] == [2, 2]
        text = http.get(server.url + "/metrics").text
        assert 'vllm:num_requests_running{engine="1",model_name="model"} 0.0' in text


def test_one_engine_is_as_ever() -> None:
    with replicas("auto") as server:
        assert json.loads(http.get(server.url + "/ping").content) == {"status": "Healthy", "state": "ready"}
        assert "lmi_replica" not in http.get(server.url + "/metrics").text


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["replicas=0"], "must be a whole number of at least 1"),
        (["replicas=many"], "or auto"),
        (["replicas=2", "engine_isolation=thread"], "option.replicas=2: replicas run as processes, but"),
    ],
)
def test_a_wrong_number_is_refused_by_name(options: list[str], wanted: str) -> None:
    log = refused_start(*ECHO, *(word for one in options for word in ("-o", f"option.{one}")))
    assert wanted in log
