"""`make image-check`: the images, built from the Dockerfile by buildah and run by podman and crun, without a registry.

`cpu` is built whole, on a Debian made here. `trtllm` and `lmi` are built on stand-ins of their bases. From `cpu` runs
what SageMaker and hardened clusters do: read-only model data, a read-only root, a user without capabilities, SIGTERM in
the middle of an answer.

`llamacpp`, which is run only by its name, is built whole too, which takes 18 minutes of CPU time.

`arm64`, which is run only by its name, is `cpu` for Arm. The machine must run such programs, as with Debian's qemu-user
of sid. In an emulator the build takes half an hour or more.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType as Kind

from tests.accept import debian
from tests.checkpoints.small_gguf import write_small
from tests.container.images.dockerfile import ROOT, SECOND, read
from tests.doubles import tiny
from tests.servers import wait_for

# -- engine ------------------------------------------------------------------------------------------------------------
# Builds the Dockerfile's targets with buildah and runs them with podman and crun, on bases made of Debian's packages.
#
# Needs root, debootstrap, buildah, podman and crun, but no registry: the base that each target names is an argument.


DEBIAN = "localhost/image-check/debian"
SUITE = "bookworm"  # the cpu image's
PROGRAMS = ("debootstrap", "buildah", "podman", "crun")
_CERTIFICATES = "/run/image-check/certificates.pem"
_ASK = """\
import sys, urllib.request
body = sys.argv[2].encode() if len(sys.argv) > 2 else None
request = urllib.request.Request("http://127.0.0.1:8080" + sys.argv[1], body)
request.add_header("Content-Type", "application/json")
try:
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            print(line.decode().rstrip("\\n"), flush=True)
except urllib.error.HTTPError as error:
    print(error.status)
    sys.exit(3)
"""
_WAIT = """\
import time, urllib.error, urllib.request
said = None
while said != 200:
    try:
        with urllib.request.urlopen("http://127.0.0.1:8080/ping", timeout=60) as answer:
            found = answer.status
    except urllib.error.HTTPError as error:
        found = error.status
    except urllib.error.URLError as error:
        if not isinstance(error.reason, ConnectionRefusedError):
            raise
        found = "refused"
    if found != said:
        print(found, flush=True)
    said = found
    time.sleep(0.1)
