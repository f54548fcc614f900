"""Imports go one way; heavy libraries stay where they belong."""

from __future__ import annotations

import ast
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "handler"

ALLOWED = {
    "errors": set(),
    "core": {"errors"},
    "text": set(),
    "framing": set(),
    "generation": {"core", "text"},
    "options": {"options"},
    "config": {"errors", "options"},
    "event_loop": set(),
    "child_processes": set(),
    "garbage": set(),
    "models": {"child_processes", "errors"},
    "formatters": {"errors", "formatters"},
    "schemas": {"core", "errors", "formatters", "framing", "schemas", "text"},
    "engines": {"child_processes", "core", "errors", "garbage", "text", "models", "engines"},
    "adapter_registry": {"core", "errors"},
    "engine_adapters": {"core", "errors", "engines.base"},
    "batcher": {"core", "errors", "text", "generation", "engine_adapters", "engines.base"},
    "launch": {
        "__version__",
        "adapter_registry",
        "batcher",
        "config",
        "engines",
        "errors",
        "formatters",
        "framing",
        "models",
        "schemas.base",
    },
    "hosts": {
        "__version__",
        "adapter_registry",
        "batcher",
        "child_processes",
        "config",
        "core",
        "engines",
        "errors",
        "event_loop",
        "formatters",
        "framing",
        "garbage",
        "hosts",
        "launch",
        "models",
        "schemas",
        "text",
    },
    "entry": {"hosts"},
    "container": {"__version__", "config", "container", "errors", "models"},
}
ONLY_IN = {
    "uvicorn": "hosts",
    "starlette": "hosts",
    "prometheus_client": "hosts",
    "javaproperties": "config",
    "openvino_genai": "engines",
    "openvino": "engines",
    "orjson": "framing",
}


PACKAGES = ("handler", "deploy", "deploy.operations")  # of which modules are imported by name


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            whole = node.module in PACKAGES
            found |= {f"{node.module}.{name.name}" if whole else node.module for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    here = path.relative_to(PACKAGE).with_suffix("").parts[0]
    for module in imports(path):
        top = module.split(".")[0]
        if top in ONLY_IN and here != "bench":
            assert here == ONLY_IN[top], f"{module} belongs in {ONLY_IN[top]}"
        if top == "handler" and here in ALLOWED and module.count("."):
            target = module.removeprefix("handler.")
            assert any(target == allowed or target.startswith(f"{allowed}.") for allowed in ALLOWED[here]), module


def test_djl_stays_in_its_place() -> None:
    know_it = {path.relative_to(PACKAGE).as_posix() for path in FILES if "djl_python" in imports(path)}
    assert know_it - {"entry.py"} == {
        f"hosts/djl/{name}.py" for name in ("adapter_calls", "dialect", "modes", "replies", "requests", "worker")
    }


def test_no_file_is_long() -> None:
    long = {
        str(path.relative_to(PACKAGE)): count for path in FILES if (count := len(path.read_text().splitlines())) > 320
    }
    assert long == {}


DEPLOY = PACKAGE.parent / "deploy"
DEPLOY_FILES = sorted(DEPLOY.rglob("*.py"))


OF_DEPLOY = {
    "errors": set(),
    "redaction": set(),
    "credentials": set(),
    "data": set(),
    "diagnostics": set(),
    "aws": {"credentials", "diagnostics", "errors"},
    "spec": {"errors"},
    "s3": {"aws", "errors"},
    "resolve": {"aws", "data", "errors", "s3.uri", "spec"},
    "resources": {"errors", "redaction", "resolve.decision", "spec"},
    "export": {"errors", "resources"},
    "iam": {"aws", "errors", "resolve.decision", "resources.names", "s3.uri", "spec"},
    "preflight": {"aws", "errors", "resolve.decision", "resources.names", "s3", "spec"},
    "operations": {"aws", "diagnostics", "errors", "resources.resource"},
    "deployer": {
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
    },
    "client": {"credentials", "errors"},
    "bench": {"client"},
    "local": {"errors"},
}
"""A package of deploy's, and what of deploy it may import beside itself; `cli` may import all of it."""

ONLY_IN_DEPLOY = {
    "boto3": {"aws", "client"},
    "aiohttp": {"local"},
    "pydantic": {"spec"},
    "rich": {"cli"},
    "moto": set(),
}


def test_deploys_imports_go_one_way() -> None:
    wrong = []
    for path in DEPLOY_FILES:
        place = path.relative_to(DEPLOY).with_suffix("")
        here = place.parts[0]
        allowed = OF_DEPLOY.get(here, set()) | {here}
        for module in imports(path):
            top, _, target = module.partition(".")
            if top in ONLY_IN_DEPLOY and here not in ONLY_IN_DEPLOY[top]:
                wrong.append(f"{place}: {module}")
            free = top != "deploy" or not target or here in ("cli", "__main__")
            if not free and not any(target == name or target.startswith(f"{name}.") for name in allowed):
                wrong.append(f"{place}: {module}")
    assert wrong == []


def test_deploys_layers_have_no_circle() -> None:
    """Whoever adds a line to OF_DEPLOY adds no way back."""
    TopologicalSorter({layer: {name.split(".")[0] for name in below} for layer, below in OF_DEPLOY.items()}).prepare()


def test_deploy_imports_of_the_handler_only_its_load_generator() -> None:
    used = {module for path in DEPLOY_FILES for module in imports(path) if module.split(".")[0] == "handler"}
    assert used == {"handler.bench.load"}


def test_no_file_of_deploy_is_long() -> None:
    long = {
        str(path.relative_to(DEPLOY)): n for path in DEPLOY_FILES if (n := len(path.read_text().splitlines())) > 300
    }
    assert long == {}


def test_no_folder_of_deploy_is_large() -> None:
    folders = Counter(path.parent.relative_to(DEPLOY).as_posix() for path in DEPLOY_FILES)
    assert {folder: count for folder, count in folders.items() if count > 14} == {}
