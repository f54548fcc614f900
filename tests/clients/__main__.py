"""Create the environments of all clients: `make environments`."""

from __future__ import annotations

from tests.clients import toolchains, venvs
from tests.examples import kubernetes_environment

if __name__ == "__main__":
    for name in venvs.environments():
        print(venvs.python(name), flush=True)
    print(kubernetes_environment.python(), flush=True)
    for build in (toolchains.node_modules, toolchains.claude_code, toolchains.codex, toolchains.java_classpath):
        try:
            build()
        except toolchains.Unavailable as error:
            print(error, flush=True)
