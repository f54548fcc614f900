"""The embedded server as the container's process."""

from __future__ import annotations

import sys

from handler.container.arguments import Arguments
from handler.container.model import Found
from handler.core.errors import ConfigError


def command(arguments: Arguments, found: Found) -> list[str]:
    """`lmi serve` for what was found. It drains by itself at SIGTERM, so it may take this process's place.

    Raises:
        ConfigError: SageMaker's model data cannot be served from where they are.
    """
    options = [part for option in arguments.options for part in ("-o", option)]
    serve = [sys.executable, "-m", "handler", "serve", "--host", arguments.host]
    serve += ["--port", str(arguments.port), *options]
    if found.properties is not None:  # serving.properties is read there, and may name the model itself
        return [*serve, str(found.properties.parent)]
    code = found.directory and found.directory / "model.py"
    if code and code.is_file() and found.model_id != str(found.directory):
        raise ConfigError(f"{code} needs a serving.properties beside it, which may be empty")
    # As an option it would also beat what a serving.properties in a named directory says of itself.
    return [*serve, found.model_id] if found.model_id else serve
