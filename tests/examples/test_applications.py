"""The programs in examples/applications, as they are, against servers on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import wave
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx
import pytest

from handler.config.loader import read_config
from handler.core import loop
from handler.core.text import Prompt
from handler.core.values import PLAIN_TEMPLATE, TemplateOptions
from handler.engines.base import EngineConfig, EngineRequest
from handler.engines.echo import engine as echo
from handler.engines.echo.engine import EchoTokenizer
from handler.serving.start import running
from tests.app.server import AppServer, serve
from tests.environment import clean_environment
from tests.examples.programs import APPLICATIONS, EXAMPLES, ROOT, finished, load, run
from tests.examples.test_frameworks import FRAMEWORKS
from tests.servers import PATIENCE, http, options, wait_for
from tests.unit.engines.pooling_models import write_model

# -- scripted ----------------------------------------------------------------------------------------------------------
# The echo engine's server that answers chats from a script: a model that calls tools whenever a test wants it to.


Messages = Sequence[Mapping[str, Any]]


class Speaker(echo.Echo):
    """Repeats the prompt once."""

    def add(self, request: EngineRequest) -> None:
        once = request.sampling._replace(max_new_tokens=len(request.ids))
        super().add(request._replace(parameters=once))


class Script(EchoTokenizer):
    """Lays out a chat as its next answer; after the last one it stays there.

    Attributes:
        chats: the messages of each request, as a chat template gets them.
    """

    def __init__(self, answers: Sequence[str]) -> None:
        super().__init__()
        self.answers = answers
        self.chats: list[Messages] = []

    def encode_chat(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] = (),
        options: TemplateOptions = PLAIN_TEMPLATE,
    ) -> Prompt:
        self.chats.append(messages)
        return self.encode(self.answers[min(len(self.chats), len(self.answers)) - 1])


@contextlib.contextmanager
def speaking(*answers: str) -> Iterator[tuple[AppServer, Script]]:
    script = Script(answers)

    def load_tokenizer(config: EngineConfig) -> Script:
        return script

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(echo, "load", Speaker)
        patch.setattr(echo, "load_tokenizer", load_tokenizer)
        with serve("--engine", "echo") as server:
            yield server, script


RAG, AGENT, BATCH, LOAD_TEST, ROUTER, TRANSCRIBE, BACKGROUND = PROGRAMS = [
    APPLICATIONS / f"{name}.py" for name in ("rag", "agent", "batch", "load_test", "router", "transcribe", "background")
]
PAGES = [ROOT / "docs" / "agents.md", ROOT / "docs" / "embeddings.md"]
NOBODY = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def chat() -> Iterator[AppServer]:
    with serve("--engine", "echo") as server:
        yield server


@pytest.fixture(scope="module")
def embedding() -> Iterator[AppServer]:
    with serve("--engine", "echo", *options("option.task=text-embedding")) as server:
        yield server


@pytest.fixture(scope="module")
def ranking() -> Iterator[AppServer]:
    with serve("--engine", "echo", *options("option.task=rerank")) as server:
        yield server


@pytest.fixture(scope="module")
def slow() -> Iterator[AppServer]:
    """A token a second: what waits for it can be interrupted."""
    with serve("--engine", "echo", *options("option.echo_tokens_per_second=1")) as server:
        yield server


def test_every_program_is_tested_and_short() -> None:
    assert sorted(APPLICATIONS.glob("*.py")) == sorted([*PROGRAMS, *FRAMEWORKS])
    assert all(len(path.read_text().splitlines()) <= 40 for path in FRAMEWORKS)
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.rglob("*.py")}
    assert {name: length for name, length in lengths.items() if length > 120} == {}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_help_is_the_programs_own_description(program: Path) -> None:
    description = load(program).__doc__
    assert description is not None
    assert description.strip() in run(program, "--help")


# -- RAG ---------------------------------------------------------------------------------------------------------------


def sources(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("[")][-4:]


def listed(passages: list[Any]) -> list[str]:
    return [f"[{number}] {file}: {text.splitlines()[0]}" for number, (file, text) in enumerate(passages[:4], 1)]


def test_rag_finds_the_passage_and_the_chat_gets_it(chat: AppServer, embedding: AppServer) -> None:
    """Echo's vectors are equal where the texts are, so that a passage is its own nearest one."""
    passage = load(RAG).cut(PAGES)[-1]
    output = run(RAG, passage.text, *PAGES, EMBEDDINGS_URL=embedding.url, CHAT_URL=chat.url)
    assert sources(output)[0] == listed([passage])[0]
    assert " ".join(passage.text.split()[:40]) in output  # echo's answer


