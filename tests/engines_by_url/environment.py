"""Dynamo in an environment of its own: `python -m tests.engines_by_url.environment DIRECTORY` installs it, once."""

from __future__ import annotations

import sys
from pathlib import Path

from tests import install

REQUIREMENTS = Path(__file__).with_name("requirements-dynamo.txt")


def main(directory: Path) -> None:
    stamp = directory / ".installed"
    wanted = REQUIREMENTS.read_text()
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    install.environment(directory, "--no-deps", "--requirements", str(REQUIREMENTS))
    stamp.write_text(wanted)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
