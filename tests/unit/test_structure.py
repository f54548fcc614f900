"""Imports go one way; heavy libraries stay where they belong."""

from __future__ import annotations

import ast
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


PACKAGES = ("handler", "deploy", "deploy.running")  # of which modules are imported by name


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
    "secrecy": set(),
    "credentials": set(),
    "names": set(),
    "settled": set(),
    "causes": set(),
    "data": set(),
    "resources": set(),
    "s3_uri": set(),
    "console": {"errors"},
    "advice": {"causes"},
    "aws": {"advice", "credentials", "errors"},
    "spec": {"errors"},
    "uploads": {"aws", "console", "errors", "s3_uri"},
    "settling": {"aws", "data", "errors", "s3_uri", "settled", "spec"},
    "environment": {"errors", "secrecy", "settled", "spec"},
    "builders": {"environment", "errors", "names", "resources", "settled", "spec"},
    "build": {"builders", "names", "resources", "settled", "spec"},
    "export": {"errors", "resources"},
    "policies": {"aws", "errors", "names", "s3_uri", "settled", "spec"},
    "checks": {"aws", "errors", "names", "settled", "spec", "uploads"},
    "running": {"advice", "aws", "client.account", "errors", "resources"},
    "changes": {
        "advice",
        "aws",
        "build",
        "checks",
        "console",
        "credentials",
        "errors",
        "names",
        "resources",
        "running.logs",
        "secrecy",
        "settled",
        "settling",
        "spec",
        "uploads",
    },
    "client": {"credentials", "errors"},
    "bench": {"client"},
    "local": {"errors"},
}
"""A package of deploy's, and what of deploy it may import beside itself; commands and cli may import all of it."""

ONLY_IN_DEPLOY = {
    "boto3": {"aws", "client", "running"},
    "aiohttp": {"local"},
    "pydantic": {"spec"},
    "rich": {"changes", "commands", "console", "running", "uploads"},
    "moto": set(),
}


@pytest.mark.parametrize("path", DEPLOY_FILES, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_deploys_imports_go_one_way(path: Path) -> None:
    here = path.relative_to(DEPLOY).with_suffix("").parts[0]
    for module in imports(path):
        top, _, target = module.partition(".")
        if top in ONLY_IN_DEPLOY:
            assert here in ONLY_IN_DEPLOY[top], f"{module} belongs in {ONLY_IN_DEPLOY[top]}"
        if top == "deploy" and target and here not in ("commands", "cli", "__main__"):
            allowed = OF_DEPLOY[here] | {here}
            assert any(target == name or target.startswith(f"{name}.") for name in allowed), module


def test_deploys_layers_have_no_circle() -> None:
    """Whoever adds a line to OF_DEPLOY adds no way back."""
    TopologicalSorter({layer: {name.split(".")[0] for name in below} for layer, below in OF_DEPLOY.items()}).prepare()


@pytest.mark.parametrize("path", DEPLOY_FILES, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_deploy_knows_nothing_of_the_handler(path: Path) -> None:
    assert not [module for module in imports(path) if module.split(".")[0] == "handler"]


def test_no_file_of_deploy_is_long() -> None:
    long = {
        str(path.relative_to(DEPLOY)): n for path in DEPLOY_FILES if (n := len(path.read_text().splitlines())) > 320
    }
    assert long == {}
