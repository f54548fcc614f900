"""AWS for the commands of docs/, as a reader has it: what `lmi deploy local --aws` prints, and AWS's command line."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.deploy.local.processes import LocalProcess
from tests.install import environment
from tests.servers import PATIENCE, wait_for

_NOWHERE = "http://127.0.0.1:9"
_END = "Ctrl-C ends it"


@contextlib.contextmanager
def rehearsal(directory: Path, *arguments: str) -> Iterator[tuple[LocalProcess, dict[str, str]]]:
    """Start it; yield it with the variables that it tells to export."""
    local = LocalProcess("--aws", *arguments, directory=directory)
    try:

        def ready() -> bool:
            assert local.process.poll() is None, local.log
            return _END in local.out

        wait_for(ready, PATIENCE, "the rehearsal does not start")
        lines = re.findall(r"^export (\w+)=(.*)$", local.out, re.MULTILINE)
        yield local, {name: shlex.split(value)[0] for name, value in lines}
    finally:
        local.end()


@contextlib.contextmanager
def for_readers(directory: Path, *arguments: str) -> Iterator[dict[str, str]]:
    """Start a rehearsal, and install AWS's command line beside it; yield a reader's variables."""
    commands = environment(directory / "awscli", "awscli").parent
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:{commands}"
    with rehearsal(directory, *arguments) as (_, variables):
        yield {
            **variables,
            "PATH": path,
            "AWS_PAGER": "",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "HF_HUB_OFFLINE": "1",
            "HTTPS_PROXY": _NOWHERE,
        }