"""


class Failed(Exception):
    """The message is the command, and the end of what it wrote."""


class ContainerEngine:
    """Images and containers with a storage of their own.

    Args:
        scratch: where that is.
        architecture: Debian's name of that of the images, or "" for this machine's.
    """

    def __init__(self, scratch: Path, architecture: str = "") -> None:
        self._scratch = scratch
        self._architecture = [f"--arch={architecture}"] if architecture else []
        places = ["--root", str(scratch / "storage"), "--runroot", str(scratch / "run")]
        self._places = [*places, "--storage-driver", "overlay"]
        if subprocess.run(["buildah", *self._places, "info"], capture_output=True).returncode:
            self._places = [*places, "--storage-driver", "vfs"]  # slower: each layer is a whole copy

    @property
    def programs(self) -> Path:
        """A directory, for PATH, whose `podman` has this storage."""
        directory = self._scratch / "programs"
        podman = shutil.which("podman")
        if podman is not None and not directory.exists():
            directory.mkdir()
            (directory / "podman").write_text(f'#!/bin/sh\nexec {shlex.join([podman, *self._places])} "$@"\n')
            (directory / "podman").chmod(0o755)
        return directory

    @property
    def storage(self) -> str:
        return self._places[-1]

    def make_debian(self) -> None:
        """An image of Debian's packages alone, as DEBIAN."""
        root = self._scratch / "debian"
        debian.bootstrap(root, SUITE, (), *self._architecture)
        archive = self._scratch / "debian.tar"
        call(["tar", "--create", "--file", str(archive), "--directory", str(root), "--exclude=./dev/*", "."])
        self._podman("import", *self._architecture, str(archive), DEBIAN)
        archive.unlink()
        call(["rm", "--recursive", "--one-file-system", str(root)])

    def build(
        self,
        tag: str,
        arguments: Mapping[str, str],
        *,
        target: str = "",
        lines: Sequence[str] = (),
        context: Path = ROOT,
        again: bool = False,
    ) -> float:
        """Build a target of our Dockerfile, or what `lines` say; returns the image's size in MB.

        Args:
            context: where the Dockerfile is, and what it copies.
            again: use no layer of an earlier build.
        """
        command = [
            "build",
            *self._architecture,
            "--isolation",
            "chroot",
            "--network",
            "host",
            "--layers",
            "--tag",
            tag,
            "--format",
            "docker",
        ]
        if target:
            command += ["--timestamp", read()[0]["SOURCE_DATE_EPOCH"], *(["--no-cache"] if again else [])]
        for name, value in arguments.items():
            command += ["--build-arg", f"{name}={value}"]
        for source, place in self._lent():
            command += ["--volume", f"{source}:{place}:ro"]
        if lines:
            file = self._scratch / "Containerfile"
            file.write_text("\n".join(lines) + "\n")
            command += ["--file", str(file), str(self._scratch / "run")]
        else:
            command += ["--target", target, str(context)]
        call(["buildah", *self._places, *command])
        size: int = json.loads(self._podman("image", "inspect", tag))[0]["Size"]
        return size / 1e6

    def blobs(self, tag: str) -> dict[str, int]:
        """What a push of the image sends: bytes by digest, compressed; the first is the image's configuration."""
        place = self._scratch / f"{tag}-pushed"
        self._podman("push", "--quiet", "--format", "v2s2", "--compress", tag, f"dir:{place}")
        manifest = json.loads((place / "manifest.json").read_text())
        call(["rm", "--recursive", str(place)])
        return {blob["digest"]: int(blob["size"]) for blob in (manifest["config"], *manifest["layers"])}

    def label(self, tag: str, name: str) -> str:
        return str(json.loads(self._podman("image", "inspect", tag))[0]["Labels"][name])

    def run(self, tag: str, name: str, options: Sequence[str], environment: Mapping[str, str]) -> Container:
        log = self._scratch / f"{name}.log"
        return Container(["podman", *self._places], tag, name, options, environment, log)

    def _lent(self) -> list[tuple[Path, str]]:
        """What this machine's pip is set up with, for the build's steps and no part of the image."""
        settings = {name: text for name, text in os.environ.items() if name.startswith("PIP_")}
        lent: list[tuple[Path, str]] = []
        certificates = Path(settings.pop("PIP_CERT", "/etc/ssl/certs/ca-certificates.crt"))
        if certificates.is_file():
            lent.append((certificates, _CERTIFICATES))
            settings["PIP_CERT"] = _CERTIFICATES
        if (wheels := Path(settings.get("PIP_FIND_LINKS", ""))).is_absolute():
            lent.append((wheels, str(wheels)))
        file = self._scratch / "pip.conf"
        values = [f"{name.removeprefix('PIP_').lower().replace('_', '-')} = {text}" for name, text in settings.items()]
        file.write_text("\n".join(["[global]", *values, ""]))
        return [*lent, (file, "/etc/pip.conf")]

    def _podman(self, *arguments: str) -> str:
        return call(["podman", *self._places, *arguments])


