"""`lmi replay` between two servers whose answers can be spoilt."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from deploy.emulator.endpoint import Endpoint
from deploy.emulator.runtime import RuntimeEmulator
from handler.cli import main
from proof.tensors import HEADER, binary
from tests.app.server import serve
from tests.deploy.local.servers import Loop
from tests.doubles.downloads import serving
from tests.moving.replay.double import (
    CHAT,
    CHAT_STREAM,
    KINDS,
    NATIVE,
    NATIVE_STREAM,
    PLANTED,
    WORDS,
    Server,
    line,
    outcomes,
    put,
    set_in,
    write_requests,
)
from tests.process_tree import alive, descendants
from tests.servers import PATIENCE, free_port, http, wait_for
from tests.unit.replay.captured import line as line_of
from tests.unit.replay.captured import part, write


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    """Requests of all kinds, four of each."""
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(f"{line(number, KINDS[number % len(KINDS)])}\n" for number in range(4 * len(KINDS))))
    return path


def replay(requests: Path, to: str, against: str, *more: str) -> int:
    """Run the command; the journal is beside the requests."""
    output = requests.parent / "out"
    return main(["replay", str(requests), "--to", to, "--against", against, "--output", str(output), *more])


def classes(requests: Path) -> dict[int, str]:
    return {number: cls for number, cls, _ in outcomes(requests.parent / "out")}


def report(requests: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((requests.parent / "out" / "report.json").read_text())
    return found


def test_all_that_is_planted_is_found_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    planted = write_requests(path, 3 * len(PLANTED), len(PLANTED))
    with serving(Server()) as old, serving(Server({n: spoil for n, (_, spoil) in planted.items()})) as new:
        assert replay(path, new, old, "--timeout", "2", "--concurrency", "4") == 1
    assert len(planted) == len(PLANTED)
    found = classes(path)
    assert len(found) == 3 * len(PLANTED)
    assert {n: cls for n, cls in found.items() if cls != "equal"} == {n: cls.value for n, (cls, _) in planted.items()}


def test_a_server_does_not_differ_from_itself(requests: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Though ids, times and sampled texts do."""
    with serving(Server()) as url:
        assert replay(requests, url, url) == 0
    assert set(classes(requests).values()) == {"equal"}
    assert "value $.id" in capsys.readouterr().out


def test_what_may_differ_is_told(requests: Path) -> None:
    spoilt = {0: set_in(0, "generated_text", to=" other")}
    with serving(Server()) as old, serving(Server(spoilt)) as new:
        assert replay(requests, new, old, "--allow", "text=3") == 1
        assert replay(requests, new, old, "--allow", "text=4", "--restart") == 0


def test_a_difference_that_is_expected_is_counted_and_decides_nothing(requests: Path) -> None:
    spoilt = {n: set_in(0, "model", to="other") for n in (2, 10)}
    with serving(Server()) as old, serving(Server(spoilt)) as new:
        assert replay(requests, new, old) == 1
        assert report(requests)["findings"] == {"text": {"value $.model": 2}}
        assert replay(requests, new, old, "--restart", "--expect", "value $.model") == 0
    assert report(requests)["findings"] == {"equal": {"value $.model": 2}}
    assert set(classes(requests).values()) == {"equal"}


