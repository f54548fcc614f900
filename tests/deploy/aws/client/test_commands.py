"""The commands that talk to an endpoint, from their arguments to what they print."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.cli import invoke
from deploy.cli.main import main
from deploy.client import Predictor
from handler.core.terminal import escaping
from tests.deploy.aws.client.double import Answer, Double, fails, golden, model_answers, says, streams
from tests.servers import PATIENCE

LMI = golden("lmi/stream")
CHAT = golden("chat/stream")
SHOWN = 'Deep "Learning" 😀\n'


def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))


@pytest.mark.parametrize(
    ("arguments", "body"),
    [
        (["What is"], {"inputs": "What is"}),
        (["What is", "-p", "max_new_tokens=8", "-p", "stop=x"],
         {"inputs": "What is", "parameters": {"max_new_tokens": 8, "stop": "x"}}),
        (['{"inputs": "x", "parameters": {"seed": 1}}', "-p", "seed=2"], {"inputs": "x", "parameters": {"seed": 2}}),
        (['{"messages": []}', "-p", "max_tokens=8"], {"messages": [], "max_tokens": 8}),
        (["[1]"], {"inputs": "[1]"}),
        (["--json", "[1]"], [1]),
        ([], {"inputs": "typed é"}),
        (["-"], {"inputs": "typed é"}),
    ],
)  # fmt: skip
def test_what_invoke_sends(
    aws: Double, monkeypatch: pytest.MonkeyPatch, arguments: list[str], body: object, capsys: pytest.CaptureFixture[str]
) -> None:
    aws.answers = [says({"generated_text": "é"})]
    typed(monkeypatch, "typed é\n")
    assert main(["invoke", "e", *arguments]) == 0
    assert aws.requests[0].json == body
    assert json.loads(capsys.readouterr().out) == {"generated_text": "é"}


def test_a_body_from_a_file_with_headers(aws: Double, tmp_path: Path) -> None:
    aws.answers = [says({})]
    (tmp_path / "body.json").write_text('{"inputs": "ü"}')
    assert main(["invoke", "e", f"@{tmp_path}/body.json", "--custom-attributes", "a=b", "--component", "c"]) == 0
    assert aws.requests[0].json == {"inputs": "ü"}
    assert aws.requests[0].headers["x-amzn-sagemaker-custom-attributes"] == "a=b"
    assert aws.requests[0].headers["x-amzn-sagemaker-inference-component"] == "c"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["x", "--json", "{}"], "pass either BODY or --json, not both"),
        (["--json", "{"], "--json: "),
        (["x", "-p", "seed"], "-p seed: must be KEY=VALUE"),
        (["--json", "[1]", "-p", "seed=1"], "-p sets a parameter, but the body is not a JSON object"),
        (["@/nowhere/at/all"], "/nowhere/at/all: No such file or directory\n"),
    ],
)
def test_arguments_that_do_not_go_together(
    aws: Double, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["invoke", "e", *arguments]) == 1
    assert capsys.readouterr().err.startswith(f"lmi deploy: {said}")
    assert aws.requests == []


def test_an_address_without_its_scheme_is_refused(aws: Double, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["invoke", "e", "x", "--endpoint-url", "127.0.0.1:8081"])
    assert refused.value.code == 2
    assert "--endpoint-url: must be a URL" in capsys.readouterr().err


def test_an_endpoint_that_is_not_there_has_its_status(aws: Double, capsys: pytest.CaptureFixture[str]) -> None:
    aws.answers = [fails(400, "ValidationError", "Endpoint e of account 1 not found.")]
    assert main(["invoke", "e", "x"]) == 4
    assert capsys.readouterr().err == (
        "lmi deploy: Endpoint e of account 1 not found.\nCheck the name and the region.\n"
    )


def test_waiting_for_a_copy_is_said(aws: Double, capsys: pytest.CaptureFixture[str]) -> None:
    aws.answers = [
        fails(400, "ValidationError", "Inference Component has no capacity to process this request."),
        says({}),
    ]
    assert main(["invoke", "e", "x", "--patience", "30"]) == 0
    assert "has no capacity to process this request.; retrying in" in capsys.readouterr().err


def test_an_asynchronous_answer(aws: Double, capsys: pytest.CaptureFixture[str]) -> None:
    accepted = says({"InferenceId": "i"}, OutputLocation="s3://b-1/1.out")
    aws.answers = [accepted, says({"generated_text": "ab"})]
    assert main(["invoke", "e", "x", "--async"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"generated_text": "ab"}
    assert "s3://b-1/1.out" in printed.err


@pytest.mark.parametrize("client", ["the command", "Predictor"])
def test_an_emulator_wants_neither_region_nor_credentials(
    aws: Double, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    aws.answers = [says({})]
    if client == "Predictor":
        assert Predictor("e", endpoint_url=aws.url).predict({"inputs": "x"}) == {}
    else:
        assert main(["invoke", "e", "x", "--endpoint-url", aws.url]) == 0
    assert "Credential=local/" in aws.requests[0].headers["authorization"]


def test_stream_prints_text(aws: Double, capsys: pytest.CaptureFixture[str]) -> None:
    aws.answers = [streams(LMI.body)]
    assert main(["stream", "e", "x"]) == 0
    assert capsys.readouterr().out == SHOWN + "\n"
    assert aws.requests[0].json == {"inputs": "x", "stream": True}


def test_stream_prints_bytes(aws: Double, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    aws.answers = [streams(LMI.body)]
    assert main(["stream", "e", "x", "--raw"]) == 0
    assert capfdbinary.readouterr().out == LMI.body


def test_a_stream_that_breaks_has_printed_what_came(aws: Double, capsys: pytest.CaptureFixture[str]) -> None:
    aws.answers = [streams(LMI.body[:60], then="internal")]
    assert main(["stream", "e", "x"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "Deep\n"
    assert printed.err.startswith("lmi deploy: InternalStreamFailure: boom\n")


def test_chat_out_of_a_pipe(aws: Double, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    typed(monkeypatch, "Hi\n\n/system Be brief.\nAnd?\n/reset\n/what\nAgain\n/quit\nnever\n")
    aws.answers = [streams(CHAT.body)]
    assert main(["chat", "e", "-p", "max_tokens=9", "--system", "Be kind."]) == 0
    kind, brief = ({"role": "system", "content": text} for text in ("Be kind.", "Be brief."))
    first, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": SHOWN}
    assert [request.json["messages"] for request in aws.requests] == [
        [kind, first],
        [brief, first, answer, {"role": "user", "content": "And?"}],
        [brief, {"role": "user", "content": "Again"}],
    ]
    assert all(request.json["max_tokens"] == 9 and request.json["stream"] is True for request in aws.requests)
    printed = capsys.readouterr()
    assert printed.out == 3 * (SHOWN + "\n")
    assert printed.err.startswith("/what: no such command.")


def test_a_pipe_ends_with_its_first_failure(
    aws: Double, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "Hi\nAnd?\n")
    aws.answers = [model_answers(400, "bad")]
    assert main(["chat", "e"]) == 1
    assert len(aws.requests) == 1
    assert "the model rejected the request (400): bad" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


CTRL_C = "\x03"


def at_a_terminal(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    rest = iter(lines)

    def read(prompt: str) -> str:
        assert prompt == "> "
        if (line := next(rest, None)) is None:
            raise EOFError
        if line == CTRL_C:
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys, "stdin", Terminal())


def test_ctrl_c_ends_the_answer_and_not_the_conversation(
    aws: Double, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What had come of the answer is part of the conversation."""

    def interrupted(handler: object) -> None:
        streams(CHAT.body[:180], then="stall")(handler)  # type: ignore[arg-type]

    printed = []

    def shown(*values: object, **how: object) -> None:
        printed.append((values, how))
        if values == ("Deep",) and len(aws.requests) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr("deploy.cli.invoke.print", shown, raising=False)
    at_a_terminal(monkeypatch, "Hi", "And?")
    aws.answers = [interrupted, streams(CHAT.body)]
    assert main(["chat", "e"]) == 0
    assert [turn["content"] for turn in aws.requests[1].json["messages"]] == ["Hi", "Deep", "And?"]
    assert ((" ...",), {"end": ""}) in printed


