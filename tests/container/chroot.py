"""Builds a stage of the Dockerfile in a directory: a Debian made by mmdebstrap, and the stage's own steps in it.

It knows what our Dockerfile uses: ARG, ENV, SHELL, WORKDIR, COPY from the context and from stages, RUN with a bind
mount from a stage. Anything else is an error, so that nothing is passed over. Needs root.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.container.dockerfile import ROOT, Stage, context, expand

_MIRROR = "http://deb.debian.org/debian"
_SKIPPED = ("LABEL", "EXPOSE", "ENTRYPOINT", "CMD")  # they say how it is run
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LENT = "/run/certificates.pem"


class StepFailed(Exception):
    """The message is the command, and what it wrote."""


class Built(NamedTuple):
    """A root file system, and the environment that its ENV instructions left."""

    root: Path
    environment: Mapping[str, str]


def build(stages: Mapping[str, Stage], name: str, scratch: Path, arguments: Mapping[str, str]) -> Built:
    """
    Args:
        arguments: build arguments, by name.
        scratch: where the roots are made, one for each stage; its `base` is used again where it is there.

    Raises:
        StepFailed: a step did.
    """
    stage = stages[name]
    root = scratch / name
    subprocess.run(["cp", "-a", "--reflink=auto", str(_base(stage, scratch)), str(root)], check=True)
    variables: dict[str, str] = {}
    environment = {"PATH": _PATH}
    shell = ["/bin/sh", "-c"]
    directory = "/"
    for instruction in stage.instructions:
        value = instruction.value
        match instruction.name:
            case "ARG":
                key, _, default = value.partition("=")
                variables[key] = arguments.get(key, default)
            case "ENV":
                environment |= dict(pair.split("=", 1) for pair in shlex.split(value))
            case "SHELL":
                shell = stage.command("SHELL")
            case "WORKDIR":
                directory = value
                (root / value.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "COPY":
                _copy(value, root, directory, stages, scratch, variables)
            case "RUN":
                print(f"[{name}] RUN {value[:100]} ...", flush=True)
                _run(value, shell, directory, root, {**variables, **environment}, scratch, stages, arguments)
            case other if other not in _SKIPPED:
                raise ValueError(f"the Dockerfile has {other}, which is not known here")
    return Built(root, environment)


def _base(stage: Stage, scratch: Path) -> Path:
    base = scratch / "base"
    if not base.is_dir():
        suite = stage.base.removeprefix("debian:").split("-")[0]
        if not stage.base.startswith("debian:") or not suite.isalpha():
            raise ValueError(f"{stage.base} is no Debian that mmdebstrap could make")
        print(f"[{stage.name}] FROM {stage.base}: mmdebstrap {suite} ...", flush=True)
        # In a mount namespace of its own: interrupted, it would leave this machine's /dev in what is removed then.
        command = ["unshare", "--mount", "mmdebstrap", "--quiet", "--variant=minbase", suite, str(base), _MIRROR]
        subprocess.run(command, check=True)
        # What Docker brings into a container, or a machine's own network needs.
        shutil.copy("/etc/resolv.conf", base / "etc/resolv.conf")
        # slim images leave manuals out
        (base / "etc/dpkg/dpkg.cfg.d/docker").write_text(
            "path-exclude /usr/share/man/*\npath-exclude /usr/share/doc/*\n"
        )
    return base


def _stage_root(name: str, stages: Mapping[str, Stage], scratch: Path, arguments: Mapping[str, str]) -> Path:
    if not (scratch / name).is_dir():
        build(stages, name, scratch, arguments)
    return scratch / name


def _copy(
    value: str,
    root: Path,
    directory: str,
    stages: Mapping[str, Stage],
    scratch: Path,
    variables: Mapping[str, str],
) -> None:
    *sources, target = expand(value, variables).split()
    if sources[0].startswith("--"):
        raise ValueError(f"COPY {sources[0]} is not known here")
    allowed = set(context())
    to = root / str(Path(directory, target)).lstrip("/")
    for source in sources:
        files = [path for path in allowed if path == Path(source) or Path(source) in path.parents]
        if not files:
            raise FileNotFoundError(f"COPY {source}: .dockerignore lets nothing of it through")
        for file in files:
            # A file goes into a directory that is written with a slash; of a directory its content is copied.
            inner = file.relative_to(source) if file != Path(source) else Path(file.name)
            place = to / inner if target.endswith("/") or file != Path(source) else to
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, place)


def _run(
    value: str,
    shell: list[str],
    directory: str,
    root: Path,
    environment: Mapping[str, str],
    scratch: Path,
    stages: Mapping[str, Stage],
    arguments: Mapping[str, str],
) -> None:
    mounts: list[tuple[Path, str]] = []
    while found := re.match(r"--mount=(\S+)\s+", value):
        options = dict(option.split("=", 1) for option in found[1].split(","))
        if options.pop("type") != "bind" or options.keys() != {"from", "source", "target"}:
            raise ValueError(f"RUN --mount={found[1]} is not known here")
        source = _stage_root(options["from"], stages, scratch, arguments) / options["source"].lstrip("/")
        mounts.append((source, options["target"]))
        value = value[found.end() :]
    # What this machine's pip is set up with is lent for the step, and no part of the image.
    lent = {name: text for name, text in os.environ.items() if name.startswith("PIP_")}
    certificates = Path(lent.pop("PIP_CERT", os.environ.get("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt")))
    if certificates.is_file():
        lent["PIP_CERT"] = _LENT
        mounts.append((certificates, _LENT))
    if (wheels := Path(lent.get("PIP_FIND_LINKS", ""))).is_absolute():
        mounts.append((wheels, str(wheels)))
    in_root([*shell, f"cd {shlex.quote(directory)} && {value}"], root, mounts, {**lent, **environment})


def in_root(command: list[str], root: Path, mounts: list[tuple[Path, str]], environment: Mapping[str, str]) -> None:
    """Run a command in a root, with /proc, /dev and mounts that go when it ends."""
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
    try:
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "/bin/bash", "-c", "\n".join(lines)]
        done = subprocess.run(
            unshare, env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode:
            raise StepFailed(f"status {done.returncode}: {shlex.join(command)}\n{done.stdout}")
    finally:
        for place in made:
            place.rmdir() if place.is_dir() else place.unlink()
