"""The environment with the schemas of Kubernetes, KServe and HyperPod, built on demand."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from handler.config.model_files import cache_directory
from tests import install
from tests.clients.toolchains import built_once

_REQUIREMENTS = Path(__file__).with_name("requirements-kubernetes.txt")


def python() -> Path:
    """The interpreter of the environment."""
    key = hashlib.sha256(_REQUIREMENTS.read_bytes() + f"{sys.version} {sys.base_prefix}".encode()).hexdigest()[:16]
    packages = ("--only-binary=:all:", "--no-deps", "-r", str(_REQUIREMENTS))
    directory = built_once(
        cache_directory() / "venvs" / f"kubernetes-{key}", lambda directory: install.environment(directory, *packages)
    )
    return directory / "bin" / "python"
