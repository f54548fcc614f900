"""The repository itself: imports go one way, messages name no checkout, and the Makefile's variables work."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import yaml

from tests.one_test import in_one_test

# -- imports go one way; heavy libraries stay where they belong --------------------------------------------------------


ROOT = Path(__file__).parents[2]
HANDLER, DEPLOY, PROOF = (ROOT / name for name in ("handler", "deploy", "proof"))

BELOW_HOSTS = {"__commit__", "__version__", "core", "config", "engines", "scheduler", "protocols", "plugins", "serving"}
OF_HANDLER = {
    "core": set(),
    "config": {"core"},
    "engines": {"core", "config"},
    "scheduler": {"core", "engines.base"},
    "protocols": {"__version__", "core", "config.config"},
    "plugins": {"core", "protocols", "formatters"},
    "formatters": {"plugins"},
    "serving": BELOW_HOSTS - {"serving"},
    "http": BELOW_HOSTS,
    "djl": BELOW_HOSTS,
    "entry": {"djl"},
    "container": {"__version__", "core", "config"},
    "launch": {"core", "config"},
    "models": {"core", "config", "engines", "serving"},
    "skill": {"core", "launch"},
}
"""A package of handler's, and what of handler it may import beside itself; `cli` may import all of it."""

ONLY_IN_HANDLER = {
    "starlette": {"http"},
    "uvicorn": {"http"},
    "websockets": {"http/sockets", "launch"},
    "djl_python": {"djl", "entry"},
    "openvino": {"engines/openvino"},
    "openvino_genai": {"engines/openvino"},
    "gguf": {"engines/openvino"},
    "vllm": {"engines/vllm"},
    "tensorrt_llm": {"engines/trtllm"},
    "transformers": {"engines/huggingface", "engines/openvino/decoder", "engines/structured_output/xgrammar"},
    "huggingface_hub": {"engines/huggingface/files"},
    "prometheus_client": {"serving/metrics"},
    "opentelemetry": {"serving/metrics/tracing"},
    "javaproperties": {"config"},
    "orjson": {"core/framing", "engines/llamacpp", "engines/openai", "protocols/kernel/body"},
    "backports": {"serving/compression"},
    "compression": {"serving/compression"},
    "aiohttp": {"engines/openai", "serving/media"},
    "grpc": {"engines/grpc", "http/grpc"},
    "tritonclient": {"http/grpc", "protocols/triton/grpc"},
    "yarl": {"serving/media"},
    "PIL": {"serving/media/image_decoder", "engines/huggingface/media"},
    "boto3": {"container", "engines/s3"},
    "botocore": {"container", "engines/s3"},
    "s3transfer": {"engines/s3"},
    "rich": {"core/child_processes"},
}
"""A library, and where it may be imported."""

OF_DEPLOY = {
    "errors": set(),
    "redaction": set(),
    "credentials": set(),
    "web_pages": set(),
    "data": set(),
    "service_model": set(),
    "diagnostics": {"data"},
    "aws": {"credentials", "diagnostics", "errors", "web_pages"},
    "spec": {"service_model", "errors"},
    "s3": {"aws", "errors"},
    "resolve": {"service_model", "aws", "data", "errors", "s3.prefix", "spec"},
    "resources": {"errors", "redaction", "resolve.decision", "s3.prefix", "spec"},
    "export": {"errors", "resolve.decision", "resources", "service_model", "spec"},
    "iam": {"aws", "errors", "resolve.decision", "resolve.images", "resources.resource", "s3.prefix", "spec"},
    "preflight": {
        "aws",
        "errors",
        "iam.policies",
        "iam.simulation",
        "resolve.decision",
        "resolve.images",
        "resolve.instances",
        "resolve.model.files",
        "resources.environment",
        "resources.resource",
        "s3",
        "spec",
    },
    "operations": {"aws", "diagnostics", "errors", "resources.resource"},
    "deployer": {
        "service_model",
        "aws",
        "credentials",
        "diagnostics",
        "errors",
        "operations.logs",
        "preflight",
        "resolve",
        "resources",
        "s3",
        "spec",
        "web_pages",
    },
    "adopt": {
        "service_model",
        "aws",
        "data",
        "deployer.calls",
        "errors",
        "iam.policies",
        "redaction",
        "resolve.images",
        "resolve.instances",
        "resources.environment",
        "resources.resource",
        "s3",
        "spec",
    },
    "batch": {
        "service_model",
        "aws",
        "deployer",
        "diagnostics",
        "errors",
        "operations.logs",
        "preflight",
        "resolve.decision",
        "resources",
        "s3",
        "spec",
    },
    "client": {"credentials", "errors", "web_pages"},
    "emulator": {"errors", "operations.logs", "s3.archive", "s3.prefix", "service_model", "spec"},
}
"""A package of deploy's, and what of deploy it may import beside itself; `cli` may import all of it."""

