"""Node's and Java's packages for the clients that are theirs, each fetched once into the user's cache.

As `venvs.py` has Python's: built again when what is wanted of them changes.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from handler.config.model_files import cache_directory
from tests.clients.venvs import built_once

NPM = Path(__file__).parent / "npm"
CODING_AGENTS = NPM / "coding-agents"
JAVA = Path(__file__).parent / "java"


class Unavailable(Exception):
    """This machine lacks a program, for the reason given."""


def node_modules(folder: Path = NPM) -> Path:
    """The packages of the folder's package-lock.json."""
    require("node", "nodejs npm")
    require("npm", "nodejs npm")
    files = [folder / name for name in ("package.json", "package-lock.json")]

    def build(directory: Path) -> None:
        for file in files:
            shutil.copy(file, directory)
        _run("npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(directory))

    return _built(folder.name, files, build) / "node_modules"


def claude_code() -> Path:
    """Claude Code's program."""
    return _program("@anthropic-ai/claude-code-*/claude")


def codex() -> Path:
    """Codex' program."""
    return _program("@openai/codex-*/vendor/*/bin/codex")


def _program(pattern: str) -> Path:
    found = [*node_modules(CODING_AGENTS).glob(pattern)]
    if not found:
        raise Unavailable(f"npm has no {pattern} for this platform")
    return found[0]


def java_classpath() -> str:
    """The jars of java/pom.xml, and the compiled client."""
    require("java", "default-jdk-headless maven")
    require("mvn", "default-jdk-headless maven")

    def fetch(directory: Path) -> None:
        goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={directory}"]
        _run("mvn", "-q", "-B", "-f", str(JAVA / "pom.xml"), *goal)

    jars = _built("java", [JAVA / "pom.xml"], fetch)
    classpath = ":".join(str(jar) for jar in sorted(jars.glob("*.jar")))
    sources = sorted(JAVA.glob("*.java"))

    def compile(directory: Path) -> None:
        if "jdk.compiler@" not in _run("java", "--list-modules"):
            raise Unavailable("the java on PATH has no compiler (Debian: apt install default-jdk-headless)")
        javac = ["java", "-m", "jdk.compiler/com.sun.tools.javac.Main", "-Xlint:all", "-Werror"]
        _run(*javac, "-cp", classpath, "-d", str(directory), *map(str, sources))

    return f"{_built('classes', [JAVA / 'pom.xml', *sources], compile)}:{classpath}"


def _built(name: str, sources: list[Path], build: Callable[[Path], None]) -> Path:
    key = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    return built_once(cache_directory() / "toolchains" / f"{name}-{key}", build)


def require(program: str, packages: str) -> None:
    """Raise Unavailable where a program is missing; `packages` are Debian's that have it."""
    if not shutil.which(program):
        raise Unavailable(f"there is no {program} on PATH (Debian: apt install {packages})")


def _run(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert not done.returncode, f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout[-4000:]}"
    return done.stdout
