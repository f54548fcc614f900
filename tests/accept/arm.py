"""Run tests on Arm Linux, emulated by Debian's qemu: `python -m tests.accept.arm DIRECTORY`, and pytest's arguments.

Needs root, debootstrap, apt and Linux 6.7: only the user namespace of the tests knows of the emulator, which is
unpacked, not installed. An emulated program takes ten times as long and more; the hardware has another memory model.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests import install
from tests.accept import debian
from tests.conftest import QUICK

ROOT = Path(__file__).parents[2]
SUITE, PYTHON = "bookworm", "3.11"  # the cpu image's
TESTS = ("tests/unit/core", "tests/unit/scheduler", "tests/unit/http", "tests/app/test_http.py")
_WHEELS = ("--python-platform", "aarch64-manylinux_2_35", "--python-version", PYTHON, "--only-binary", ":all:")
_REGISTER = (  # `F`: the emulator is opened here, for programs in any root
    "mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc && "
    r"printf '%s' ':aarch64:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
    r":\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:'"
    r'''"$0:F" > /proc/sys/fs/binfmt_misc/register && exec "$@"'''
)


def main(directory: Path, *arguments: str) -> int:
    emulator, root = directory / "usr/bin/qemu-aarch64-static", directory / "debian"
    packages = "/opt/packages"
    directory.mkdir(parents=True, exist_ok=True)
    if not emulator.exists():
        subprocess.run(["apt-get", "download", "qemu-user-static"], cwd=directory, check=True)
        debian.extract(next(directory.glob("*.deb")), directory)
    if not (root / "usr/bin" / f"python{PYTHON}").exists():
        debian.unpack(root, SUITE, "arm64", ["python3", "procps", "ca-certificates"])
    wanted = ("-r", str(ROOT / "pyproject.toml"), "--extra", "cpu", "--extra", "dev", "pip")
    install.packages(*_WHEELS, "--target", f"{root}{packages}", *install.pinned(), *wanted)
    path = f"PYTHONPATH={ROOT}:{packages}"
    pytest = ("python3", "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-profile", "fewest")
    inside = debian.command(root, "env", path, *pytest, "-m", QUICK, *(arguments or TESTS))
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", _REGISTER, str(emulator), *inside]
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]).absolute(), *sys.argv[2:]))