ONLY_IN_DEPLOY = {
    "boto3": {"aws", "client", "emulator"},
    "aiohttp": {"emulator"},
    "pydantic": {"spec"},
    "rich": {"cli"},
    "moto": {"emulator"},
    "werkzeug": {"emulator"},
}


def files(package: Path) -> list[Path]:
    return sorted(package.rglob("*.py"))


@functools.cache
def imports(path: Path, package: str) -> set[str]:
    """Modules by name; of the package itself, `from package.folder import name` counts as package.folder.name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            whole = node.module.split(".")[0] == package and node.module.count(".") < 2
            found |= {f"{node.module}.{name.name}" if whole else node.module for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found


def is_within(target: str, allowed: set[str], separator: str = ".") -> bool:
    return any(target == name or target.startswith(name + separator) for name in allowed)


def misplaced(package: Path, layers: dict[str, set[str]], only_in: dict[str, set[str]], free: set[str]) -> list[str]:
    """Imports that break the rules, as `file: module`; the files in `free` may import anything."""
    wrong = []
    for path in files(package):
        place = path.relative_to(package).with_suffix("")
        here = place.parts[0]
        if here in free or here == "__init__":
            continue
        for module in imports(path, package.name):
            top, _, target = module.partition(".")
            at_home = is_within(place.as_posix(), only_in.get(top, {here}), "/")
            below = top != package.name or is_within(target, layers.get(here, set()) | {here})
            if not (at_home and below):
                wrong.append(f"{place}: {module}")
    return sorted(wrong)


def test_handlers_imports_go_one_way() -> None:
    fail(misplaced(HANDLER, OF_HANDLER, ONLY_IN_HANDLER, {"cli", "__main__"}), "OF_HANDLER, ONLY_IN_HANDLER")


def test_the_page_lists_the_imports_of_each_folder() -> None:
    page = (ROOT / "docs" / "structure.md").read_text()
    listed: dict[str, set[str]] = {}
    for name, words in re.findall(r"^\| `(\w+)(?:/|\.py)` \|.*\| ([^|]+) \|$", page, re.MULTILINE):
        above = [*listed, name][: [*listed].index(words.split()[0]) + 1] if words.endswith(" and above") else [*listed]
        listed[name] = {*above} if words.endswith("above") else {*words.split(", ")} - {"nothing"}
    assert listed.pop("cli") == {"all"}
    rules = {name: OF_HANDLER[name] - {"__commit__", "__version__", "formatters"} for name in OF_HANDLER}
    assert listed == {name: rules[name] for name in rules if name not in ("entry", "formatters")}


WORDS = {
    "Dialect", "Reply", "Delta", "Head", "Host", "Driver", "Holding", "Phase", "Turn", "Gate", "Line", "Notation",
}  # fmt: skip


def test_each_word_of_the_page_has_one_class() -> None:
    """The class that the page names exists, and no other class has the word as its name."""
    page = (ROOT / "docs" / "structure.md").read_text()
    rows = re.findall(r"^\| (\w+) \| [A-Z][^|]*\. \| `(\w+)` in `([\w/]+\.py)` \|$", page, re.MULTILINE)
    assert [word for word, *_ in rows] == list(dict.fromkeys(word for word, *_ in rows))
    assert {word for word, *_ in rows} == WORDS
    classes = {
        (node.name, path)
        for package in (HANDLER, DEPLOY, PROOF)
        for path in files(package)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    for word, name, file in rows:
        path = HANDLER / file
        is_alias = re.search(rf"^{name}: TypeAlias = ", path.read_text(), re.MULTILINE)
        assert (name, path) in classes or is_alias, f"{file} defines no {name}"
        assert {place for defined, place in classes if defined == word} <= {path}, f"{word} has another meaning"


def test_deploys_imports_go_one_way() -> None:
    fail(misplaced(DEPLOY, OF_DEPLOY, ONLY_IN_DEPLOY, {"cli", "__main__"}), "OF_DEPLOY, ONLY_IN_DEPLOY")


def fail(wrong: list[str], rules: str) -> None:
    assert not wrong, "\n".join([f"these imports go another way than {rules} and docs/structure.md say:", *wrong])


def test_layers_have_no_circle() -> None:
    """Whoever adds a line to one of them adds no way back. `formatters` is the public name of a part of `plugins`."""
    for layers in ({**OF_HANDLER, "formatters": set()}, OF_DEPLOY):
        TopologicalSorter({layer: {name.split(".")[0] for name in below} for layer, below in layers.items()}).prepare()


def test_deploy_imports_of_the_handler_only_its_options_and_command_line() -> None:
    used = {module for path in files(DEPLOY) for module in imports(path, "deploy") if module.split(".")[0] == "handler"}
    assert used == {
        "handler.config.engines",
        "handler.config.environment",
        "handler.config.gguf",
        "handler.config.implied",
        "handler.config.lmi_version",
        "handler.config.loader",
        "handler.config.options",
        "handler.config.options.names",
        "handler.config.sources",
        "handler.core.command_line",
        "handler.core.package",
        "handler.core.devices",
        "handler.core.event_stream",
        "handler.core.secrets",
        "handler.core.sizes",
        "handler.core.numbers",
        "handler.core.terminal",
        "handler.core.text_files",
    }


OF_PROOF = {
    "replay": {"core"},
    "conform": {"__version__", "core", "config.environment"},
    "bench": {"core", "config", "engines", "serving.engine"},
    "move": {"core", "config", "cli"},
}
"""A tool of proof's, and what of handler it may import: `bench --engine` runs the engine that it compares with."""


