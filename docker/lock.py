"""Write the hashes of constraints-cpu.txt: `python docker/lock.py`, with pip and PyPI, after a version has changed.

Each package has one: that of the wheel for the cpu image's Python and Debian (amd64). pip then installs nothing else.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

FILE = Path(__file__).with_name("constraints-cpu.txt")
PYTHON, GLIBC = "3.11", 36  # Debian 12's
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC, 4, -1)] + ["manylinux2014_x86_64", "linux_x86_64"]


def main() -> None:
    lines = FILE.read_text().splitlines()
    head = [line for line in lines if line.startswith("#")]
    pins = [line.split()[0] for line in lines if line and not line.startswith(("#", " "))]
    hashes = _hashes(pins)
    body = [f"{pin} \\\n    --hash=sha256:{hashes[_plain(pin)]}" for pin in pins]
    FILE.write_text("\n".join([*head, *body, ""]))


def _hashes(pins: list[str]) -> dict[str, str]:
    """Ask pip which file it would install for each pin."""
    platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
        command += ["--only-binary=:all:", "--python-version", PYTHON, *platforms, "--target", scratch]
        subprocess.run([*command, "--report", str(report), *pins], check=True)
        found = json.loads(report.read_text())["install"]
    return {
        _plain(f"{item['metadata']['name']}=={item['metadata']['version']}"): item["download_info"]["archive_info"][
            "hashes"
        ]["sha256"]
        for item in found
    }


def _plain(pin: str) -> str:
    name, _, version = pin.partition("==")
    return f"{name.lower().replace('_', '-').replace('.', '-')}=={version}"


if __name__ == "__main__":
    main()