def test_nothing_of_a_body_is_printed_unless_it_is_to_be_shown(
    requests: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoilt = {0: set_in(0, "generated_text", to="secret words"), 5: set_in(0, to={"secret word": 1})}
    with serving(Server()) as old, serving(Server(spoilt)) as new:
        replay(requests, new, old)
        out = requests.parent / "out"
        written = [capsys.readouterr().out, *(path.read_text() for path in out.iterdir())]
        assert not [text for text in written for word in (*WORDS, "secret") if word in text]
        replay(requests, new, old, "--restart", "--show")
    for shown in (capsys.readouterr().out, (out / "report.html").read_text().replace("&quot;", '"')):
        assert "secret words" in shown
        assert 'request: {"n": 0, "inputs": "x"}' in shown


def test_a_busy_server_is_asked_again_and_counted_apart(requests: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Server(busy={1: 1, 9: 2})) as url:
        assert replay(requests, url, url, "--concurrency", "4") == 0
    assert set(classes(requests).values()) == {"equal"}
    assert sum(report(requests)["throttled"].values()) == 3  # type: ignore[attr-defined]
    for shown in (capsys.readouterr().out, (requests.parent / "out" / "report.html").read_text()):
        assert "was busy" in shown


def test_the_run_goes_on_when_a_server_dies(requests: Path) -> None:
    with serving(Server()) as old, serving(Server(dies_at=10)) as new:
        assert replay(requests, new, old) == 1
    found = classes(requests)
    assert len(found) == 4 * len(KINDS)
    assert {cls for number, cls in found.items() if number < 10} == {"equal"}
    assert {cls for number, cls in found.items() if number >= 10} == {"lost"}
    assert report(requests)["findings"] == {
        "lost": {"target: cannot connect": 4 * len(KINDS) - 11, "target: connection cut": 1}
    }


def test_a_killed_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "requests.jsonl"
    total = 400
    path.write_text("".join(f"{line(number, NATIVE)}\n" for number in range(total)) + "no request\n")
    new = Server({5: set_in(0, "generated_text", to=" other")}, delay=0.005)
    with serving(Server()) as old_url, serving(new) as url:
        command = ["--to", url, "--against", old_url, "--output", str(tmp_path / "out"), "--concurrency", "2"]
        running = subprocess.Popen([sys.executable, "-m", "handler", "replay", str(path), *command])
        while len(outcomes_so_far(tmp_path / "out")) < 20:
            time.sleep(0.01)
        running.send_signal(signal.SIGKILL)
        running.wait()
        journal = tmp_path / "out" / "journal.jsonl"
        whole = journal.read_bytes().rpartition(b"\n")
        journal.write_bytes(whole[0] + whole[1])
        done, asked = len(outcomes_so_far(tmp_path / "out")), len(new.asked)
        journal.write_bytes(journal.read_bytes() + b'[399,"equal",[')  # a line that the kill cut
        assert 20 <= done < total
        assert replay(path, url, old_url, "--concurrency", "2") == 1
        assert len(new.asked) - asked <= total - done + 1  # one more of a difference
    found = [number for number, *_ in outcomes(tmp_path / "out")]
    assert sorted(found) == list(range(total))
    assert classes(path)[5] == "text"
    assert report(path)["compared"] == total
    assert report(path)["unreadable"]["count"] == 1  # type: ignore[index]
    assert f"continuing after {done}" in capsys.readouterr().err


def test_a_killed_run_leaves_no_server_behind(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(f"{line(0, CHAT)}\n" * 10_000)
    command = ["--to", "serve:--engine echo", "--against", "serve:--engine echo", "--output", str(tmp_path / "out")]
    running = subprocess.Popen([sys.executable, "-m", "handler", "replay", str(path), *command])
    try:
        wait_for(lambda: outcomes_so_far(tmp_path / "out"), PATIENCE, "no request was compared")
        servers = descendants(running.pid)
    finally:
        running.kill()
        running.wait()
    assert len(servers) >= 2
    wait_for(lambda: not [one for one in servers if alive(one)], PATIENCE, "servers are left")


def outcomes_so_far(directory: Path) -> list[int]:
    with contextlib.suppress(FileNotFoundError, ValueError):
        return [number for number, *_ in outcomes(directory)]
    return []


def test_a_run_is_not_mixed_with_another(requests: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Server()) as url:
        replay(requests, url, url)
        capsys.readouterr()
        assert replay(requests, url, url) == 2
        assert "a complete run; give another --output, or --restart" in capsys.readouterr().err
        assert replay(requests, url, "recorded") == 2


@pytest.fixture
def answered(tmp_path: Path) -> Path:
    """Requests with their recorded answers; the fourth was a refusal, and the last is missing."""
    bodies = ['{"generated_text": "a"}', '{"generated_text": "b"}', '{"generated_text": 1}']
    path = tmp_path / "requests.jsonl"
    lines = []
    for number, body in enumerate([*bodies, '{"error": "busy"}', ""]):
        answer = {
            "status": 429 if "busy" in body else 200,
            "headers": {"content-type": "application/json"},
            "body": body,
        }
        lines.append(json.dumps({**json.loads(line(number, NATIVE)), **({"answer": answer} if body else {})}))
    path.write_text("\n".join(lines))
    return path


def test_answers_are_compared_with_the_recorded_ones(answered: Path) -> None:
    spoilt = {n: set_in(0, to={"generated_text": text}) for n, text in enumerate("axcde")}
    with serving(Server(spoilt)) as url:
        assert replay(answered, url, "recorded") == 1
    assert classes(answered) == {0: "equal", 1: "text", 2: "shape"}
    assert [one["reason"] for one in report(answered)["unreadable"]["first"]] == [  # type: ignore[index]
        "got 429 from a busy server when it was recorded",
        "has no recorded response",
    ]


def test_a_shadows_answer_is_taken_only_where_it_is_named(tmp_path: Path) -> None:
    """A server that is named is asked, but for an event whose request was not captured."""
    path, answer = tmp_path / "llm", part(b'{"generated_text": "a"}', "OUTPUT")
    other = part(b'{"generated_text": "b"}', "OUTPUT")
    body = part(json.dumps({**NATIVE, "n": 0}).encode(), "INPUT")
    write(path / "AllTraffic/2026/11/24/10/a.jsonl", [line_of("e0", body, answer), line_of("e1", None, answer)])
    write(path / "Shadow/2026/11/24/10/a.jsonl", [line_of("e0", None, other), line_of("e1", None, answer)])
    server = Server({0: set_in(0, to={"generated_text": "a"})})
    with serving(server) as url:
        assert replay(path, url, "recorded") == 0
        assert len(server.asked) == 1
        assert replay(path, "recorded", url, "--restart") == 1
        assert len(server.asked) == 3  # a difference is asked for once more
        assert replay(path, "recorded", "recorded", "--restart") == 1
        assert len(server.asked) == 3
    assert classes(path) == {0: "text", 1: "equal"}


def test_an_endpoint_of_sagemaker_answers_as_its_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its streams come by the event stream, its errors with the container's own body and status."""
    path = tmp_path / "requests.jsonl"
    kinds: list[dict[str, Any]] = [NATIVE, NATIVE_STREAM, {**NATIVE, "bad": 1}, NATIVE_STREAM, NATIVE]
    path.write_text("".join(f"{line(number, kind)}\n" for number, kind in enumerate(kinds)))
    loop = Loop()
    spoilt = {3: set_in(1, "token", "text", to=" other"), 4: put(status=500)}
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKID")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with contextlib.ExitStack() as stack:
        old, new = (stack.enter_context(serving(server)) for server in (Server(), Server(spoilt)))
        stack.callback(loop.close)
        runtime = stack.enter_context(loop.serving(RuntimeEmulator(Endpoint(new)).app()))
        monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", runtime)
        assert replay(path, "sagemaker:local", old, "--concurrency", "2") == 1
    assert classes(path) == {0: "equal", 1: "equal", 2: "equal", 3: "text", 4: "status"}


def test_targets_are_checked_first(requests: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        replay(requests, "localhost", "recorded")
    assert "must be http://HOST:PORT, sagemaker:NAME" in capsys.readouterr().err
    assert replay(requests, "http://127.0.0.1:9", "recorded") == 2
    assert "the recording has no responses; name a server with --against" in capsys.readouterr().err
    assert replay(requests, "http://127.0.0.1:9", "http://127.0.0.1:9", "--recorded-pace") == 2
    assert "--recorded-pace: the recording has no times" in capsys.readouterr().err
    assert replay(requests, "sagemaker:new", "http://127.0.0.1:9", "--key-to", "KEY") == 2
    assert "sagemaker:new does not accept a key; omit KEY" in capsys.readouterr().err


def test_requests_that_cannot_be_read_name_a_line_and_a_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"path": "/", "bdy": {}}\n' * 3)
    assert replay(path, "http://127.0.0.1:1", "http://127.0.0.1:1") != 0
    assert "none of its first requests can be read: requests.jsonl:1: 'bdy' is unknown" in capsys.readouterr().err


def test_the_recording_may_have_a_name_that_is_no_utf_8(answered: Path) -> None:
    odd = answered.with_name("o\udcff.jsonl")
    answered.rename(odd)
    with serving(Server()) as url:
        replay(odd, url, "recorded")
    assert report(odd)["run"]["requests"] == f"{answered.parent}/o\ufffd.jsonl"  # type: ignore[index]


def test_requests_go_at_the_recorded_pace(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    kinds = (CHAT, CHAT_STREAM)
    lines = [json.dumps({**json.loads(line(n, kinds[n % 2])), "at": 1000.0 + 2 * n}) for n in range(3)]
    path.write_text("\n".join(lines))
    began = time.monotonic()
    with serving(Server()) as url:
        assert replay(path, url, url, "--recorded-pace", "10") == 0
    assert time.monotonic() - began >= 0.4


# -- Triton's tensors --------------------------------------------------------------------------------------------------


def test_captured_tensors_are_replayed(tmp_path: Path) -> None:
    """As JSON, as binary data, and over gRPC, whose bodies are sent by HTTP."""
    port = free_port()
    folder = f"option.capture_requests={tmp_path / 'captured'}"
    with serve("--engine", "echo", "--grpc-port", str(port), "-o", folder) as server:
        prompt = {"name": "text_input", "datatype": "BYTES", "shape": [1, 1]}
        size = {"parameters": {"binary_data_size": len(binary("a b c"))}}
        outputs = [{"name": "text_output", "parameters": {"binary_data": True}}]
        whole = json.dumps({"inputs": [{**prompt, "data": ["a b c"]}]}).encode()
        head = json.dumps({"inputs": [{**prompt, **size}], "outputs": outputs}).encode()
        for body, headers in ((whole, {}), (head + binary("a b c"), {HEADER: str(len(head))})):
            assert http.post(f"{server.url}/v2/models/model/infer", content=body, headers=headers).status_code == 200
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            request = service_pb2.ModelInferRequest(model_name="model")
            request.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1])
            request.raw_input_contents.append(binary("a b c"))
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
    with serve("--engine", "echo") as server, serve("--engine", "echo", "-o", "option.model_name=other") as renamed:
        requests = tmp_path / "captured"
        assert replay(requests, server.url, "recorded") == 0
        assert list(classes(requests).values()) == ["equal"] * 2
        assert replay(requests, server.url, server.url, "--restart") == 0
        assert list(classes(requests).values()) == ["equal"] * 3
        assert replay(requests, renamed.url, server.url, "--restart") == 1
        assert list(classes(requests).values()) == ["status"] * 3
