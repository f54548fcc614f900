"""The options of a specification, read as the container will read them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from deploy.errors import SpecError
from deploy.spec.components import servers, title
from handler.config.loader import read_config
from handler.config.options import KNOWN
from handler.config.options.lookup import find_option, variable
from handler.config.options.variables import VARIABLES

if TYPE_CHECKING:
    from deploy.spec import Spec

ADVICE = (
    "`lmi options` lists the options. An image that knows another one gets it by a variable under environment:, as "
    "OPTION_NAME."
)

Value = str | int | float | bool


class Setting(NamedTuple):
    """A variable of the container, and its place in the specification."""

    name: str
    value: str
    origin: str


def settings_of(options: Mapping[str, Value], environment: Mapping[str, str]) -> Iterator[Setting]:
    """Yield the variables of `options:` and `environment:`; misplaced options are left out."""
    for option, value in options.items():
        if not option.startswith("option.") and option != "model_id":
            yield Setting(variable_of(option), _text(value), f"options.{option}")
    for name, text in environment.items():
        yield Setting(name, text, f"environment.{name}")


def misplaced(options: Iterable[str]) -> list[str]:
    """Name the options that have another place or form."""
    names = list(options)
    prefixed = [f"options.{name}: write it without `option.`" for name in names if name.startswith("option.")]
    model = ["options.model_id: the model is said under model: (id, s3 or path)"] if "model_id" in names else []
    return prefixed + model


def wrong_options(settings: Iterable[Setting], directory: Path | None) -> list[str]:
    """Read the options as the container will, and say what it would refuse.

    Unknown variables under `environment:` are left to the image, which may be newer.

    Args:
        directory: the model's, which may hold a serving.properties.
    """
    by_name = {setting.name: setting for setting in settings}
    file = directory / "serving.properties" if directory else None
    reading = read_config(
        properties=file if file and file.is_file() else None,
        environ={name: setting.value for name, setting in by_name.items()},
        auto="",  # an image may choose the engine
    )
    origins = {f"environment variable {name}": setting.origin for name, setting in by_name.items()}
    found = [(origins.get(problem.where, problem.where), problem) for problem in reading.problems]
    return [
        f"{origin}: {problem.message.replace('option.', '')}"
        for origin, problem in found
        if not origin.startswith("environment.") or problem.name in VARIABLES or find_option(problem.name, "")
    ]


def options_problems(spec: Spec) -> list[str]:
    """List what the container would refuse of the options alone; none for an image of AWS's own."""
    groups = servers(spec)
    return [
        f"{title(server)}: {problem}" if len(groups) > 1 else problem
        for server in groups
        if server.image.aws is None and not is_aws_image(server.image.uri or "")
        for problem in (
            *misplaced(server.options),
            *wrong_options(settings_of(server.options, server.environment), server.model.directory),
        )
    ]


def problems_error(problems: list[str], advice: str) -> SpecError:
    """Return the error that lists them."""
    head = [f"{len(problems)} problems:"] if len(problems) > 1 else []
    return SpecError("\n  ".join([*head, *problems]), advice)


def is_aws_image(uri: str) -> bool:
    """Whether the image is one of AWS's own LMI images, whose options are others."""
    return "/djl-inference" in uri


def variable_of(option: str) -> str:
    """Name the variable of an option; the specification writes all options without `option.`."""
    is_bare = any(one.field and not one.engines for one in KNOWN.get(option, ()))
    return variable(option if is_bare else f"option.{option}")


def _text(value: Value) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)
