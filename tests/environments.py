"""Install the environments of test-clients, test-python and accept-vllm: `python -m tests.environments .venv`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.accept import python_versions, vllm_environment
from tests.clients import toolchains
from tests.examples import kubernetes_environment


def main(prefix: str) -> None:
    for name in toolchains.environments():
        try:
            print(toolchains.python(name), flush=True)
        except toolchains.Unavailable as error:
            print(error, flush=True)
    print(kubernetes_environment.python(), flush=True)
    builds = (toolchains.claude_code, toolchains.codex, toolchains.opencode)
    for build in (toolchains.node_modules, *builds, toolchains.java_classpath):
        try:
            build()
        except toolchains.Unavailable as error:
            print(error, flush=True)
    if not os.environ.get("WITHOUT_NIGHTLY"):
        for version in python_versions.LEFT_TO_ANOTHER:
            print(*python_versions.environment(Path(f"{prefix}-{version}"), version), flush=True)
    vllm_environment.main(Path(f"{prefix}-vllm"))


if __name__ == "__main__":
    main(sys.argv[1])