def test_the_server_and_deploy_import_no_tool_that_proves_them() -> None:
    """The `lmi` commands find the tools as entry points."""
    assert not [path for package in (HANDLER, DEPLOY) for path in files(package) if "proof" in tops(path)]
    fail(
        [
            f"{path.relative_to(PROOF)}: {module}"
            for path in files(PROOF)
            for module in imports(path, "handler")
            if module.startswith("handler.")
            and not is_within(module.removeprefix("handler."), OF_PROOF[path.relative_to(PROOF).parts[0]])
        ],
        "OF_PROOF",
    )


def tops(path: Path) -> set[str]:
    return {module.partition(".")[0] for module in imports(path, "")}


# -- protocols: kernel ← assistant ← dialects ← roof ---------------------------------------------------------------

PROTOCOLS = HANDLER / "protocols"
FLOORS = {"kernel": 0, "assistant": 1, "api": 1, "operations": 3, "openapi": 3, "registry": 3}
"""The floor of each room of protocols; all other rooms are dialects."""
_DIALECTS = 2


def rooms_below(folder: Path) -> dict[str, set[str]]:
    """Return the rooms of a folder, files and folders, and which others each imports."""
    prefix = ".".join(("handler", *folder.relative_to(HANDLER).parts))
    below: dict[str, set[str]] = {}
    for path in files(folder):
        room = path.relative_to(folder).with_suffix("").parts[0]
        found = (name.removeprefix(prefix + ".") for name in imports(path, "handler") if name.startswith(prefix + "."))
        below.setdefault(room, set()).update({name.split(".")[0] for name in found} - {room})
    return below


def test_no_arrow_in_protocols_runs_back_up() -> None:
    arrows = [(room, other) for room, below in rooms_below(PROTOCOLS).items() for other in below]
    fail([f"{room}: {other}" for room, other in arrows if _floor(other) > _floor(room)], "FLOORS")


def _floor(room: str) -> int:
    return FLOORS.get(room, _DIALECTS)


def test_no_two_rooms_of_protocols_reach_each_other() -> None:
    """Not by way of others either, on any floor and within any room."""
    folders = [PROTOCOLS, *(path.parent for path in PROTOCOLS.rglob("*/__init__.py"))]
    for folder in folders:
        TopologicalSorter(rooms_below(folder)).prepare()


# -- what users of an installed wheel read: no message names a directory, or a program, of the checkout ----------------


CAUSES = ROOT / "deploy" / "data" / "causes.yaml"
FILES = [path for name in ("handler", "deploy", "proof") for path in sorted((ROOT / name).rglob("*.py"))]

CHECKOUT = re.compile(
    r"\b(docs|tests|examples|proof|docker)/"
    r"|`make |^make [a-z]+$|: make [a-z-]+|(?<!\w)-e \.|\.\[\w+\]'|lmi-handler's\s+directory|\.venv\b"
)

