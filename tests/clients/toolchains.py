"""Python's environments, and Node's and Java's packages, for client libraries: each made once in the user's cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from handler.config.model_files import cache_directory
from tests import install
from tests.accept import python_versions
from tests.djl.jars import QUICK

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


def opencode() -> Path:
    """OpenCode's program, where its package is locked: on Linux with x86-64."""
    return _program("opencode-linux-*/bin/opencode")


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
        javac = ["java", *QUICK, "-m", "jdk.compiler/com.sun.tools.javac.Main", "-Xlint:all", "-Werror"]
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


_HERE = Path(__file__).parent

_BARE = frozenset({"lm-eval", "pytriton"})
"""Installed without what they declare: lm-eval brings half a gigabyte that its model of an API never imports, and of
pytriton only tritonserver is used."""
_NEWER = frozenset({"bidirectional", "bidirectional-2025"})
"""Environments that need a newer Python than the lowest one of ours."""

_NEWER_VERSIONS = ("3.12", "3.13", "3.14")


def python(name: str, folder: Path = _HERE) -> Path:
    """The interpreter of the environment that requirements-{name}.txt in this folder describes."""
    requirements = folder / f"requirements-{name}.txt"
    base = _newer_python() if name in _NEWER else sys.executable
    version = f"{sys.version} {sys.base_prefix}" if base == sys.executable else base
    key = hashlib.sha256(requirements.read_bytes() + version.encode()).hexdigest()[:16]
    directory = built_once(
        cache_directory() / "venvs" / f"{name}-{key}",
        lambda directory: _build(directory, requirements, base, bare=name in _BARE),
    )
    return directory / "bin" / "python"


def _newer_python() -> str:
    if sys.version_info >= (3, 12):
        return sys.executable
    interpreters = filter(None, map(python_versions.interpreter, _NEWER_VERSIONS))
    for interpreter in interpreters:
        return interpreter
    raise Unavailable(f"there is no Python {', '.join(_NEWER_VERSIONS)} on PATH or in pyenv")


def built_once(directory: Path, build: Callable[[Path], object]) -> Path:
    """`directory`, which `build` fills where it is not there yet."""
    complete = directory / ".complete"
    with _alone(directory):
        if not complete.exists():
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
            build(directory)
            complete.touch()  # last: what a killed run leaves behind is not taken for a finished one
    return directory


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Two test runs may want the same environment at the same time; one builds, the other waits for it."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(directory: Path, requirements: Path, base: str, *, bare: bool) -> None:
    dependencies = ["--no-deps"] if bare else []
    install.environment(directory, "--only-binary=:all:", *dependencies, "-r", str(requirements), python=base)


def environments() -> list[str]:
    """The names of all."""
    return sorted(path.stem.removeprefix("requirements-") for path in _HERE.glob("requirements-*.txt"))
