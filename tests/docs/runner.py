"""Runs the blocks of a page in its own directory and one shell, against servers on free ports.

The demo model runs as a reader starts it, in the precision that its engine chooses for this CPU.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.deploy.local.servers import local_process
from tests.docs.blocks import Block, Command, Server, difference, json_difference, parse
from tests.docs.pages import ROOT
from tests.environment import clean_environment
from tests.servers import free_port, serve

LIMIT = 120.0
"""Seconds for a command of a console block, or for a whole other block."""

LINKED = ("docs", "examples", "serving.properties")
"""What commands of a page find in their directory, as in the repository."""

SERVER, EMULATOR = "8080", "8081"
"""The ports that pages name."""

TOOLCHAINS = ("node", "java", "go")
"""Programs that only CI must have: elsewhere blocks that need a missing one are left out."""

AT_NIGHT = "go"
"""Compiles its own library at first, which takes as much as all other blocks of the page."""

_AWS = {
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_ACCESS_KEY_ID": "x",
    "AWS_SECRET_ACCESS_KEY": "x",
}
_ADDRESS = re.compile(r"(127\.0\.0\.1|localhost):(\d+)")

# A page is one terminal: the variables that a command sets, and where it goes, are kept in the file $1.
_SHELL = """. "$1"; set -a; trap 'export -p > "$1"' EXIT; cd "$PWD"; eval "$2"
"""


class Started(NamedTuple):
    """A server: its port for each port that pages name, and variables for its clients."""

    ports: dict[str, str]
    variables: dict[str, str]


class Servers:
    """Servers by kind and arguments, each started when a block first needs it."""

    def __init__(self, demo_model: Path, directory: Path, stack: contextlib.ExitStack) -> None:
        self._demo_model = str(demo_model)
        self._directory = directory
        self._stack = stack
        self._shared: dict[Server, Started] = {}

    def shared(self, server: Server) -> Started:
        server = server._replace(line=0)
        if server not in self._shared:
            self._shared[server] = self._stack.enter_context(self.serving(server, self._directory))
        return self._shared[server]

    @contextlib.contextmanager
    def serving(self, server: Server, directory: Path) -> Iterator[Started]:
        """Start a server of a page's own in a directory."""
        if server.kind == "aws":
            from tests.deploy.local.servers import for_readers

            with for_readers(directory, self._demo_model) as variables:
                yield Started({}, variables)
            return
        model = () if "--engine" in server.arguments else (self._demo_model,)
        if server.kind == "emulator":
            port = free_port()
            arguments = (*model, "--container-port", str(port), *server.arguments)
            with local_process(*arguments, directory=directory) as local:
                ports = {EMULATOR: local.url.rpartition(":")[2], SERVER: str(port)}
                yield Started(ports, {"AWS_ENDPOINT_URL": local.url, **_AWS})
            return
        engine = ("--engine", "echo") if server.kind == "echo" else model
        with serve(*engine, *server.arguments, directory=directory) as started:
            started.wait_ready()
            yield Started({SERVER: str(started.port)}, {})


class Done(NamedTuple):
    """`status` is None for a command that was ended after LIMIT."""

    status: int | None
    output: str


