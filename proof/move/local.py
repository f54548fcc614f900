"""The server of an adopted specification on this machine: its own options, with another model and engine."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deploy.adopt.variables import setting_text
from deploy.emulator.container import NOT_INHERITED
from deploy.emulator.specification import command_of, with_arguments
from deploy.spec import Spec
from deploy.spec.components import servers
from deploy.spec.options import Value, settings_of
from handler.config.loader import read_config
from handler.config.options.tables import BY_ROLLING_BATCH
from handler.core.child_processes import python
from handler.core.errors import ConfigError

Entry = tuple[str, str]
"""A setting or a part of the endpoint by name, and a reason."""


_OF_MODEL = ("llm_engine", "reasoning_parser", "tool_call_parser", "revision")
"""Options that only suit the endpoint's own model."""


class LocalServer(NamedTuple):
    """What runs here instead of the endpoint's container.

    Attributes:
        spec: the specification of this server.
        num_options: number of options and variables that the server has from the endpoint.
        replaced: settings of the endpoint that do not apply here.
        problems: problems for which the server cannot start.
        is_own: whether the model is the endpoint's own.
    """

    spec: Spec
    is_own: bool
    num_options: int
    replaced: list[Entry]
    problems: list[str]

    def command(self, port: int) -> list[str]:
        """Return the command that starts the server on a port of 127.0.0.1, with its variables."""
        command = command_of(self.spec, port)
        unset = [word for name in os.environ if name.startswith(NOT_INHERITED) for word in ("-u", name)]
        variables = [f"{name}={value}" for name, value in command.environment.items()]
        return ["env", *unset, *variables, *command.arguments]

    def profile(self) -> str:
        """Return the profile of `lmi conform` that the options select: `tgi`, `lmi-0.28` or `lmi-0.38`."""
        config = read_config(environ=command_of(self.spec, 0).environment).config
        return "tgi" if config.of_tgi else "lmi-0.38" if config.async_schema else "lmi-0.28"


def local_server(spec: Spec, model: str, engine: str | None, options: Sequence[str]) -> LocalServer:
    """Return a local server configured from a specification. Options that its engine refuses are dropped and listed.

    Args:
        model: the model that is served here: `demo`, a name on the hub, or a path.
        engine: the engine, or None for the model's default engine.
        options: options as KEY=VALUE, which replace those of the specification.

    Raises:
        DeployError: an option is invalid.
    """
    first, *others = servers(spec)
    is_own = model == first.model.id
    server, replaced = _with_model(first, model), [*_not_here(first, others, model)]
    extra = with_arguments(server.model_copy(update={"options": {}, "environment": {}}), options, engine).options
    if not is_own:
        elsewhere = {name: value for name, value in server.options.items() if _is_elsewhere(name, value)}
        replaced += [
            (f"options.{name}={value}", "of the replaced model or its engine") for name, value in elsewhere.items()
        ]
        server = _omit(server, {f"options.{name}" for name in elsewhere})
        if "rolling_batch" in elsewhere:  # which also selects the schema of /invocations
            extra = {"async_mode": server.options.get("async_mode", False), **extra}
    while problems := _problems(_with_options(server, extra)):
        omitted = [*_omitted(server, problems)]
        if not omitted:
            break
        replaced += [(f"{origin}={value}", f"omitted here: {text}") for origin, value, text in omitted]
        server = _omit(server, {origin for origin, *_ in omitted})
    num_options = len(server.options) + len(server.environment)
    texts = [problem["text"] for problem in problems]
    return LocalServer(_with_options(server, extra), is_own, num_options, replaced, texts)


def _is_elsewhere(name: str, value: Value) -> bool:
    """Return whether an option belongs to the endpoint's model, or names its engine, which this machine may lack."""
    return name in _OF_MODEL or (name == "rolling_batch" and value in BY_ROLLING_BATCH)


def _with_model(server: Spec, model: str) -> Spec:
    """Return a server's specification with another model, in this package's own server, without components."""
    path = Path(model).expanduser()
    name = str(path.resolve()) if path.exists() else model
    return server.model_copy(
        update={
            "model": server.model.model_copy(update={"id": name, "s3": None, "path": None, "token_secret": None}),
            "image": server.image.model_copy(update={"aws": None}),
            "components": (),
        }
    )


def _with_options(server: Spec, options: Mapping[str, Value]) -> Spec:
    return server.model_copy(update={"options": {**server.options, **options}})


def _not_here(first: Spec, others: Sequence[Spec], model: str) -> Iterator[Entry]:
    own = first.model.id or first.model.s3 or first.model.path or ""
    if model != own:
        yield f"model {own}", f"replaced here by {model}"
    for item in first.components:
        for adapter in item.adapters:
            yield f"adapter {adapter.name}", "adapters are not loaded here"
    for server in others:
        for item in server.components:
            yield f"component {item.name}", "only the server of the first component is started here"


def _problems(server: Spec) -> list[dict[str, str]]:
    """Return the problems that `lmi serve --check` finds with a server's variables."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(NOT_INHERITED)}
    environ = {**inherited, **command_of(server, 0).environment}
    words = json.dumps(["serve", "--check", "--json"])
    ended = subprocess.run(python("handler.cli:run", words), env=environ, capture_output=True, text=True)
    try:
        problems: list[dict[str, str]] = json.loads(ended.stdout)["problems"]
    except ValueError:
        raise ConfigError(f"lmi move: lmi serve --check: {ended.stderr.strip()}") from None
    return problems


def _omitted(server: Spec, problems: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, str, str]]:
    """Yield the settings that have a problem here: the field of the specification, the value and the problem."""
    for setting in settings_of(server.options, server.environment):
        for problem in problems:
            if problem["where"] == f"environment variable {setting.name}":
                text = setting_text(setting.name, setting.value).partition("=")[2]
                yield setting.origin, text, problem["message"].removeprefix(f"{problem['name']}={setting.value}: ")
                break


def _omit(server: Spec, origins: set[str]) -> Spec:
    """Return a server's specification without these fields of `options` and `environment`."""

    def kept(part: str) -> dict[str, Any]:
        return {name: value for name, value in getattr(server, part).items() if f"{part}.{name}" not in origins}

    return server.model_copy(update={part: kept(part) for part in ("options", "environment")})