class Container:
    """One container, in the foreground: no network but loopback, and process 1 is the image's entry point."""

    def __init__(
        self,
        podman: Sequence[str],
        tag: str,
        name: str,
        options: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        self._podman = podman
        self._name = name
        # The engine's defaults are above what a machine without CAP_SYS_RESOURCE may set.
        limits = ["--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096"]
        run = ["run", "--rm", "--name", name, "--runtime", "crun", "--network=none", "--cgroups=disabled", *limits]
        for key, value in environment.items():
            run += ["--env", f"{key}={value}"]
        self._log = log
        self._pid_file = log.with_suffix(".pid")
        self._pid_file.unlink(missing_ok=True)
        run += ["--pidfile", str(self._pid_file)]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*podman, *run, *options, tag, "serve"], stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
        self.pid = 0
        wait_for(self._found, 60, "there is no process 1")

    def _found(self) -> bool:
        assert self.process.poll() is None, f"it ended with status {self.process.returncode}:\n{self.log}"
        if not self._pid_file.exists():  # until then it need not be asked, which costs more than a look
            return False
        shown = subprocess.run(
            [*self._podman, "inspect", "--format", "{{.State.Pid}}", self._name], capture_output=True, text=True
        )
        self.pid = int(shown.stdout or 0) if not shown.returncode else 0
        return self.pid > 0

    @property
    def log(self) -> str:
        return self._log.read_text()

    def ask(self, path: str, body: Any = None) -> subprocess.Popen[str]:
        return self._beside(_ASK, path, *([json.dumps(body)] if body is not None else []))

    def wait_ready(self, seconds: float) -> list[str]:
        """What /ping has answered, each change of it, until it was 200; "refused" where nobody listens."""
        waiting = self._beside(_WAIT)
        ended = (waiting, self.process)
        try:
            wait_for(lambda: any(one.poll() is not None for one in ended), seconds, "/ping does not answer 200")
        finally:
            waiting.kill()
            output, errors = waiting.communicate()
        assert self.process.poll() is None, f"it ended with status {self.process.returncode}"
        assert not waiting.returncode, errors
        return output.split()

    def _beside(self, code: str, *arguments: str) -> subprocess.Popen[str]:
        """A Python of this machine in the container's network."""
        command = ["nsenter", "--target", str(self.pid), "--net", sys.executable, "-c", code, *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def execute(self, *command: str) -> str:
        return call([*self._podman, "exec", self._name, *command])

    def conform(self, programs: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `lmi conform` beside it, with the programs that it calls."""
        command = ["nsenter", "--target", str(self.pid), "--net", sys.executable, "-m", "handler", "conform"]
        return subprocess.run(
            [*command, "http://127.0.0.1:8080", "--container", self._name, *arguments],
            env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
        )

    def start(self, *command: str) -> None:
        """Run another process in it, which ends with it."""
        call([*self._podman, "exec", "--detach", self._name, *command])

    def stop(self) -> None:
        """SIGTERM by the engine, which would kill after 30 s as SageMaker does."""
        subprocess.Popen(
            [*self._podman, "stop", "--time", "30", self._name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def ended(self, seconds: float) -> int:
        return self.process.wait(seconds)

    def remove(self) -> None:
        subprocess.run([*self._podman, "rm", "--force", "--time", "0", "--ignore", self._name], capture_output=True)
        self.process.wait(30)


def call(command: Sequence[str]) -> str:
    """A command's output.

    Raises:
        Failed: its status was not 0.
    """
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, text=True)
    if done.returncode:
        raise Failed(f"status {done.returncode}: {' '.join(command)}\n{(done.stdout + done.stderr)[-6000:]}")
    return done.stdout


_PROMPT = "The capital of France is"
_STAND_IN = "localhost/image-check/stand-in"
_HELD = ("numpy==1.26.4", "prometheus_client==0.21.1", "transformers==4.57.6")
_UNPRIVILEGED = ("--user", "1000:1000", "--cap-drop", "all", "--security-opt", "no-new-privileges")
_READ_ONLY = ("--read-only", "--read-only-tmpfs=false")
_LABELS = {"VERSION": "0.1.0", "REVISION": "0" * 40, "SOURCE": "https://example.org/lmi-handler"}
_GIVEN = {"CPU_BASE": DEBIAN, "DEMO_MODEL": "true", **_LABELS}
_CHANGE = 5_000_000  # bytes that a change of our code may push
_START = 300  # seconds until a server is ready, beside other suites
_END = 60  # seconds until a container has ended; podman kills it after 30


def main() -> int:
    if os.geteuid():
        print(f"image-check: needs to be root, and the programs {', '.join(PROGRAMS)}", file=sys.stderr)
        return 2
    if any(shutil.which(name) is None for name in PROGRAMS):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update", "-q"], ["install", "-qy", "--no-install-recommends", *PROGRAMS, "conmon"]):
            subprocess.run(["apt-get", "-o", "DPkg::Lock::Timeout=300", *command], env=environment, check=True)
    images = sys.argv[1:] or ["cpu", "again", "trtllm", "lmi"]  # again: what builds cpu again
    with tempfile.TemporaryDirectory(prefix="image-check-") as scratch:
        # In a mount namespace of its own, with which all that the container engines mount goes away.
        command = ["unshare", "--mount", sys.executable, "-c", f"from {__spec__.name} import check; check()"]
        return subprocess.run([*command, scratch, *images]).returncode


def check() -> None:
    scratch, *images = Path(sys.argv[1]), *sys.argv[2:]
    if os.path.ismount("/sys/fs/cgroup/unified"):
        call(["umount", "/sys/fs/cgroup/unified"])  # crun refuses a machine with both versions of cgroups
    engine = ContainerEngine(scratch, "arm64" if images == ["arm64"] else "")
    with _timed(f"base: Debian's packages, by debootstrap; storage driver {engine.storage}"):
        engine.make_debian()
    if images == ["arm64"]:
        return _check_arm(engine, scratch)
    if "cpu" in images:
        _check_cpu(engine, scratch)
    if "again" in images:
        _check_again(engine, scratch)
    if "llamacpp" in images:
        _check_llamacpp(engine, scratch)
    if others := [name for name in images if name not in ("cpu", "again", "llamacpp")]:
        _check_laid_over(engine, scratch, others)


# -- cpu -----------------------------------------------------------------------------------------------------------


def _check_cpu(engine: ContainerEngine, scratch: Path) -> None:
    with _timed("cpu: build, the demo model in it") as done:
        done.append(f"{engine.build('cpu', _GIVEN, target='cpu'):.0f} MB")
        assert engine.label("cpu", "org.opencontainers.image.revision") == _LABELS["REVISION"]
    with _timed("cpu: its own model, read-only root, nothing writable, user 1000 without capabilities") as done:
        _own_model(engine, done)
    with _timed("cpu: read-only model data, converted at the start") as done:
        _model_data(engine, scratch / "model", done)
    with _timed("cpu: --engine openai, in front of echo") as done:
        _by_url(engine, "cpu", scratch / "tokenizer", done)

    with _timed("cpu: lmi conform stops the container") as done:
        _conforms(engine, done)


def _check_arm(engine: ContainerEngine, scratch: Path) -> None:
    """Without the demo model, which an emulator would convert for minutes."""
    with _timed("arm64: build") as done:
        done.append(f"{engine.build('cpu', {**_GIVEN, 'DEMO_MODEL': 'false'}, target='cpu'):.0f} MB")
    with _timed("arm64: echo") as done, _running(engine, "cpu", [], {"OPTION_LLM_ENGINE": "echo"}) as container:
        done.append(f"ready after {_ready(container, _START):.1f} s")
        assert container.execute("uname", "-m") == "aarch64\n"
        _generated(container, "France")
        container.stop()
        assert container.ended(_END) == 0
    with _timed("arm64: read-only model data, converted at the start") as done:
        _model_data(engine, scratch / "model", done)


def _check_llamacpp(engine: ContainerEngine, scratch: Path) -> None:
    with _timed("llamacpp: build") as done:
        done.append(f"{engine.build('llamacpp', {'CPU_BASE': DEBIAN, **_LABELS}, target='llamacpp'):.0f} MB")
    model = scratch / "llamacpp-model"
    model.mkdir()
    write_small(model / "model.gguf", Kind.Q4_0)
    options = ["--volume", f"{model}:/opt/ml/model:ro", *_READ_ONLY, "--tmpfs", "/tmp", *_UNPRIVILEGED]
    with (
        _timed("llamacpp: read-only model data and root, user 1000 without capabilities") as done,
        _running(engine, "llamacpp", options) as container,
    ):
        done.append(f"ready after {_ready(container, _START):.1f} s")
        done.append(container.execute("llama-server", "--version").strip())
        _generated(container, "")
        _orphans_are_reaped(container)
        container.stop()
        assert container.ended(_END) == 0


def _check_again(engine: ContainerEngine, scratch: Path) -> None:
    """A change of one line pushes our own layer only; two builds give the same layers."""
    with _timed("cpu: what a push sends after a change of one line") as done:
        _push_of_a_change(engine, scratch / "changed", done)
    with _timed("cpu: a second build, without a layer of the first") as done:
        engine.build("cpu-again", _GIVEN, target="cpu", again=True)
        (_, *first), (_, *second) = engine.blobs("cpu").items(), engine.blobs("cpu-again").items()
        # In Docker's format buildah writes the id of its container into the configuration, which comes first.
        assert first == second, f"two builds differ: {first} {second}"
        done.append(f"the same {len(first)} layers, {sum(size for _, size in first) / 1e6:.0f} MB in all")


def _push_of_a_change(engine: ContainerEngine, context: Path, done: list[str]) -> None:
    """All layers but the last are pushed already."""
    for name in ("LICENSE", "pyproject.toml", "README.md", "lmi_handler.py", "Dockerfile", ".dockerignore"):
        context.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, context / name)
    for name in ("handler", "deploy", "proof", "docker"):
        shutil.copytree(ROOT / name, context / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (context / "handler" / "__init__.py").open("a") as file:
        file.write("CHANGED = True\n")
    engine.build("cpu-changed", {**_GIVEN, "REVISION": "f" * 40}, target="cpu", context=context)
    before = engine.blobs("cpu")
    sent = [size for digest, size in engine.blobs("cpu-changed").items() if digest not in before]
    assert len(sent) == 2, f"not the configuration and one layer: {sent}"
    assert sum(sent) < _CHANGE, sent
    done.append(f"{sum(sent) / 1e6:.1f} of {sum(before.values()) / 1e6:.0f} MB")


def _own_model(engine: ContainerEngine, done: list[str]) -> None:
    with _running(engine, "cpu", [*_READ_ONLY, *_UNPRIVILEGED]) as container:
        seconds = _ready(container, _START)
        assert "once" not in container.log, "the model was converted at the start"
        refused = subprocess.run(["nsenter", "-t", str(container.pid), "-m", "touch", "/tmp/x"], capture_output=True)
        assert refused.returncode, "the root can be written"
        status = Path(f"/proc/{container.pid}/status").read_text()
        assert "CapEff:\t0000000000000000" in status
        assert "Uid:\t1000\t1000" in status
        text = _generated(container)
        _orphans_are_reaped(container)
        container.stop()
        assert container.ended(_END) == 0
    done += [f"ready after {seconds:.1f} s", f"says {text!r}"]


def _orphans_are_reaped(container: Container) -> None:
    """Orphans become children of process 1; one that has died and is not waited for stays as a zombie."""
    orphan = "import os, time\nif os.fork() == 0:\n    time.sleep(0.3)\n    os._exit(0)"
    container.execute("python", "-c", orphan)
    children = Path(f"/proc/{container.pid}/task/{container.pid}/children")
    time.sleep(1)

    def zombies() -> list[str]:
        return [pid for pid in children.read_text().split() if ") Z " in Path(f"/proc/{pid}/stat").read_text()]

    wait_for(lambda: not zombies(), 30, "process 1 has zombies")


def _conforms(engine: ContainerEngine, done: list[str]) -> None:
    environment = {"OPTION_LLM_ENGINE": "echo", "OPTION_ECHO_TOKENS_PER_SECOND": "50"}
    with _running(engine, "cpu", [], environment) as container:
        _ready(container, 120)
        found = container.conform(engine.programs, "--rule", "ping", "--rule", "stop")
        passed = [line.split()[-1] for line in found.stderr.splitlines() if line.startswith("passed ")]
        assert (found.returncode, passed[-3:]) == (0, ["stop.finishes", "stop.new-work", "stop.exit"]), found
        assert container.ended(15) == 0
    done.append(f"{len(passed)} rules hold")


def _model_data(engine: ContainerEngine, model: Path, done: list[str]) -> None:
    """A small model: the build has converted the demo model, which takes a minute of computing."""
    model.mkdir()
    write_small(model / "model.gguf", Kind.Q4_0)
    (model / "serving.properties").write_text("option.max_rolling_batch_size=4\n")
    with _running(engine, "cpu", ["--volume", f"{model}:/opt/ml/model:ro"], {"SM_NUM_GPUS": "1"}) as container:
        seconds = _ready(container, _START)
        refused = subprocess.run(["touch", f"/proc/{container.pid}/root/opt/ml/model/x"], capture_output=True)
        assert refused.returncode, "the model data can be written"
        assert "once" in container.log, "the model was not converted at the start"
        assert "SM_NUM_GPUS is understood as TENSOR_PARALLEL_DEGREE=1" in container.log
        _generated(container, "")
        container.stop()
        assert container.ended(_END) == 0
    assert sorted(entry.name for entry in model.iterdir()) == ["model.gguf", "serving.properties"]
    done.append(f"ready after {seconds:.1f} s")


# -- each image ----------------------------------------------------------------------------------------------------


def _by_url(engine: ContainerEngine, tag: str, model: Path, done: list[str]) -> None:
    """The engine is another server in the same container, with the tokenizer in `model`."""
    echo = ("--engine", "echo", "--port", "8081", "-o", "option.echo_tokenizer=/opt/ml/model")
    options = {"LLM_ENGINE": "openai", "BASE_URL": "http://127.0.0.1:8081/v1", "BASE_URL_KIND": "lmi"}
    environment = {"LMI_FRONT": "embedded", **{f"OPTION_{name}": value for name, value in options.items()}}
    with _running(engine, tag, ["--volume", f"{tiny.make(model)}:/opt/ml/model:ro"], environment) as container:
        container.start("env", *(f"--unset={name}" for name in environment), "python3", "-m", "handler", "serve", *echo)
        done.append(f"ready after {_ready(container, _START):.1f} s")
        _generated(container, "France")
        container.stop()
        assert container.ended(_END) == 0


# -- trtllm and lmi ------------------------------------------------------------------------------------------------


def _check_laid_over(engine: ContainerEngine, scratch: Path, names: Sequence[str]) -> None:
    """The engine's packages are as they were, ours are there, and the entry point runs."""
    arguments, stages = read()
    djl = f"/usr/local/djl-serving-{arguments['DJL_VERSION']}"
    with _timed("stand-in of their bases: Debian with a Python and older packages"):
        lines = [
            f"FROM {DEBIAN}",
            "RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-pip",
            "ENV PIP_BREAK_SYSTEM_PACKAGES=1",
            f"RUN python3 -m pip install --no-cache-dir {' '.join(_HELD)} starlette==0.46.2",
            f"RUN mkdir -p /opt/java/openjdk/bin {djl}/bin /opt/djl/bin",
            f"RUN touch /opt/java/openjdk/bin/java {djl}/bin/serving /opt/djl/bin/s5cmd",
        ]
        engine.build(_STAND_IN, {}, lines=lines)
    bases = {"CPU_BASE": DEBIAN} | {f"{name}_BASE": _STAND_IN for name in ("JRE", "DJL", "TRTLLM", "LMI")}
    pins = (ROOT / "docker/constraints-gpu.txt").read_text()
    ours = re.findall(r"^starlette==\S+", pins, re.MULTILINE)[-1]  # newer than the stand-in's
    builds = [(name, name, bases) for name in names]
    if "trtllm" in names:  # its second base by that base's own name, which TRTLLM_VERSION makes
        engine.build(read(given={"TRTLLM_VERSION": SECOND})[1]["trtllm"].base, {}, lines=[f"FROM {_STAND_IN}"])
        others = {key: value for key, value in bases.items() if key != "TRTLLM_BASE"}
        builds.append((f"trtllm-{SECOND}", "trtllm", {**others, "TRTLLM_VERSION": SECOND}))
    for tag, name, given in builds:
        with _timed(f"{tag}: built on the stand-in, started with echo") as done:
            engine.build(tag, given, target=name)
            with _running(engine, tag, [], {"LMI_FRONT": "embedded", "OPTION_LLM_ENGINE": "echo"}) as container:
                done.append(f"ready after {_ready(container, _START):.1f} s")
                freeze = container.execute("python3", "-m", "pip", "list", "--format", "freeze").splitlines()
                assert {*_HELD, ours} <= set(freeze), freeze
                environment = container.execute("env").splitlines()
                expected = {**stages[name].environment(), "LMI_FRONT": "embedded", "OPTION_LLM_ENGINE": "echo"}
                assert {f"{key}={value}" for key, value in expected.items()} <= set(environment), environment
                container.stop()
                assert container.ended(_END) == 0
            _by_url(engine, tag, scratch / "tokenizer", done)


# -- one container -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _running(
    engine: ContainerEngine, tag: str, options: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[Container]:
    container = engine.run(tag, f"image-check-{tag}", options, environment or {})
    try:
        yield container
    except BaseException:
        print(container.log, file=sys.stderr)
        raise
    finally:
        container.remove()


def _ready(container: Container, seconds: float) -> float:
    """Seconds until /ping answers 200; from the first answer on it is 503 before, and never a refused connection."""
    began = time.monotonic()
    seen = container.wait_ready(seconds)
    assert seen in (["refused", "503", "200"], ["503", "200"], ["refused", "200"], ["200"]), seen
    return time.monotonic() - began


def _generated(container: Container, words: str = "Paris") -> str:
    answer = container.ask("/invocations", {"inputs": _PROMPT, "parameters": {"max_new_tokens": 8}})
    output, errors = answer.communicate(timeout=60)
    assert answer.returncode == 0, errors
    found = json.loads(output)["generated_text"]
    assert isinstance(found, str)
    assert words in found, found
    return found


@contextlib.contextmanager
def _timed(what: str) -> Iterator[list[str]]:
    """Print how long it took, and what the body adds."""
    began = time.monotonic()
    found: list[str] = []
    yield found
    print(f"{what}: {', '.join([f'{time.monotonic() - began:.0f} s', *found])}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
