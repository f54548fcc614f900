"""`make image-cpu-check`: the cpu image as far as it can be had without a container engine.

The Dockerfile's own steps are carried out in a Debian made for it; then the entry point is started as SageMaker would:
process 1, root, `serve`, model data read only, no network. It is asked, and told to stop in the middle of an answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.container.chroot import PATH, Builder, Built, in_root
from tests.container.dockerfile import Stage, read
from tests.servers import wait_for

_ASK = """\
import sys, urllib.request
body = sys.argv[2].encode() if len(sys.argv) > 2 else None
request = urllib.request.Request("http://127.0.0.1:8080" + sys.argv[1], body)
request.add_header("Content-Type", "application/json")
with urllib.request.urlopen(request, timeout=60) as answer:
    for line in answer:
        print(line.decode().rstrip("\\n"), flush=True)
"""
_PROMPT = "The capital of France is"


class Container:
    """The image's process 1 in namespaces of its own: processes, mounts, and a network that is loopback alone."""

    def __init__(self, built: Built, stage: Stage, model: Path | None, environment: Mapping[str, str]) -> None:
        root = built.root
        lines = ["set -e", "ip link set lo up", f"mount --rbind /dev {root}/dev", f"mount -t proc proc {root}/proc"]
        if model:
            (root / "opt/ml/model").mkdir(parents=True, exist_ok=True)
            lines += [f"mount --bind -o ro {model} {root}/opt/ml/model"]
        command = [*stage.command("ENTRYPOINT"), "serve"]
        lines.append(f"exec chroot {root} {shlex.join(command)}")
        unshare = [
            "unshare",
            "--mount",
            "--pid",
            "--net",
            "--fork",
            "--kill-child",
            "/bin/bash",
            "-c",
            "\n".join(lines),
        ]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as the container)
        self.process = subprocess.Popen(
            unshare, env={"HOME": "/root", **built.environment, **environment}, stdout=self.log, stderr=self.log
        )

    @property
    def pid(self) -> int:
        """Process 1, by the number that it has outside."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        wait_for(lambda: self.process.poll() is not None or children.read_text(), 10, "there is no process 1")
        assert self.process.poll() is None, f"it ended with status {self.process.returncode}"
        return int(children.read_text().split()[0])

    def ask(self, path: str, body: Any = None) -> subprocess.Popen[str]:
        more = [json.dumps(body)] if body is not None else []
        command = ["nsenter", "--target", str(self.pid), "--net", sys.executable, "-c", _ASK, path, *more]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def wait_ready(self, seconds: float) -> float:
        began = time.monotonic()
        while True:
            ping = self.ask("/ping")
            ping.communicate()
            if ping.returncode == 0:
                return time.monotonic() - began
            assert self.process.poll() is None, f"it ended with status {self.process.returncode}"
            assert time.monotonic() - began < seconds, f"not ready after {seconds} s"
            time.sleep(0.2)

    def said(self) -> str:
        self.log.seek(0)
        return self.log.read()


@contextlib.contextmanager
def running(built: Built, stage: Stage, model: Path | None, environment: Mapping[str, str]) -> Iterator[Container]:
    container = Container(built, stage, model, environment)
    try:
        yield container
    except BaseException:
        print(container.said(), file=sys.stderr)
        raise
    finally:
        container.process.kill()
        container.process.wait()
        container.log.close()


def main() -> int:
    if os.geteuid():
        print("image-cpu-check: needs root, to make a Debian and to enter it", file=sys.stderr)
        return 2
    arguments, stages = read()
    with contextlib.ExitStack() as stack:
        # A directory that is named is kept, and the stages in it are not made again.
        scratch = (
            sys.argv[1] if len(sys.argv) > 1 else stack.enter_context(tempfile.TemporaryDirectory(prefix="image-"))
        )
        builder = Builder(arguments, stages, Path(scratch), {"DEMO_MODEL": "true"}, _stand_in)
        began = time.monotonic()
        built = builder.build("cpu")
        megabytes = subprocess.run(
            ["du", "-sm", built.root], capture_output=True, text=True, check=True
        ).stdout.split()[0]
        print(f"cpu: built in {time.monotonic() - began:.0f} s, {megabytes} MB", flush=True)
        _own_model(built, stages["cpu"])
        _model_data(built, stages["cpu"], Path(scratch, "model-data"))
        for name in ("trtllm", "lmi"):
            _laid_over(builder.build(name), stages[name])
    return 0


def _own_model(built: Built, stage: Stage) -> None:
    with running(built, stage, None, {}) as container:
        seconds = container.wait_ready(120)
        text = _generated(container)
        _stopped(container, 10)
    print(f"cpu: the model in the image, no network: ready after {seconds:.1f} s, says {text!r}", flush=True)


def _model_data(built: Built, stage: Stage, model: Path) -> None:
    model.mkdir(exist_ok=True)
    (model / "model.gguf").unlink(missing_ok=True)
    os.link(built.root / built.environment["LMI_DEFAULT_MODEL"].lstrip("/"), model / "model.gguf")
    (model / "serving.properties").write_text("option.max_rolling_batch_size=4\noption.dtype=fp32\n")
    with running(built, stage, model, {"SM_NUM_GPUS": "1"}) as container:
        seconds = container.wait_ready(120)
        refused = subprocess.run(["touch", f"/proc/{container.pid}/root/opt/ml/model/x"], capture_output=True)
        assert refused.returncode, "the model data can be written"
        assert "SM_NUM_GPUS is understood as TENSOR_PARALLEL_DEGREE=1" in container.said()
        text = _generated(container)
        stream = container.ask("/invocations", _body(400, stream=True))
        assert stream.stdout is not None
        first = stream.stdout.readline()
        os.kill(container.pid, signal.SIGTERM)
        lines = [first, *stream.communicate()[0].splitlines()]
        assert json.loads(lines[-1])["details"]["finish_reason"] in ("length", "eos_token"), lines[-1]
        assert container.process.wait(30) == 0
    assert sorted(entry.name for entry in model.iterdir()) == ["model.gguf", "serving.properties"]
    print(f"cpu: model data, read only: ready after {seconds:.1f} s, says {text!r}", flush=True)
    print(f"cpu: SIGTERM in the middle of an answer: its {len(lines)} tokens came, exit status 0", flush=True)


def _stand_in(root: Path) -> None:
    """What the GPU images' own steps need of their bases: a Python with packages, some older than ours; JRE and DJL."""
    environment = {"PATH": PATH, "PIP_BREAK_SYSTEM_PACKAGES": "1"}
    in_root(["apt-get", "update"], root, environment)
    in_root(["apt-get", "install", "-y", "--no-install-recommends", "python3", "python3-pip"], root, environment)
    in_root(["python3", "-m", "pip", "install", "--no-cache-dir", *_HELD, "starlette==0.46.2"], root, environment)
    for directory in ("opt/java/openjdk/bin", "usr/local/djl-serving-0.36.0/bin"):
        (root / directory).mkdir(parents=True)