_URL = re.compile(r"https://\S+")
"""Another project's page may lie in a folder of such a name."""


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the strings that are no docstrings, with their lines."""
    told = {
        id(statement.value)
        for node in ast.walk(tree)
        if isinstance(body := getattr(node, "body", None), list)
        for statement in body
        if isinstance(statement, ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield node.lineno, node.value


@functools.cache
def all_texts() -> list[tuple[str, str]]:
    """Return the strings of all files, with their places, and the advice for causes of failures."""
    in_code = [
        (f"{path.relative_to(ROOT)}:{line}", text)
        for path in FILES
        for line, text in texts(ast.parse(path.read_text()))
    ]
    return in_code + [(f"causes.yaml: {cause['name']}", cause["says"]) for cause in yaml.safe_load(CAUSES.read_text())]


def test_no_message_names_a_place_of_the_checkout() -> None:
    found = [f"{place}: {text[:120]!r}" for place, text in all_texts() if CHECKOUT.search(_URL.sub("", text))]
    assert found == []


@in_one_test(
    "text",
    ["see docs/djl.md", "run `make dev`", "pip install -e .", "pip install '.[cpu]'", "in lmi-handler's directory"],
)
def test_such_a_message_is_noticed(text: str) -> None:
    assert CHECKOUT.search(text)


def test_the_documentation_that_messages_name_exists() -> None:
    named = {name for _, text in all_texts() for name in re.findall(r"\bdocumentation: ([\w/-]+)", text)}
    assert {"djl", "scaling"} & named
    assert [name for name in sorted(named) if not (ROOT / "docs" / f"{name}.md").is_file()] == []


# -- the Makefile's variables, by a target of the test's own -----------------------------------------------------------


@pytest.mark.parametrize(("arguments", "environ"), [((), {"PORT": "9"}), (("PORT=9",), {})])
def test_the_port_is_that_of_make_serve_alone(
    arguments: tuple[str, ...], environ: dict[str, str], tmp_path: Path
) -> None:
    """Not of what make starts: `lmi` would say that PORT, a variable of TGI's, has no effect."""
    more = tmp_path / "more.mk"
    more.write_text("show:\n\t@echo '$(PORT)' \"in the environment: $$PORT\"\n")
    command = ["make", "--no-print-directory", "-s", "-f", "Makefile", "-f", str(more), "show", *arguments]
    environ = {"PATH": os.environ["PATH"], **environ}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "9 in the environment: \n"


def test_the_demo_model_is_converted_before_vllms_tests_begin() -> None:
    """Its half a minute would count in the time of the first test that wants it."""
    command = ["make", "--no-print-directory", "-n", "accept-vllm", "VLLM_PYTHON=python"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert 0 < done.stdout.index("-m tests.gpu.vllm.checkpoint &&") < done.stdout.index("-m pytest")


def test_pytest_alone_runs_what_make_test_runs_and_says_so() -> None:
    """Tests that need a model or an environment of their own are deselected."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-o", "testpaths=tests/djl/test_wire.py"]
    alone = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    assert "\nthe tests of `make test`; `make help` lists the suites of all others\n" in alone
    assert re.search(r"no tests collected \(\d+ deselected\)", alone)
    made = subprocess.run(["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    *_, last = (line for line in made.splitlines() if not line.startswith("make["))  # what comes before it installs
    assert "/pytest " in last
    assert not re.search("tests/| -m ", last), "the same files and markers"


def test_workflows_and_hooks_run_what_is_there() -> None:
    files = [*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml"]
    documents = {path.name: yaml.safe_load(path.read_text()) for path in files}
    jobs = [job for name in ("checks.yml", "nightly.yml") for job in documents[name]["jobs"].values()]
    commands = [step["run"].partition("#")[0].split() for job in jobs for step in job["steps"] if "run" in step]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [command for command in commands if command[0] == "make" and command[1] not in targets] == []
    assert [command[-2:] for command in commands if command[0] != "make"] == [[".ci/run", "--nightly"]]
    (local,) = documents[".pre-commit-config.yaml"]["repos"]
    tools = {hook["entry"].split()[0].removeprefix(".venv/bin/") for hook in local["hooks"]}
    made = subprocess.run(["make", "-n", "lint"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {tool for tool in tools if f"/{tool}" not in made} == set()


# -- documented attributes ---------------------------------------------------------------------------------------------


def members(node: ast.ClassDef) -> set[str]:
    """The names that a class defines, or that its methods set on `self` or `cls`."""
    found = {
        item.attr
        for item in ast.walk(node)
        if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store)
        if isinstance(item.value, ast.Name) and item.value.id in ("self", "cls")
    }
    for item in node.body:
        match item:
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.Assign(targets=targets):
                found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return found


def documented(node: ast.ClassDef) -> Iterator[str]:
    """The names below `Attributes:` in the docstring of a class."""
    section = ""
    for line in (ast.get_docstring(node) or "").splitlines():
        if header := re.fullmatch(r"(\w+):", line):
            section = header[1]
        elif section == "Attributes" and (names := re.match(r"    (\w[\w, ]*): ", line)):
            yield from re.split(r",\s*", names[1])


def test_documented_attributes_exist() -> None:
    classes = [
        (path, node)
        for package in (HANDLER, DEPLOY, PROOF)
        for path in files(package)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    by_name: dict[str, list[ast.ClassDef]] = {}
    for _, node in classes:
        by_name.setdefault(node.name, []).append(node)

    def known(node: ast.ClassDef, seen: frozenset[str] = frozenset()) -> set[str]:
        names = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases} - seen
        bases = [base for name in names for base in by_name.get(name, [])]
        return members(node).union(*(known(base, seen | {node.name}) for base in bases))

    checked = [(path, node, name) for path, node in classes for name in documented(node)]
    assert len(checked) > 1000
    assert not [f"{path}: {node.name}.{name}" for path, node, name in checked if name not in known(node)]