def test_rag_cuts_what_is_too_long_for_the_model(chat: AppServer, tmp_path: Path) -> None:
    """The model has random weights, and takes 40 tokens."""
    passages = [(tmp_path / name, text) for name, text in (("a", "w4 w5"), ("b", "w6 w7 " * 40), ("c", "w8 w9"))]
    for path, text in passages:
        path.write_text(text)
    with serve(str(write_model(tmp_path / "model", "bert"))) as embedding:
        servers = ("--embeddings", embedding.url, "--chat", chat.url)
        output = run(RAG, "w6 w7 " * 30, *(path for path, _ in passages), *servers)
    assert sources(output)[0] == listed([passages[1]])[0].strip()


def test_rag_takes_the_rerankers_order(chat: AppServer, embedding: AppServer, ranking: AppServer) -> None:
    passages = load(RAG).cut(PAGES)
    assert 4 < len(passages) <= 20, "all are candidates"
    body = {"query": "Which routes?", "documents": [passage.text for passage in passages]}
    results = http.post(f"{ranking.url}/v2/rerank", json=body).json()["results"]
    servers = ("--embeddings", embedding.url, "--chat", chat.url, "--rerank", ranking.url)
    output = run(RAG, "Which routes?", *PAGES, *servers)
    assert sources(output) == listed([passages[result["index"]] for result in results])


def test_rag_shows_a_servers_own_words(chat: AppServer, embedding: AppServer) -> None:
    refused = finished(RAG, "Why?", *PAGES, EMBEDDINGS_URL=chat.url)
    assert refused.returncode == 1
    assert f"{chat.url}/v1/embeddings: 404" in refused.stderr
    assert "option.task=text-embedding" in refused.stderr
    gone = finished(RAG, "Why?", *PAGES, EMBEDDINGS_URL=embedding.url, CHAT_URL=NOBODY)
    assert (gone.returncode, gone.stderr.partition(": ")[0]) == (1, f"{NOBODY}/v1/chat/completions")


def test_rag_shows_what_is_no_answer(tmp_path: Path) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text="<html>"))
    with httpx.Client(transport=transport) as client, pytest.raises(SystemExit) as told:
        load(RAG).embed(client, NOBODY, ["text"])
    assert told.value.code == f"{NOBODY}/v1/embeddings: 200 <html>"
    missing = finished(RAG, "Why?", tmp_path / "missing", EMBEDDINGS_URL=NOBODY)
    assert (missing.returncode, "No such file" in missing.stderr) == (1, True)


# -- agent -------------------------------------------------------------------------------------------------------------


def calls(*calls: tuple[str, dict[str, str]]) -> str:
    return f"<tool_call>{json.dumps([{'name': name, 'arguments': arguments} for name, arguments in calls])}</tool_call>"


def test_an_agent_reads_and_calculates(tmp_path: Path) -> None:
    (tmp_path / "numbers.txt").write_text("six and seven")
    script = (calls(("read_file", {"path": "numbers.txt"})), calls(("calculate", {"expression": "6 * 7"})), "It is 42.")
    with speaking(*script) as (server, told):
        output = run(AGENT, "What is their product?", "--directory", tmp_path, LMI_URL=server.url)
    assert output.strip() == "It is 42."
    assert [chat[-1]["content"].split("\n")[1:-1] for chat in told.chats[1:]] == [["six and seven"], ["42"]]
    assert "calculate" in told.chats[0][0]["content"], "the model is told of its tools"