class PageRun:
    """One page: its directory, its shell's variables, its server.

    Args:
        stack: stops the servers that are this page's alone: those that may read its files.
    """

    def __init__(self, directory: Path, servers: Servers, stack: contextlib.ExitStack) -> None:
        self.failures: list[str] = []
        self._directory = directory / "page"
        self._directory.mkdir()
        for name in LINKED:
            (self._directory / name).symlink_to(ROOT / name)
        self._variables = directory / "variables"
        self._variables.write_text(f"declare -x PWD={shlex.quote(str(self._directory))}\n")
        self._servers, self._stack = servers, stack
        self._server: Server | None = None  # to be started
        self._ports: dict[str, str] = {}
        self._has_files = False
        self._before: Done | None = None

    def run(self, text: str) -> None:
        for item in parse(text).items:
            if isinstance(item, Server):
                self._server, self._ports = item, {}
            elif item.file:
                self._write(item)
            elif item.output:
                self._compare_output(item)
            else:
                self._before = self._run_block(item) if item.runs else None

    def _write(self, block: Block) -> None:
        path = self._directory / block.file
        text = self._with_ports(block.text)
        if path.is_symlink():
            path.unlink()  # the repository's file stays as it is
        path.parent.mkdir(parents=True, exist_ok=True)
        assert path.resolve().is_relative_to(self._directory.resolve()), f"{block.line}: {path} is the repository's"
        path.write_text(f"{text}\n")
        self._has_files = True

    def _run_block(self, block: Block) -> Done | None:
        match block.language:
            case "console":
                return [self._run_command(command) for command in block.commands][-1]
            case "python":  # lines of a traceback are those of the page
                text = shlex.join([sys.executable, "-c", "\n" * block.line + block.text])
            case "js" if _is_left_out("node"):
                return None
            case "js":
                text = shlex.join(["node", "--input-type=module", "-e", block.text])
            case _:
                text = f"set -e\n{block.text}"
        done = self._execute(text)
        if done.status != 0:
            self._fail(block.line, f"exit status {done.status}\n{done.output}")
        return done

    def _run_command(self, command: Command) -> Done:
        if _is_left_out(command.text.split()[0]):
            return Done(0, command.output)
        done = self._execute(command.text)
        if done.status is None or (done.status and not command.output):
            self._fail(command.line, f"exit status {done.status}\n{done.output}")
        elif command.output and (diff := difference(command.output, done.output)):
            self._fail(command.line, f"{command.text}\n{diff}")
        return done

    def _compare_output(self, block: Block) -> None:
        if self._before is not None:
            compare = json_difference if block.language == "json" else difference
            if diff := compare(block.text, self._before.output):
                self._fail(block.line, diff)

    def _fail(self, line: int, what: str) -> None:
        self.failures.append(f"{line}: {what}")

    def _execute(self, text: str) -> Done:
        """Run a command, and end whatever it has started."""
        if self._server and self._server.kind in ("emulator", "aws"):  # a client of AWS names no port
            self._start()
        command = ["bash", "-c", _SHELL, "bash", str(self._variables), self._with_ports(text)]
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command,
                cwd=self._directory,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            status: int | None = None
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(LIMIT)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            return Done(status, self._as_in_the_page(output.read().decode(errors="replace")))

    def _with_ports(self, text: str) -> str:
        """Replace the ports that a page names, by those of its server, which is started if needed."""
        if {port for _, port in _ADDRESS.findall(text)} & {SERVER, EMULATOR}:
            self._start()
        return _ADDRESS.sub(lambda found: f"{found[1]}:{self._ports.get(found[2], found[2])}", text)

    def _as_in_the_page(self, output: str) -> str:
        names = {port: name for name, port in self._ports.items()}
        return _ADDRESS.sub(lambda found: f"{found[1]}:{names.get(found[2], found[2])}", output)

    def _start(self) -> None:
        if self._server is None:
            return
        server, self._server = self._server, None
        reads_page = any(argument.endswith("=.") for argument in server.arguments)
        if self._has_files or reads_page or server.kind == "aws":  # what a page makes there is its own
            started = self._stack.enter_context(self._servers.serving(server, self._directory))
        else:
            started = self._servers.shared(server)
        self._ports = started.ports
        with self._variables.open("a") as file:
            file.writelines(f"declare -x {name}={shlex.quote(value)}\n" for name, value in started.variables.items())


def _is_left_out(program: str) -> bool:
    if program == AT_NIGHT and os.environ.get("WITHOUT_NIGHTLY"):
        return True
    missing = program in TOOLCHAINS and shutil.which(program) is None
    assert not (missing and os.environ.get("CI") == "true"), f"{program} is missing"
    return missing


def _environment() -> dict[str, str]:
    kept = clean_environment()
    path = f"{Path(sys.executable).parent}:{kept['PATH']}"
    kept["HF_HUB_OFFLINE"] = "1"  # a test does not ask the real one
    return {**kept, "AWS_EC2_METADATA_DISABLED": "true", "PATH": path, "PYTHONPATH": str(ROOT)}
