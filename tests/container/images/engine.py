"""Builds the Dockerfile's targets with buildah and runs them with podman and crun, on bases made of Debian's packages.

Needs root, debootstrap, buildah, podman and crun, but no registry: the base that each target names is an argument.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.container.images.dockerfile import ROOT, read
from tests.servers import wait_for

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


class Failed(Exception):
    """The message is the command, and the end of what it wrote."""


class ContainerEngine:
    """Images and containers with a storage of their own.

    Args:
        scratch: where that is.
    """

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
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
        call(["debootstrap", "--variant=minbase", SUITE, str(root)])
        archive = self._scratch / "debian.tar"
        call(["tar", "--create", "--file", str(archive), "--directory", str(root), "--exclude=./dev/*", "."])
        self._podman("import", str(archive), DEBIAN)
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

    def copy_out(self, tag: str, path: str, target: Path) -> None:
        """A file of an image."""
        name = self._podman("create", tag).strip()
        self._podman("cp", f"{name}:{path}", str(target))
        self._podman("rm", name)

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
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*podman, *run, *options, tag, "serve"], stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
        self.pid = 0
        wait_for(self._found, 60, "there is no process 1")

    def _found(self) -> bool:
        assert self.process.poll() is None, f"it ended with status {self.process.returncode}:\n{self.log}"
        shown = subprocess.run(
            [*self._podman, "inspect", "--format", "{{.State.Pid}}", self._name], capture_output=True, text=True
        )
        self.pid = int(shown.stdout or 0) if not shown.returncode else 0
        return self.pid > 0

    @property
    def log(self) -> str:
        return self._log.read_text()

    def ask(self, path: str, body: Any = None) -> subprocess.Popen[str]:
        more = [json.dumps(body)] if body is not None else []
        command = ["nsenter", "--target", str(self.pid), "--net", sys.executable, "-c", _ASK, path, *more]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def ping(self) -> str:
        """The status; "refused" where nobody listens, or the container has ended."""
        asked = self.ask("/ping")
        output, errors = asked.communicate(timeout=60)
        if asked.returncode == 3:
            return output.strip()
        assert not asked.returncode or re.search("Connection refused|nsenter: cannot open", errors), errors
        return "refused" if asked.returncode else "200"

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