def test_an_agents_errors_go_back_to_the_model(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "secret").write_text("secret")
    wrong = calls(
        ("read_file", {"path": "../secret"}),
        ("read_file", {"path": "missing"}),
        ("calculate", {"expression": "1 / 0"}),
        ("calculate", {"formula": "1 + 1"}),
        ("shell", {"command": "true"}),
    )
    with speaking(wrong, "I cannot.") as (server, told):
        assert run(AGENT, "Go on.", "--directory", tmp_path / "own", LMI_URL=server.url).strip() == "I cannot."
    results = [message["content"] for message in told.chats[1][-5:]]
    words = ["is outside", "FileNotFoundError", "ZeroDivisionError", "TypeError", "there is no tool shell"]
    assert [word for word, result in zip(words, results, strict=True) if word not in result] == []


def test_an_agent_stops_after_its_rounds() -> None:
    with speaking(calls(("calculate", {"expression": "1"}))) as (server, told):
        done = finished(AGENT, "Go on.", "--rounds", 2, LMI_URL=server.url)
    assert (done.returncode, len(told.chats)) == (1, 2)
    assert done.stderr.endswith("no answer after 2 rounds\n")


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        (" 2 * (3 + 4)", "14"),
        ("-7 / 2 - 1", "-4.5"),
        ("2 ** 9", "ValueError"),
        ("__import__('os').getcwd()", "ValueError"),
        ("'a' * 9", "ValueError"),
        ("1 +", "SyntaxError"),
        ("1" * 201, "ValueError"),
    ],
)
def test_what_an_agent_calculates(expression: str, result: str) -> None:
    found = load(AGENT).call(Path(), "calculate", json.dumps({"expression": expression}))
    assert found.partition(":")[0] == result


@pytest.mark.parametrize("body", ["<html>", "[]", '{"choices": []}'])
def test_an_agent_shows_what_is_no_answer(body: str) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=body))
    with httpx.Client(base_url=NOBODY, transport=transport) as client, pytest.raises(SystemExit) as told:
        load(AGENT).run(client, "Go on.", Path(), 1, 1)
    assert told.value.code == f"{NOBODY}/v1/chat/completions: 200 {body}"


# -- router.py ---------------------------------------------------------------------------------------------------------


def decided_on(team: str, confidence: float = 0.9, *, urgency: float = 1.0, complaint: float = 0.1) -> dict[str, Any]:
    return {
        "team": {"choice": team, "confidence": confidence},
        "urgency": {"score": urgency},
        "complaint": {"noul": complaint},
    }


@pytest.mark.parametrize(
    ("decided", "goes_to"),
    [
        (decided_on("billing"), "billing"),
        (decided_on("billing", 0.2), "a person"),
        (decided_on("sales", urgency=2.6), "sales, first in the queue"),
        (decided_on("sales", 0.2, complaint=0.95), "a person, first in the queue"),
    ],
)
def test_where_a_message_goes(decided: dict[str, Any], goes_to: str) -> None:
    assert load(ROUTER).route(decided) == goes_to


def test_each_message_is_routed(chat: AppServer) -> None:
    command = [sys.executable, str(ROUTER)]
    environment = {**clean_environment(), "LMI_URL": chat.url}
    text = "My invoice is wrong.\n\nThe setup fails.\n"
    done = subprocess.run(command, env=environment, input=text, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.rpartition(": ")[2] for line in lines] == ["My invoice is wrong.", "The setup fails."]
    assert all(line.startswith(("billing", "technical", "sales", "a person")) for line in lines)


