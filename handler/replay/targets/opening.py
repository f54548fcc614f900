"""Targets by their names on the command line."""

from __future__ import annotations

import contextlib
import os
import re
import shlex

from handler.bench.server import lmi_serve
from handler.core.errors import ConfigError
from handler.replay.targets.base import Target
from handler.replay.targets.http import HttpTarget
from handler.replay.targets.pace import Paced

RECORDED = "recorded"
FORMS = "http://HOST:PORT, sagemaker:NAME[/COMPONENT], serve:ARGUMENTS or recorded"


def check_name(name: str) -> str:
    """Return the name of a target. Raises ValueError: it has no known form."""
    scheme, colon, rest = name.partition(":")
    if scheme in ("http", "https") and re.search(r"[@?#]", rest):
        raise ValueError("a URL with a user or a query is not taken, as reports name it: give the key by --key-to")
    if name == RECORDED or (colon and rest and scheme in ("http", "https", "sagemaker", "serve")):
        return name
    raise ValueError(f"{name}: must be {FORMS}")


def open_target(
    name: str, key_variable: str | None, timeout: float, patience: float, concurrency: int, stack: contextlib.ExitStack
) -> Paced | None:
    """Open a target; None: the recording itself.

    Args:
        key_variable: of the environment, whose value is sent as a bearer token.
        stack: stops a server that is started for this.

    Raises:
        ConfigError: it cannot be opened, or takes no key.
    """
    if key_variable is not None and (name == RECORDED or name.startswith("sagemaker:")):
        raise ConfigError(f"lmi replay: {name} takes no key, and {key_variable} is named for it")
    if name == RECORDED:
        return None
    return Paced(_target(name, _key(key_variable), timeout, concurrency, stack), patience)


def _target(name: str, key: str, timeout: float, concurrency: int, stack: contextlib.ExitStack) -> Target:
    scheme, _, rest = name.partition(":")
    if scheme == "serve":
        try:
            arguments = shlex.split(rest)
        except ValueError as error:
            raise ConfigError(f"lmi replay: {name}: {error}") from None
        return HttpTarget(stack.enter_context(lmi_serve(arguments)).url, key, timeout)
    if scheme == "sagemaker":
        try:
            from handler.replay.targets.sagemaker import SageMakerTarget
        except ModuleNotFoundError as error:
            raise ConfigError(f"lmi replay: {name}: needs {error.name}: pip install 'lmi-handler[deploy]'") from None
        return SageMakerTarget(rest, timeout, concurrency)
    return HttpTarget(name, key, timeout)


def _key(variable: str | None) -> str:
    if variable is None:
        return ""
    if not (key := os.environ.get(variable, "").strip()):
        raise ConfigError(f"lmi replay: the environment variable {variable} for the key is not set")
    return key
