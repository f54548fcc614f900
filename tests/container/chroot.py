"""Builds stages of the Dockerfile in directories: a Debian made by mmdebstrap, and the stages' own steps in it.

It knows what our Dockerfile uses: ARG, ENV, SHELL, WORKDIR, COPY from the context and from stages, RUN with a bind
mount from a stage. Anything else is an error, so that nothing is passed over. Needs root.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.container.dockerfile import ROOT, Stage, context, expand

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SKIPPED = ("LABEL", "EXPOSE", "ENTRYPOINT", "CMD")  # they say how it is run
_LENT = "/run/certificates.pem"


class StepFailed(Exception):
    """The message is the command, and what it wrote."""


class Built(NamedTuple):
    """A root file system, and the environment that its ENV instructions left."""

    root: Path
    environment: Mapping[str, str]


class Builder:
    """
    Args:
        globals_: the ARGs before the first FROM, which a stage may take over.
        arguments: build arguments by name.
        scratch: where the roots are made, one for each stage.
        stand_in: makes of a bare Debian what stands for a base that is no Debian.
    """

    def __init__(
        self,
        globals_: Mapping[str, str],
        stages: Mapping[str, Stage],
        scratch: Path,
        arguments: Mapping[str, str],
        stand_in: Callable[[Path], None],
    ) -> None:
        self._globals = globals_
        self._stages = stages
        self._scratch = scratch
        self._arguments = arguments
        self._stand_in = stand_in

    def build(self, name: str) -> Built:
        """
        Raises:
            StepFailed: a step did.
            ValueError: an instruction that is not known here.
        """
        stage = self._stages[name]
        root, done = self._scratch / name, self._scratch / f".{name}.done"
        if not done.exists():
            shutil.rmtree(root, ignore_errors=True)  # half made, by a step that failed
            _duplicate(self._base(stage), root)
        variables: dict[str, str] = {}
        environment = {"PATH": PATH}
        shell, directory = ["/bin/sh", "-c"], "/"
        for instruction in stage.instructions:
            value = instruction.value
            match instruction.name:
                case "ARG":
                    key, _, default = value.partition("=")
                    variables[key] = self._arguments.get(key, default or self._globals.get(key, ""))
                case "ENV":
                    environment |= dict(pair.split("=", 1) for pair in shlex.split(value))
                case "SHELL":
                    shell = stage.command("SHELL")
                case "WORKDIR":
                    directory = value
                    (root / value.lstrip("/")).mkdir(parents=True, exist_ok=True)
                case "COPY" | "RUN" if done.exists():
                    pass
                case "COPY":
                    self._copy(expand(value, variables).split(), root, directory)
                case "RUN":
                    print(f"[{name}] RUN {value[:90]} ...", flush=True)
                    self._run(value, shell, directory, root, {**variables, **environment})
                case other if other not in _SKIPPED:
                    raise ValueError(f"the Dockerfile has {other}, which is not known here")
        done.touch()
        return Built(root, environment)

    def _base(self, stage: Stage) -> Path:
        if stage.base.startswith("debian:"):
            return self._debian(stage.base.removeprefix("debian:").split("-")[0])
        base = self._scratch / ".stand-in"
        if not base.is_dir():
            print(f"[{stage.name}] FROM {stage.base}: a stand-in ...", flush=True)
            _duplicate(self._debian("bookworm"), base)
            self._stand_in(base)
        return base

    def _debian(self, suite: str) -> Path:
        base = self._scratch / f".{suite}"
        if not base.is_dir():
            print(f"mmdebstrap {suite} ...", flush=True)
            # In a mount namespace of its own: interrupted, it would leave this machine's /dev in what is removed then.
            command = ["unshare", "--mount", "mmdebstrap", "--quiet", "--variant=minbase", suite, str(base)]
            subprocess.run(command, check=True)
            shutil.copy("/etc/resolv.conf", base / "etc/resolv.conf")  # as Docker does
        return base

    def _stage_root(self, name: str) -> Path:
        if not (self._scratch / name).is_dir():
            self.build(name)
        return self._scratch / name

    def _copy(self, words: Sequence[str], root: Path, directory: str) -> None:
        *sources, target = words
        to = root / str(Path(directory, target)).lstrip("/")
        if sources[0].startswith("--from="):
            stage = self._stage_root(sources[0].removeprefix("--from="))
            for inside in sources[1:]:
                shutil.copytree(stage / inside.lstrip("/"), to, symlinks=True, dirs_exist_ok=True)
            return
        allowed = set(context())
        for source in map(Path, sources):
            files = [path for path in allowed if path == source or source in path.parents]
            if not files:
                raise FileNotFoundError(f"COPY {source}: .dockerignore lets nothing of it through")
            for file in files:
                # A file goes into a directory that is written with a slash; of a directory its content is copied.
                inner = file.relative_to(source) if file != source else Path(file.name)
                place = to / inner if target.endswith("/") or file != source else to
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / file, place)

    def _run(self, value: str, shell: list[str], directory: str, root: Path, environment: Mapping[str, str]) -> None:
        mounts: list[tuple[Path, str]] = []
        while found := re.match(r"--mount=(\S+)\s+", value):
            options = dict(option.split("=", 1) for option in found[1].split(","))
            if options.pop("type") != "bind" or options.keys() != {"from", "source", "target"}:
                raise ValueError(f"RUN --mount={found[1]} is not known here")
            mounts.append((self._stage_root(options["from"]) / options["source"].lstrip("/"), options["target"]))
            value = value[found.end() :]
        in_root([*shell, f"cd {shlex.quote(directory)} && {value}"], root, environment, mounts)


def in_root(
    command: list[str], root: Path, environment: Mapping[str, str], mounts: Sequence[tuple[Path, str]] = ()
) -> None:
    """Run a command in a root, with /proc, /dev and mounts that go when it ends.

    What this machine's pip is set up with is lent to it, and becomes no part of the root.

    Raises:
        StepFailed: it ended with another status than 0.
    """
    lent = {name: text for name, text in os.environ.items() if name.startswith("PIP_")}
    certificates = Path(lent.pop("PIP_CERT", "/etc/ssl/certs/ca-certificates.crt"))
    mounts = list(mounts)
    if certificates.is_file():
        lent["PIP_CERT"] = _LENT
        mounts.append((certificates, _LENT))
    if (wheels := Path(lent.get("PIP_FIND_LINKS", ""))).is_absolute():
        mounts.append((wheels, str(wheels)))
    made: list[Path] = []
    lines = ["set -e", f"mount --rbind /dev {root}/dev", f"mount -t proc proc {root}/proc"]
    for source, target in mounts:
        place = root / target.lstrip("/")
        if not place.exists():
            made.append(place)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.mkdir() if source.is_dir() else place.touch()
        lines.append(f"mount --bind {source} {place}")
    lines.append(f"exec chroot {root} {shlex.join(command)}")
    unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "/bin/bash", "-c", "\n".join(lines)]
    try:
        done = subprocess.run(
            unshare, env={**lent, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode:
            raise StepFailed(f"status {done.returncode}: {shlex.join(command)}\n{done.stdout}")
    finally:
        for place in made:
            place.rmdir() if place.is_dir() else place.unlink()


def _duplicate(root: Path, target: Path) -> None:
    subprocess.run(["cp", "-a", "--reflink=auto", str(root), str(target)], check=True)