def test_ctrl_c_at_the_prompt_drops_the_line_and_not_the_conversation(
    aws: Double, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_a_terminal(monkeypatch, "Hi", CTRL_C, "And?")
    aws.answers = [streams(CHAT.body)]
    assert main(["chat", "e"]) == 0
    assert [turn["content"] for turn in aws.requests[1].json["messages"]] == ["Hi", SHOWN, "And?"]


def test_at_a_terminal_a_failure_can_be_asked_again(
    aws: Double, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_a_terminal(monkeypatch, "Hi", "Hi")
    failing: Answer = streams(CHAT.body[:300], then="internal")
    aws.answers = [failing, streams(CHAT.body)]
    assert main(["chat", "e"]) == 0
    assert [turn["content"] for turn in aws.requests[1].json["messages"]] == ["Hi"]
    printed = capsys.readouterr()
    assert "InternalStreamFailure: boom" in printed.err
    assert "Ctrl-C stops a response, or clears the line." in printed.err
    assert printed.out.endswith(SHOWN + "\n\n")


@pytest.mark.parametrize("route", ["invocations", "openai"])
def test_bench_in_commands(aws: Double, capsys: pytest.CaptureFixture[str], route: str, tmp_path: Path) -> None:
    if route == "invocations":
        wire = golden("lmi/stream_details")
        aws.answers = [streams(wire.body)]
    else:
        wire = golden("openai/chat/stream_usage")
        aws.answers = [lambda handler: handler.answer(200, wire.body, {"Content-Type": wire.content_type})]
    arguments = ["--clients", "1,2", "--requests", "4", "--route", route, "--max-tokens", "5", "--words", "9"]
    saved = tmp_path / "results" / "e.json"
    assert main(["bench", "e", *arguments, "--output", str(saved)]) == 0
    *printed, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert [level["clients"] for level in found["levels"]] == [1, 2]
    assert [level["requests"] for level in found["levels"]] == [4, 4]
    assert all(level["errors"] == {} and level["tokens_per_second"] > 0 for level in found["levels"])
    assert found["knee"] >= 1
    assert json.loads(saved.read_text()) == found
    assert f"scaling.concurrency: {found['scaling_concurrency']:g}" in "\n".join(printed)
    assert len(aws.requests) == 1 + 8
    assert len({request.body for request in aws.requests}) == 9
    body = aws.requests[0].json
    if route == "invocations":
        assert body["parameters"] == {"max_new_tokens": 5, "details": True}
        assert len(body["inputs"].split()) == 9
    else:
        assert aws.requests[0].path == "/endpoints/e/openai/v1/chat/completions"
        assert aws.requests[0].headers["authorization"].startswith("Bearer sagemaker-api-key-")
        assert body["max_tokens"] == 5


def test_bench_counts_failures_by_their_kind(aws: Double, capsys: pytest.CaptureFixture[str]) -> None:
    good = streams(golden("lmi/stream_details").body)
    throttled = fails(400, "ThrottlingException", "Rate exceeded")
    aws.answers = [good, good, throttled, model_answers(503, "full"), good]
    assert main(["bench", "e", "--rate", "200", "--requests", "5", "-p", "seed=1"]) == 0
    level = json.loads(capsys.readouterr().out.splitlines()[-1])["levels"][0]
    assert level["rate"] == 200
    assert level["errors"] == {"Throttled": 1, "ModelBusy 503": 1}
    assert aws.requests[0].json["parameters"]["seed"] == 1


def test_bench_of_what_does_not_answer(aws: Double, capsys: pytest.CaptureFixture[str]) -> None:
    aws.answers = [model_answers(400, "bad")]
    assert main(["bench", "e"]) == 1
    assert "the warm-up request failed: ModelRefused 400" in capsys.readouterr().err
    assert len(aws.requests) == 1


# -- Ctrl-C in a real conversation, while nothing comes ----------------------------------------------------------------


INTERRUPT_CHAT = golden("chat/stream").body


def test_ctrl_c_ends_an_answer_that_does_not_come(aws: Double) -> None:
    first, _, _ = INTERRUPT_CHAT.partition(b"\n")
    aws.answers = [streams(first, then="stall"), streams(INTERRUPT_CHAT)]
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy", "chat", "e"],
        cwd=Path(__file__).parents[4],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUTF8": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"Hi\n")
    process.stdin.flush()
    assert process.stdout.read(4) == b"Deep"  # it comes before the answer ends
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(b"And?\n", timeout=PATIENCE)
    assert (process.returncode, error) == (0, b"")
    assert out.decode() == ' ...\nDeep "Learning" 😀\n\n'
    assert [turn["content"] for turn in aws.requests[1].json["messages"]] == ["Hi", "Deep", "And?"]


# -- what a hostile answer does to a terminal: nothing -----------------------------------------------------------------


HOSTILE = "a\x1b]0;title\x07\x9b2J\r\x7f\u202eb\n\tc"


@pytest.mark.parametrize(("terminal", "printed"), [
    (True, "a\\u001b]0;title\\u0007\\u009b2J\\u000d\\u007f\\u202eb\n\tc"), (False, HOSTILE),
])  # fmt: skip
def test_an_answer_is_escaped_on_a_terminal_and_elsewhere_as_it_came(
    terminal: bool, printed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="")
    monkeypatch.setattr(out, "isatty", lambda: terminal)
    monkeypatch.setattr("sys.stdout", out)
    with escaping():
        invoke._print(HOSTILE)
    assert out.buffer.getvalue().decode() == printed


def test_what_cannot_be_printed_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr("sys.stdout", out)
    invoke._print("é日\ud83d")
    assert out.buffer.getvalue() == b"\xe9??"


def test_half_a_character_in_an_answer(aws: Double, capsys: pytest.CaptureFixture[str]) -> None:
    aws.answers = [says({"generated_text": "a\ud83d"})]
    assert main(["invoke", "e", "x"]) == 0
    assert '"a?"' in capsys.readouterr().out