def test_a_router_shows_a_servers_own_words(embedding: AppServer) -> None:
    environment = {**clean_environment(), "LMI_URL": embedding.url}
    command = [sys.executable, str(ROUTER)]
    done = subprocess.run(command, env=environment, input="a\n", capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert "/v1/systemone: 404" in done.stderr
    assert "Traceback" not in done.stderr


# -- batch -------------------------------------------------------------------------------------------------------------


def request(number: int, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": f"number {number}"}], "max_tokens": 5, **more}
    return {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}


def written(path: Path, *requests: Any) -> Path:
    path.write_text("".join(f"{json.dumps(request)}\n" for request in requests))
    return path


def answers(path: Path) -> dict[str, str]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(line["error"] is None for line in lines)
    found = {line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in lines}
    assert len(found) == len(lines), "none is there twice"
    return found


def test_a_batch_is_answered_by_a_server_that_is_busy(tmp_path: Path) -> None:
    """The server takes two requests at a time, and refuses others."""
    requests = written(tmp_path / "requests", *map(request, range(12)))
    narrow = options("option.max_rolling_batch_size=1", "job_queue_size=1", "option.echo_tokens_per_second=200")
    with serve("--engine", "echo", *narrow) as server:
        done = finished(BATCH, requests, tmp_path / "answers", "--concurrency", 6, LMI_URL=server.url)
        assert server.metric('lmi_requests_total{outcome="overloaded"}') > 0
    assert (done.returncode, done.stderr) == (0, "12 answered, 0 failed, 0 before\n")
    found = answers(tmp_path / "answers")
    assert found == {str(number): f" user: number {number} assistant: user:" for number in range(12)}


def test_a_batch_goes_on_from_where_it_stopped(chat: AppServer, tmp_path: Path) -> None:
    requests, output = written(tmp_path / "requests", *map(request, range(4))), tmp_path / "answers"
    assert finished(BATCH, requests, output, LMI_URL=chat.url).stderr == "4 answered, 0 failed, 0 before\n"
    whole = output.read_bytes()
    output.write_bytes(whole[:-20])  # it was killed amid the last line
    assert finished(BATCH, requests, output, LMI_URL=chat.url).stderr == "1 answered, 0 failed, 3 before\n"
    assert answers(output).keys() == {"0", "1", "2", "3"}


def test_a_batch_reports_failures_and_sends_them_again(chat: AppServer, tmp_path: Path) -> None:
    requests, output = written(tmp_path / "requests", request(0), request(1, temperature=9)), tmp_path / "answers"
    done = finished(BATCH, requests, output, LMI_URL=chat.url)
    assert done.returncode == 1
    assert done.stderr.startswith("1: HTTPStatusError(")
    assert "temperature=9" in done.stderr
    written(requests, request(0), request(1))
    assert finished(BATCH, requests, output, LMI_URL=chat.url).stderr == "1 answered, 0 failed, 1 before\n"
    assert answers(output).keys() == {"0", "1"}


ODD: list[dict[str, Any]] = [{"custom_id": [1]}, {"url": 5}, {"url": "https://elsewhere/v1"}]


@pytest.mark.parametrize(
    "line", [b"[]", b"{}", b"no JSON", b"\xff", *(json.dumps(request(1) | odd).encode() for odd in ODD)]
)
def test_a_batch_with_a_wrong_line_is_not_begun(line: bytes, tmp_path: Path) -> None:
    requests = written(tmp_path / "requests", request(0))
    requests.write_bytes(requests.read_bytes() + line)
    done = finished(BATCH, requests, tmp_path / "answers", LMI_URL=NOBODY)
    assert (done.returncode, done.stderr.partition(": ")[0]) == (1, f"{requests}, line 2")


@pytest.mark.parametrize("content", ["notes", "notes\nof mine", json.dumps(request(0)) + "\n" + json.dumps(request(1))])
def test_a_batch_leaves_a_file_that_is_no_batchs(content: str, chat: AppServer, tmp_path: Path) -> None:
    requests, output = written(tmp_path / "requests", request(0)), tmp_path / "notes"
    output.write_text(content)
    done = finished(BATCH, requests, output, LMI_URL=chat.url)
    assert (done.returncode, done.stderr.startswith(str(output))) == (1, True)
    assert output.read_text() == content


def test_a_batch_names_what_is_missing(tmp_path: Path) -> None:
    done = finished(BATCH, tmp_path / "requests", tmp_path / "answers", LMI_URL=NOBODY)
    assert (done.returncode, "No such file" in done.stderr) == (1, True)


def test_a_batch_outlives_what_cannot_be_sent_or_read(chat: AppServer, tmp_path: Path) -> None:
    """The first asks for a stream, the second has half of a character, the third an address with a zero byte."""
    odd = [request(1, stream=True), request(2, stop="\ud800"), request(3) | {"url": "/\0"}]
    requests = written(tmp_path / "requests", *odd, request(4))
    done = finished(BATCH, requests, tmp_path / "answers", "--concurrency", 1, LMI_URL=chat.url)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "1 answered, 3 failed, 0 before")
    words = ["1: JSONDecodeError", "2: UnicodeEncodeError", "3: InvalidURL"]
    assert [line.partition("(")[0] for line in done.stderr.splitlines()[:3]] == words


def test_a_batch_shows_its_progress_in_a_terminal(chat: AppServer, tmp_path: Path) -> None:
    requests = written(tmp_path / "requests", *map(request, range(3)))
    ours, theirs = os.openpty()
    command = [sys.executable, str(BATCH), str(requests), str(tmp_path / "answers")]
    subprocess.run(command, env={**clean_environment(), "LMI_URL": chat.url}, stderr=theirs, timeout=PATIENCE)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    os.close(theirs)
    assert shown == "\r1/3 \r2/3 \r3/3 3 answered, 0 failed, 0 before\r\n"


def test_a_batch_waits_as_long_as_the_server_says(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, pauses = load(BATCH), []
    replies = iter([(429, {"retry-after": "7"}), (503, {}), (502, {"retry-after": "soon"}), (200, {})])

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    def answer(request: httpx.Request) -> httpx.Response:
        status, headers = next(replies)
        return httpx.Response(status, headers=headers, json={"status": status})

    async def send() -> Any:
        async with httpx.AsyncClient(base_url=NOBODY, transport=httpx.MockTransport(answer)) as client:
            return await batch.send(client, "/v1/chat/completions", {})

    monkeypatch.setattr(batch.asyncio, "sleep", sleep)
    assert asyncio.run(send()) == {"status": 200}
    assert pauses[0] == 7
    assert all(0 <= pause <= most for pause, most in zip(pauses[1:], (2, 4), strict=True))


# -- background responses ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def storing() -> Iterator[AppServer]:
    rate = "option.echo_tokens_per_second=20"
    with serve("--engine", "echo", *options("option.responses_store=memory", rate)) as server:
        yield server


class Cutting(httpx.HTTPTransport):
    """Breaks the streams of events after a few pieces; `cuts` says how often."""

    def __init__(self, cuts: int) -> None:
        super().__init__()
        self.cuts = cuts

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        found = super().handle_request(request)
        if self.cuts and found.headers["content-type"] == "text/event-stream":
            self.cuts -= 1
            found.stream = _Cut(found.stream)
        return found


class _Cut(httpx.SyncByteStream):
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        yield from itertools.islice(self._stream, 2)
        raise httpx.ReadError("cut")

    def close(self) -> None:
        self._stream.close()


def ids(printed: str) -> tuple[str, str]:
    """The conversation and the response that the program names."""
    (conversation,), (response,) = (
        re.findall(rf"^{kind} (\S+)$", printed, re.M) for kind in ("conversation", "response")
    )
    return conversation, response


def test_a_conversation_is_continued_and_read_again_in_the_background(storing: AppServer) -> None:
    first = finished(BACKGROUND, "one two", "--max-tokens", 3, LMI_URL=storing.url)
    assert (first.returncode, first.stdout) == (0, " user: one two\n")
    conversation, id = ids(first.stderr)
    assert run(BACKGROUND, "--read", id, LMI_URL=storing.url) == first.stdout
    more = finished(BACKGROUND, "three", "--max-tokens", 8, "--conversation", conversation, LMI_URL=storing.url)
    assert ids(more.stderr)[0] == conversation
    assert more.stdout == " user: one two assistant: user: one two user:\n", "echo says all that it has read"


def test_a_broken_connection_loses_nothing_of_a_background_response(
    storing: AppServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    background = load(BACKGROUND)
    pauses: list[float] = []
    monkeypatch.setattr(background, "time", SimpleNamespace(sleep=pauses.append))
    with httpx.Client(base_url=storing.url, transport=Cutting(3), timeout=PATIENCE) as client:
        found = background.show(client, background.question(client, "one two", None, 12))
    printed = capsys.readouterr()
    assert printed.out == found["output"][0]["content"][0]["text"]
    assert printed.err.count("cut") == 3
    assert pauses == [1, 1, 1], "each connection had something new"


def test_ctrl_c_leaves_a_background_response_to_the_server(storing: AppServer) -> None:
    process = subprocess.Popen(
        [sys.executable, str(BACKGROUND), "one"], env={**clean_environment(), "LMI_URL": storing.url},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.read(5) == " user"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    id = ids(errors)[1]
    assert storing.metric("lmi_active_sequences") == 1
    cancelled = finished(BACKGROUND, "--cancel", id, LMI_URL=storing.url)
    assert (cancelled.returncode, cancelled.stderr) == (0, "cancelled\n")
    wait_for(lambda: storing.metric("lmi_active_sequences") == 0, PATIENCE, "the server goes on")
    again = finished(BACKGROUND, "--read", id, LMI_URL=storing.url)
    assert (again.returncode, again.stderr) == (1, "cancelled\n")
    assert again.stdout.startswith(" user: one")


def test_background_shows_a_servers_own_words(storing: AppServer, chat: AppServer) -> None:
    for arguments, url, status, words in (
        (["one"], chat.url, 404, "option.responses_store"),
        (["--read", "resp_1"], storing.url, 404, "resp_1"),
        (["--cancel", "resp_1"], storing.url, 404, "resp_1"),
        (["one", "--conversation", "conv_1"], storing.url, 404, "conv_1"),
    ):
        refused = finished(BACKGROUND, *arguments, LMI_URL=url)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert f" {status} " in refused.stderr
        assert words in refused.stderr
    assert finished(BACKGROUND, "--read", "resp_1", LMI_URL=NOBODY).stderr.startswith(f"{NOBODY}/v1/responses/resp_1")


# -- load test ---------------------------------------------------------------------------------------------------------

LOAD = ("--rates", "20,40", "--seconds", 0.5, "--tokens", 4)


def test_a_load_test_finds_the_rate_that_is_held(chat: AppServer) -> None:
    *rates, last = run(LOAD_TEST, chat.url, *LOAD, "--ttft", 60_000, "--itl", 60_000, "--need", 40).splitlines()
    assert [rate.partition(":")[0] for rate in rates] == ["20/s", "40/s"]
    assert last == "held: 40 requests/s"


def test_a_load_test_fails_where_less_is_held(chat: AppServer) -> None:
    done = finished(LOAD_TEST, chat.url, *LOAD, "--ttft", 0.001, "--need", 20)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "held: 0 requests/s")
    gone = finished(LOAD_TEST, NOBODY, *LOAD)
    assert (gone.returncode, gone.stdout) == (1, "")
    assert f"cannot connect to {NOBODY}" in gone.stderr
    assert "--rates: invalid numbers value: '1,x'" in finished(LOAD_TEST, NOBODY, "--rates", "1,x").stderr


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", [RAG, AGENT, BATCH, LOAD_TEST], ids=lambda path: path.stem)
def test_ctrl_c_ends_a_program(program: Path, slow: AppServer, embedding: AppServer, tmp_path: Path) -> None:
    arguments: dict[Path, list[Any]] = {
        RAG: ["Why?", *PAGES],
        AGENT: ["Why?"],
        BATCH: [written(tmp_path / "requests", request(0, max_tokens=100)), tmp_path / "answers"],
        LOAD_TEST: [slow.url, "--rates", 50],
    }
    variables = {"LMI_URL": slow.url, "CHAT_URL": slow.url, "EMBEDDINGS_URL": embedding.url}
    process = subprocess.Popen(
        [sys.executable, str(program), *map(str, arguments[program])],
        env={**clean_environment(), **variables},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        wait_for(lambda: slow.metric("lmi_active_sequences") > 0, PATIENCE, "it sends nothing")
        os.killpg(process.pid, signal.SIGINT)  # a terminal's reaches all of them
        _, errors = process.communicate(timeout=PATIENCE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, errors) == (130, "")
    wait_for(lambda: slow.metric("lmi_active_sequences") == 0, PATIENCE, "the server goes on")


# -- a host of its own in thirty lines: generating text in the caller's process ----------------------------------------


OFFLINE = EXAMPLES / "offline.py"


def test_each_line_is_answered() -> None:
    command = [sys.executable, str(OFFLINE), "option.llm_engine=echo", "option.max_model_len=64"]
    done = subprocess.run(
        command, input="a b\n\nc\n", env=clean_environment(), capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, refusal, last = done.stdout.splitlines()
    assert first.startswith(" a b a b")
    assert refusal == "'inputs' must be a non-empty string"
    assert last.startswith(" c c c")


def test_prompts_are_answered_in_their_order_and_none_stays_open() -> None:
    async def story() -> list[str]:
        config = read_config(overrides=["option.llm_engine=echo"], environ={}).checked()
        async with running(config) as model:
            answers: list[str] = await load(OFFLINE).generate(model, ["a b", "c"], max_new_tokens=3)
            assert model.num_requests == 0
        assert model.availability.state == "stopping"
        return answers

    with mock.patch.object(loop, "keep_collecting"):
        assert asyncio.run(story()) == [" a b a", " c c c"]


def test_it_is_short() -> None:
    assert len(OFFLINE.read_text().splitlines()) <= 30


# -- transcribe.py ----------------------------------------------------------------------------------------------------


def write_wav(path: Path, rate: int, size: int = 2) -> bytes:
    """Write 1.2 seconds of one channel, and return the file's content."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(size)
        file.setframerate(rate)
        file.writeframes(bytes(range(256)) * (rate * 12 * size // 2560))
    return path.read_bytes()


@pytest.mark.parametrize("rate", [16000, 24000])
def test_a_file_is_transcribed_as_over_http(tmp_path: Path, rate: int) -> None:
    content = write_wav(tmp_path / "speech.wav", rate)
    with serve("--engine", "echo", *options("option.task=automatic-speech-recognition")) as server:
        form = {"file": ("speech.wav", content)}
        expected = http.post(f"{server.url}/v1/audio/transcriptions", files=form, data={"model": "model"}).json()
        text = run(TRANSCRIBE, tmp_path / "speech.wav", LMI_URL=server.url)
    assert text == expected["text"] + "\n"
    assert text.strip()


def test_transcribe_refuses_other_files_and_models(tmp_path: Path) -> None:
    write_wav(tmp_path / "8bit.wav", 16000, 1)
    done = finished(TRANSCRIBE, tmp_path / "8bit.wav")
    assert (done.returncode, "one channel of 16-bit samples" in done.stderr) == (1, True)
    write_wav(tmp_path / "speech.wav", 16000)
    with serve("--engine", "echo") as server:
        done = finished(TRANSCRIBE, tmp_path / "speech.wav", LMI_URL=server.url)
    assert (done.returncode, "the server refused" in done.stderr) == (1, True)
