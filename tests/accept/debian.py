"""A Debian root in a directory: for a newer Python, another architecture or a container image. Needs root, debootstrap.

Commands run in it with this checkout and `sys.prefix` at the same paths. A virtual environment that is created there
has the same path outside, but works only inside the root.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
_SUITE = "sid"
"""The suite that has the newest Python."""

_OURS = ("etc/resolv.conf", "etc/hosts", "etc/ssl/certs/ca-certificates.crt")
"""Files of this system that programs need to reach a network, perhaps by a proxy with a certificate of its own."""

_UNLIKE = ("PIP_FIND_LINKS", "PYTHONPATH", "VIRTUAL_ENV")
"""Variables that name paths of this system."""


class Unavailable(Exception):
    """This machine cannot make such a Debian."""


def make(directory: Path, version: str) -> None:
    """Create the Debian with Python `version`, unless it is there.

    Raises:
        Unavailable: the machine lacks what that needs, or the suite lacks this Python.
    """
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        raise Unavailable(f"Python {version} is not on PATH; to take it from Debian, run as root, with debootstrap")
    if (directory / "usr/bin" / f"python{version}").exists():
        return
    shutil.rmtree(directory, ignore_errors=True)
    packages = [f"python{version}", f"python{version}-venv", "ca-certificates", "procps", "make", "git"]
    bootstrap(directory, _SUITE, packages)
    for name in _OURS:
        shutil.copyfile(Path("/") / name, directory / name)


def bootstrap(directory: Path, suite: str, packages: Sequence[str] = (), *options: str) -> None:
    """Create a smallest Debian of a suite, and `packages` in it.

    Raises:
        Unavailable: debootstrap has failed.
    """
    included = [f"--include={','.join(packages)}"] if packages else []
    command = ["debootstrap", "--variant=minbase", *options, *included, suite, str(directory), *_mirror()]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise Unavailable(f"debootstrap ended with status {done.returncode}:\n{done.stdout[-2000:]}")


def unpack(directory: Path, suite: str, architecture: str, packages: Sequence[str]) -> None:
    """Unpack a smallest Debian of another architecture, and `packages`: none of their programs is run.

    Raises:
        Unavailable: debootstrap has failed.
    """
    shutil.rmtree(directory, ignore_errors=True)
    bootstrap(directory, suite, packages, "--foreign", f"--arch={architecture}")
    for package in (directory / "var/cache/apt/archives").glob("*.deb"):
        extract(package, directory)
    if (directory / "proc").is_symlink():  # debootstrap's, to /proc
        (directory / "proc").unlink()
    shutil.copyfile(directory / "usr/share/base-passwd/passwd.master", directory / "etc/passwd")
    for name in _OURS:
        shutil.copyfile(Path("/") / name, directory / name)


def extract(package: Path, directory: Path) -> None:
    """Extract a package into a directory. Links to directories are kept, not replaced."""
    shown = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE, check=True).stdout
    command = ["tar", "--extract", "--keep-directory-symlink", "--directory", str(directory)]
    subprocess.run(command, input=shown, check=True)


def _mirror() -> list[str]:
    """This system's own mirror of Debian, if it is a Debian."""
    sources = Path("/etc/apt/sources.list.d/debian.sources")
    lines = sources.read_text().splitlines() if sources.is_file() else []
    return [line.split()[1] for line in lines if line.startswith("URIs:")][:1]


def command(directory: Path, *arguments: str) -> list[str]:
    """The command that runs `arguments`, and what is added to it, there, in this checkout. Its mounts end with it."""
    places = {"/proc": "--rbind", "/dev": "--rbind", str(ROOT): "--bind", sys.prefix: "--bind"}
    mounts = [
        f"mkdir -p {shlex.quote(f'{directory}{place}')} && mount {how} {place} {shlex.quote(f'{directory}{place}')}"
        for place, how in places.items()
    ]
    unset = [f"--unset={name}" for name in _UNLIKE]
    path = "PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    inside = f'cd {shlex.quote(str(ROOT))} && exec "$@"'
    entered = shlex.join(["env", *unset, path, "chroot", str(directory), "sh", "-c", inside, "sh"])
    return ["unshare", "--mount", "sh", "-c", " && ".join([*mounts, f'exec {entered} "$@"']), "sh", *arguments]
