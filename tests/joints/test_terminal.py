"""Commands and strangers' files: no character that a terminal executes reaches it, whichever command prints it."""

from __future__ import annotations

import contextlib
import http.server
import json
import random
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from handler.cli import main
from tests.doubles.downloads import serving

CONTROLS = [*map(chr, [*range(1, 9), *range(11, 32), *range(127, 160), 0x061C, 0x200E, 0x200F])]
BIDI = [*map(chr, [*range(0x202A, 0x202F), *range(0x2066, 0x206A)])]
RAW = re.compile(f"[{''.join(CONTROLS + BIDI)}]")
SPEC = {
    "name": "x",
    "role": "arn:aws:iam::123456789012:role/x",
    "image": {"repository": "r"},
    "model": {"id": "a/b"},
    "instance": {"type": "ml.g6.2xlarge"},
}

Case = Callable[[Path, str], list[str]]


def _spec(directory: Path, **values: object) -> str:
    (path := directory / "a.yaml").write_text(json.dumps({**SPEC, **values}))
    return str(path)


def _file(directory: Path, name: str, text: str | bytes) -> str:
    (path := directory / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def _gguf(key: str, value: str) -> bytes:
    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text.encode())) + text.encode()

    pairs = [
        (b"", string("general.architecture") + struct.pack("<I", 8) + string(value)),
        (b"", string(key) + struct.pack("<IB", 7, 1)),
    ]
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + b"".join(pair for _, pair in pairs)


def _model(directory: Path, **config: object) -> str:
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes(b"")
    return str(directory)


CASES: dict[str, Case] = {
    "a setting": lambda d, odd: ["deploy", "plan", _spec(d, **{odd: 1})],
    "a nested setting": lambda d, odd: ["deploy", "plan", _spec(d, instance={odd: {odd: 1}})],
    "a value": lambda d, odd: ["deploy", "plan", _spec(d, name=odd)],
    "a tag": lambda d, odd: ["deploy", "plan", _spec(d, tags={odd: odd})],
    "a model": lambda d, odd: ["deploy", "plan", _spec(d, model={"id": odd})],
    "an option": lambda d, odd: ["deploy", "plan", _spec(d, options={odd: odd})],
    "a variable": lambda d, odd: ["deploy", "plan", _spec(d, environment={odd: odd})],
    "a check": lambda d, odd: ["deploy", "doctor", _spec(d, **{odd: 1})],
    "an export": lambda d, odd: ["deploy", "export", _spec(d, tags={odd: odd}), "--format", "cloudformation"],
    "broken YAML": lambda d, odd: ["deploy", "plan", _file(d, "a.yaml", f"a: [{odd}\n{odd}: {odd}")],
    "an endpoint": lambda d, odd: ["deploy", "adopt", "--name", "x", "--region", "us-east-1", "--file", _file(
        d, "m.json", json.dumps({"Model": {"ExecutionRoleArn": SPEC["role"], "PrimaryContainer": {
            "Image": "763104351884.dkr.ecr.us-east-1.amazonaws.com/djl-inference:0.32.0-lmi14.0.0-cu126",
            "Environment": {odd: odd, f"OPTION_{odd}": odd, "HF_MODEL_ID": odd}}},
            "EndpointConfig": {"ProductionVariants": [{"VariantName": odd, "InstanceType": "ml.g6.2xlarge",
                                                       "InitialInstanceCount": 1}]}}))],
    "a property": lambda d, odd: ["serve", "--check", "--engine", "echo", "--properties", _file(
        d, "serving.properties", f"option.{odd}={odd}\noption.dtype={odd}\n")],
    "an argument": lambda d, odd: ["serve", "--check", "--engine", "echo", "-o", f"option.{odd}={odd}"],
    "a flag": lambda d, odd: ["serve", f"--{odd}", odd],
    "a command": lambda d, odd: [odd],
    "a word": lambda d, odd: ["options", odd],
    "a directory": lambda d, odd: ["serve", "--check", f"./{odd}"],
    "a configuration": lambda d, odd: ["serve", "--check", "--engine", "vllm", _model(
        d, model_type=odd, architectures=[odd], quantization_config={"quant_method": odd})],
    "a GGUF file": lambda d, odd: ["serve", "--check", _file(d, "a.gguf", _gguf(odd, odd))],
    "a template": lambda d, odd: ["serve", "--check", "demo", "--chat-template", "{% " + odd + " %}"],
    "a recording": lambda d, odd: ["replay", _file(d, "a.jsonl", json.dumps({odd: odd}) + "\n"), "--to", "http://127.0.0.1:9",
                                   "--output", str(d / "out")],
    "a result": lambda d, odd: ["bench", "--compare", _file(d, "a.json", json.dumps({odd: odd})), str(d / "a.json")],
}  # fmt: skip


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "us-east-1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")


def printed(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    with contextlib.suppress(SystemExit):
        main(arguments)
    found = capsys.readouterr()
    return found.out + found.err


@pytest.mark.parametrize("case", CASES)
def test_no_name_and_no_value_of_a_file_reaches_the_terminal_as_it_is(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(case)
    for number, odd in enumerate(["\x1b]0;x\x07\x9b2J\u202ea", *("".join(draw.sample(CONTROLS + BIDI, 4)) + "a",) * 2]):
        (directory := tmp_path / str(number)).mkdir()
        found = printed(capsys, CASES[case](directory, odd))
        assert found
        assert RAW.search(found) is None
    assert "Traceback" not in found


class _Odd(http.server.BaseHTTPRequestHandler):
    """A server whose answers have controls in each name and value."""

    ODD = "\x1b]0;x\x07\x9b2J\u202ea"

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        body = json.dumps(
            {"object": "list", "data": [{"id": self.ODD, self.ODD: 1}], "error": {"message": self.ODD}, self.ODD: 1},
            ensure_ascii=False,
        ).encode()
        self.send_response(400 if self.command == "POST" else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Odd)) as url:
        yield url


@pytest.mark.parametrize("words", [["bench"], ["conform", "--profile", "openai"], ["launch", "opencode", "--server"]])
def test_no_answer_of_a_server_does(words: list[str], server: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, [*words, server])
    assert found
    assert RAW.search(found) is None
