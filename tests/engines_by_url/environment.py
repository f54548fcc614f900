"""Dynamo in an environment of its own: `python -m tests.engines_by_url.environment DIRECTORY` installs it, once.

The package's own requirements include one that cannot be installed; these are what its front end and a worker import.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests import install

VERSION = "1.6.1"
OWN = (f"ai-dynamo=={VERSION}", f"ai-dynamo-runtime=={VERSION}")
NEEDS = (
    "uvloop", "pydantic<=2.13.5", "msgspec", "pyyaml", "aiohttp", "prometheus-client", "pyzmq", "packaging", "certifi",
    "typing-extensions",
)  # fmt: skip


def main(directory: Path) -> None:
    stamp = directory / ".installed"
    wanted = " ".join((*OWN, *NEEDS))
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    python = install.environment(directory, "--no-deps", *OWN)
    install.packages("--python", str(python), *NEEDS)
    stamp.write_text(wanted)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
