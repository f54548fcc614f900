"""The wheel: it holds all that the packages need, and serves the pages where it is installed, without a checkout."""

from __future__ import annotations

import email
import functools
import http.server as http_server
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.environment import clean_environment
from tests.install import UV, environment
from tests.release import distributions, provenance
from tests.release.checkout import clone
from tests.servers import http, serve

ROOT = Path(__file__).parents[2]
OWN = {
    *("backports_zstd", "cryptography", "javaproperties", "orjson", "prometheus_client", "python_multipart"),
    *("starlette", "uvicorn", "httptools", "uvloop", "websockets"),
}
NEEDED = (  # by the wheel without extras, and by what that needs; some on some versions of Python only
    *OWN - {"backports_zstd"},
    "backports",
    *("anyio", "click", "exceptiongroup", "h11", "idna", "six.py", "sniffio", "typing_extensions.py"),
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of the source distribution, and that of a copy: a build leaves its own files behind."""
    copy, into = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("handler", "deploy", "proof"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("LICENSE", "pyproject.toml", "README.md", "lmi_handler.py"):
        shutil.copy(ROOT / name, copy)
    _run(sys.executable, "-m", "uv", "build", "--quiet", "--out-dir", str(into), str(copy))
    [found] = into.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel; what it needs comes from this one, which has our checkout, but not that."""
    directory = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    found = directory / "bin" / "python"
    _pip("--python", str(found), "install", "--no-deps", "--no-index", str(wheel))
    [packages] = directory.glob("lib/python*/site-packages")
    (packages / "needs.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return found


def _pip(*arguments: str) -> None:
    _run(sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_holds_every_file_of_the_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        named = archive.namelist()
    assert "lmi_handler.py" in named
    held = {name for name in named if name.startswith(("handler/", "deploy/", "proof/"))}
    files = [path for name in ("handler", "deploy", "proof") for path in (ROOT / name).rglob("*") if path.is_file()]
    files = [path for path in files if path.suffix not in (".md", ".pyc") or path.name == "SKILL.md"]
    assert held == {path.relative_to(ROOT).as_posix() for path in files}


def test_the_source_distribution_holds_what_the_wheel_is_built_of(wheel: Path) -> None:
    [source] = wheel.parent.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as found:
        built = {name for name in found.namelist() if ".dist-info/" not in name}
    assert held == built | {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of one commit, of the files as they are now."""
    return clone(tmp_path_factory.mktemp("checkout"))


def test_two_builds_of_a_commit_are_equal_under_any_umask(checkout: Path, tmp_path: Path) -> None:
    built = []
    for umask in (0o022, 0o077):
        copy = tmp_path / f"{umask:o}"
        subprocess.run(["git", "clone", "--quiet", str(checkout), str(copy)], umask=umask, check=True)
        (copy / "handler" / "left_over.py").touch()
        command = [sys.executable, "-m", "tests.release.distributions", "dist"]
        done = subprocess.run(command, cwd=copy, umask=umask, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        built.append({Path(name).name: (copy / name).read_bytes() for name in done.stdout.split()})
    assert {Path(name).suffix for name in built[0]} == {".whl", ".gz"}
    assert built[0] == built[1]


def test_the_distributions_are_of_the_commit_and_say_it(checkout: Path, tmp_path: Path) -> None:
    (checkout / "README.md").write_text("not committed")
    wheel, source = distributions.build(checkout, tmp_path)
    commit = distributions.head(checkout)
    tracked = distributions.git(checkout, "ls-files", "handler", "deploy", "proof", "lmi_handler.py").decode()
    files = {name for name in tracked.splitlines() if not name.endswith(".md") or name.endswith("/SKILL.md")}
    files.add(distributions.COMMIT)
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == files
        assert archive.read(distributions.COMMIT).decode() == f"{commit}\n"
        archive.extract("handler/__init__.py", tmp_path)
        archive.extract(distributions.COMMIT, tmp_path)
    with tarfile.open(source) as sources:
        root = source.name.removesuffix(".tar.gz")
        beside = {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml", ".gitignore"}
        assert {*sources.getnames()} == {f"{root}/{name}" for name in files | beside}
        page = sources.extractfile(f"{root}/README.md")
        assert page is not None
        assert page.read().startswith(b"# ")
    command = [sys.executable, "-c", "import handler; print(handler.__commit__)"]
    assert subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True).stdout == f"{commit}\n"


def test_it_and_the_source_distribution_have_the_license(wheel: Path) -> None:
    text = (ROOT / "LICENSE").read_bytes()
    with zipfile.ZipFile(wheel) as archive:
        [licensed] = [name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
        assert archive.read(licensed) == text
        [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        fields = email.message_from_bytes(archive.read(metadata))
    assert (fields["License-Expression"], fields.get_all("License-File")) == ("Apache-2.0", ["LICENSE"])
    classifiers = fields.get_all("Classifier", [])
    versions = {name.rpartition(" ")[2] for name in classifiers if re.search(r":: 3\.\d+$", name)}
    assert versions == {"3.10", "3.11", "3.12", "3.13", "3.14"}
    assert not any(name.startswith("License ::") for name in classifiers), "the expression takes their place"
    [source] = wheel.parent.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        [member] = [one for one in archive.getmembers() if one.name.count("/") == 1 and one.name.endswith("/LICENSE")]
        held = archive.extractfile(member)
        assert held is not None
        assert held.read() == text


@pytest.fixture(scope="module")
def bare(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel without any package beside it but those that it always needs."""
    directory = tmp_path_factory.mktemp("bare")
    [packages] = python.parents[1].glob("lib/python*/site-packages")
    for name in ("lmi_handler.py", "handler", "deploy", "proof", *(path.name for path in packages.glob("*.dist-info"))):
        (directory / name).symlink_to(packages / name)
    for name in NEEDED:
        if (source := Path(sysconfig.get_path("purelib")) / name).exists():
            (directory / name).symlink_to(source)
    return directory


def _run_bare(python: Path, bare: Path, arguments: tuple[str, ...], cwd: Path) -> subprocess.CompletedProcess[str]:
    return _call_bare(python, bare, f"from handler.cli import main; sys.exit(main({[*arguments]!r}))", cwd)


def _call_bare(python: Path, bare: Path, call: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    script = f"import sys; sys.path.append({str(bare)!r}); {call}"
    command = [str(python), "-I", "-S", "-c", script]
    return subprocess.run(command, cwd=cwd, env=clean_environment(), capture_output=True, text=True)


@pytest.mark.parametrize(
    "arguments",
    [
        *(("--version",), ("--help",), ("conform", "--list"), ("bench", "--help"), ("replay", "--help"), ("options",)),
        *(("move", "--help"), ("skill", "install", "claude")),
    ],
)
def test_its_commands_need_no_extra(python: Path, bare: Path, arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = _run_bare(python, bare, arguments, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_it_requires_no_package_but_these(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        required = email.message_from_bytes(archive.read(metadata)).get_all("Requires-Dist", [])
    names = [re.split(r"[^\w-]", line)[0] for line in required if "extra ==" not in line]
    assert {name.replace("-", "_") for name in names} == OWN


def test_it_reads_files_without_an_extra(python: Path, bare: Path, tmp_path: Path) -> None:
    """Those of batches, which any engine answers."""
    form = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'
    call = f"from handler.serving.forms import read_form; print(read_form({form!r}, 'multipart/form-data; boundary=b'))"
    done = _call_bare(python, bare, call, tmp_path)
    assert (done.stdout, done.stderr) == ("{'purpose': 'batch'}\n", "")


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (("serve", "--check", "--engine", "openvino"), "cpu"),
        (("serve", "--check", "--engine", "openai", "-o", "option.base_url=http://127.0.0.1:9"), "openai"),
        (("deploy", "plan", "none.yaml"), "deploy"),
    ],
)
def test_its_messages_name_what_its_user_has(
    python: Path, bare: Path, arguments: tuple[str, ...], extra: str, tmp_path: Path
) -> None:
    """An extra is named by the wheel's own name."""
    done = _run_bare(python, bare, arguments, tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode, said
    assert f"pip install 'lmi-handler[{extra}] @ file:///" in said
    assert "lmi-handler's directory" not in said


def test_it_serves_the_pages(python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    command = [str(python), "-c", "import handler; print(handler.__file__)"]
    where = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert where.startswith(str(python.parents[1]))
    with serve("--engine", "echo", python=str(python)) as server:
        for page in ("/", "/docs"):
            found = http.get(server.url + page, headers={"accept": "text/html"})
            assert found.status_code == 200
            assert "<title>" in found.text
        static = ROOT / "handler" / "http" / "static"
        for path in static.rglob("*"):
            if path.suffix in (".js", ".css", ".svg"):
                found = http.get(f"{server.url}/page/{path.relative_to(static).as_posix()}")
                assert found.content == path.read_bytes(), path.name


def test_its_programs_run(python: Path, tmp_path: Path) -> None:
    for arguments in (["--version"], ["deploy", "schema"]):
        command = [str(python.with_name("lmi")), *arguments]
        environment = {name: value for name, value in clean_environment().items() if name != "PYTHONPATH"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout


@pytest.fixture(scope="module")
def index(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a package index on loopback, which has the wheel and the source distribution, and nothing else."""
    directory = tmp_path_factory.mktemp("index")
    project = directory / "simple" / "lmi-handler"
    project.mkdir(parents=True)
    links = []
    for path in (wheel, *wheel.parent.glob("*.tar.gz")):
        shutil.copy(path, project)
        links.append(f'<a href="{path.name}#sha256={provenance.sha256(path)}">{path.name}</a>')
    (project / "index.html").write_text(f"<!doctype html><html><body>{' '.join(links)}</body></html>")
    handler = functools.partial(_Quiet, directory=str(directory))
    with http_server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/simple"
        server.shutdown()


class _Quiet(http_server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        pass


def _by_uvx(index: str, directory: Path) -> list[str]:
    uvx = str(UV.with_name("uvx"))
    given = ["--python", sys.executable, "--index", index, "--refresh-package", "lmi-handler"]
    return [uvx, *given, "--from", "lmi-handler[cpu]", "lmi"]


_OF_BOTH = "--only-binary lmi-handler --extra-index-url"
"""pip takes the newest of all indexes, which may be a stranger's: a wheel runs no code before the test has looked."""


def _by_pip(index: str, directory: Path) -> list[str]:
    _run(sys.executable, "-m", "venv", str(directory / "environment"))
    bin = directory / "environment" / "bin"
    _run(str(bin / "pip"), "install", "--quiet", *_OF_BOTH.split(), index, "lmi-handler[cpu]")
    return [str(bin / "lmi")]


def _by_pip_from_source(index: str, directory: Path) -> list[str]:
    given = ["--index", index, "--no-binary", "lmi-handler", "--refresh-package", "lmi-handler"]
    return [str(environment(directory / "environment", *given, "lmi-handler[cpu]").with_name("lmi"))]


def _by_pipx(index: str, directory: Path) -> list[str]:
    pipx = [str(UV), "tool", "run", "--python", sys.executable, "pipx"]
    _run(*pipx, "install", "--python", sys.executable, f"--pip-args={_OF_BOTH} {index}", "lmi-handler[cpu]")
    return [str(directory / "bin" / "lmi")]


def _sources(wheel: Path) -> set[str]:
    """Return the lines of a wheel's RECORD about its sources: their names, digests and sizes."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
        return {line for line in archive.read(name).decode().splitlines() if ".dist-info/" not in line}


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "install",
    [
        pytest.param(_by_uvx, id="uvx"),
        pytest.param(_by_pip, id="pip", marks=pytest.mark.nightly),
        pytest.param(_by_pip_from_source, id="sdist", marks=pytest.mark.nightly),
        pytest.param(_by_pipx, id="pipx", marks=pytest.mark.nightly),
    ],
)
def test_a_user_installs_it_and_the_demo_model_answers(
    install: Callable[[str, Path], list[str]], index: str, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From an index, with all that it needs and nothing of ours, outside of the repository: `lmi serve` alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("PIPX_HOME", str(tmp_path / "pipx"))
    monkeypatch.setenv("PIPX_BIN_DIR", str(tmp_path / "bin"))
    python, *program = install(index, tmp_path)
    for record in tmp_path.rglob("lmi_handler-*.dist-info/RECORD"):
        assert _sources(wheel) <= {*record.read_text().splitlines()}, "it is another package"
    with serve(python=python, program=program, seconds=500) as server:
        assert "loading the demo model with openvino" in server.log
        body = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 2}}
        answer = http.post(server.url + "/invocations", json=body)
        assert (answer.status_code, answer.json()) == (200, {"generated_text": " Paris."})