def _laid_over(built: Built, stage: Stage) -> None:
    """The engine's packages are as they were, ours are there, and the entry point runs."""
    freeze = [*_HELD, "starlette==1.10.0"]
    check = (
        f"import importlib.metadata as m; assert all(m.version(n) == v for n, v in {[f.split('==') for f in freeze]})"
    )
    in_root(["python3", "-c", check], built.root, built.environment)
    echo = {"LMI_FRONT": "embedded", "OPTION_LLM_ENGINE": "echo"}
    with running(built, stage, None, echo) as container:
        seconds = container.wait_ready(60)
        _stopped(container, 10)
    print(f"{stage.name}: laid over a stand-in of its base: ready after {seconds:.1f} s with echo", flush=True)


_HELD = ("numpy==1.26.4", "prometheus_client==0.21.1")


def _body(tokens: int, *, stream: bool = False) -> dict[str, Any]:
    return {"inputs": _PROMPT, "parameters": {"max_new_tokens": tokens, "details": True}, "stream": stream}


def _generated(container: Container) -> str:
    answer = container.ask("/invocations", _body(8))
    output, errors = answer.communicate(timeout=60)
    assert answer.returncode == 0, errors
    found = json.loads(output)["generated_text"]
    assert isinstance(found, str)
    assert "Paris" in found
    return found


def _stopped(container: Container, seconds: float) -> None:
    """SIGTERM, and the exit status of what SageMaker would not have to kill."""
    os.kill(container.pid, signal.SIGTERM)
    assert container.process.wait(seconds) == 0


if __name__ == "__main__":
    raise SystemExit(main())
