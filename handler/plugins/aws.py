"""Custom handlers and middleware in a user's script, as in AWS's vLLM image.

The names are the same as in the package model-hosting-container-standards, 0.1.16 and 0.1.17. A function that is set in
a variable overrides a decorated function, and a decorated function overrides a function with a known name.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from handler.core.errors import BadRequest, ConfigError, Problems
from handler.core.user_functions import SCRIPT, VARIABLES
from handler.plugins.foreign_handlers import FUNCTIONS, PACKAGE
from handler.plugins.functions import check_model_py, import_once
from handler.plugins.stand_ins import StandIn

log = logging.getLogger("handler.formatters")

_ADAPTER = "x-amzn-sagemaker-adapter-identifier"
_SPEC = re.compile(r"([^\s:]+):([^\s:]+)")


Function = Callable[..., Any]
"""A user's function, or a class with `__call__`."""

Decorator = Callable[[Function], Function]


class Handlers(NamedTuple):
    """User functions that replace the server handlers or wrap the server. Each is None if it is not defined.

    Attributes:
        invoke: the handler of POST /invocations, which takes the request or no argument.
        ping: the handler of GET /ping, which takes the request or no argument.
        pre: a function to call with each request before the server handles it.
        post: a function to call with each response from the server.
        pre_post_process: the inner middleware: a function that takes the request and `call_next`, or an ASGI class.
        throttle: the outer middleware, in the same form.
    """

    invoke: Function | None = None
    ping: Function | None = None
    pre: Function | None = None
    post: Function | None = None
    pre_post_process: Function | None = None
    throttle: Function | None = None


# -- decorators --------------------------------------------------------------------------------------------------

_decorated: dict[str, Function] = {}
"""The functions that have been decorated since `collecting` last started."""


@contextlib.contextmanager
def collecting() -> Iterator[Mapping[str, Function]]:
    """Collect the functions that are decorated while a `with` block imports user files."""
    STANDARDS.install()
    _decorated.clear()
    decorated: dict[str, Function] = {}
    try:
        yield decorated
    finally:
        STANDARDS.uninstall()
    decorated.update(_decorated)


def _takes(kind: str, *, once: bool = False) -> Decorator:
    def decorate(function: Function) -> Function:
        if once and kind in _decorated:
            raise ValueError(f"{kind} is registered twice")
        _decorated[kind] = function
        return function

    return decorate


def _without_effect(name: str) -> Decorator:
    def decorate(function: Function) -> Function:
        log.warning("@%s has no effect in your script: only server implementations use it", name)
        return function

    return decorate


def _custom_middleware(name: str) -> Decorator:
    if name not in ("throttle", "pre_post_process"):
        raise ValueError(f"custom_middleware({name!r}): the name must be throttle or pre_post_process")
    return _takes(name, once=True)


def _inject_adapter_id(adapter_path: str, append: bool = False, separator: str | None = None) -> Decorator:
    """Return a decorator that copies the adapter name from SageMaker's header to a dotted path in the body."""
    if append and separator is None:
        raise ValueError("inject_adapter_id: append needs a separator")

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        async def injected(request: Any) -> Any:
            if adapter := request.headers.get(_ADAPTER):
                *path, last = adapter_path.split(".")
                try:
                    body = await request.json()
                    parent = functools.reduce(lambda value, name: value.setdefault(name, {}), path, body)
                except (ValueError, RecursionError):
                    raise BadRequest(f"header {_ADAPTER}: the body is not JSON") from None
                except AttributeError:
                    parent = None
                if not isinstance(parent, dict):
                    raise BadRequest(f"header {_ADAPTER}: the body has no object for {adapter_path}")
                parent[last] = f"{parent.get(last, '')}{separator}{adapter}" if append else adapter
                request._body = json.dumps(body).encode()
                vars(request).pop("_json", None)
            result = function(request)
            return await result if inspect.isawaitable(result) else result

        return injected

    return decorate


STANDARDS = StandIn(
    {
        PACKAGE: {},
        f"{PACKAGE}.logging_config": {"logger": log},
        f"{PACKAGE}.sagemaker": {
            "custom_invocation_handler": _takes("invoke"),
            "custom_ping_handler": _takes("ping"),
            "register_invocation_handler": _without_effect("register_invocation_handler"),
            "register_ping_handler": _without_effect("register_ping_handler"),
            "inject_adapter_id": _inject_adapter_id,
        },
        f"{PACKAGE}.common": {},
        f"{PACKAGE}.common.fastapi": {},
        f"{PACKAGE}.common.fastapi.middleware": {
            "custom_middleware": _custom_middleware,
            "input_formatter": _takes("pre", once=True),
            "output_formatter": _takes("post", once=True),
        },
    },
    first=True,
)
"""Stand-in for AWS's package. It also replaces an installed package, whose registry this server does not read."""


# -- finding the files and functions -----------------------------------------------------------------------------------


def script_of(home: Path, variables: Mapping[str, str]) -> Path:
    """Return the path of the user's script, which may not exist."""
    return home / variables.get(SCRIPT, "model.py")


def files_of(home: Path, variables: Mapping[str, str]) -> list[Path]:
    """Return the existing files that may contain handlers: the script, and the files in the variables."""
    script = script_of(home, variables)
    sources = [match[1] for name in VARIABLES.values() if (match := _SPEC.fullmatch(variables.get(name, "").strip()))]
    paths = dict.fromkeys((script, *(path for source in sources if (path := _file(source, home, script)) is not None)))
    return [path for path in paths if path.is_file()]


def check_handlers(home: Path, variables: Mapping[str, str]) -> None:
    """Check the script and the variables without running any user code.

    Raises:
        ConfigError: if a file is missing or is not valid Python, if a variable is malformed, or if the
            script uses a name of AWS's package that this server does not support.
    """
    problems = Problems()
    script = script_of(home, variables)
    with problems:
        if SCRIPT in variables and not script.is_file():
            raise ConfigError(f"{SCRIPT}={variables[SCRIPT]}: there is no such file in {home}")
        check_model_py(script if script.is_file() else None, handlers=STANDARDS)
    for variable in VARIABLES.values():
        with problems:
            if (spec := variables.get(variable)) and not _is_route(spec):
                source, _ = _parts(variable, spec)
                if (path := _file(source, home, script)) is not None:
                    check_model_py(_existing(path, variable, spec), handlers=STANDARDS)
    problems.check()


def find_handlers(home: Path, variables: Mapping[str, str], decorated: Mapping[str, Function]) -> Handlers | None:
    """Import the user's script. Return its handlers and those set in variables, or None if there are no handlers.

    Args:
        home: the directory of the script.
        variables: the environment variables `CUSTOM_…`.
        decorated: functions that are decorated in other imported files.

    Raises:
        ConfigError: if a file cannot be imported or a handler cannot be called. The message contains the file and line,
            or the variable.
    """
    script = script_of(home, variables)
    with collecting() as in_script:
        module = import_once(script) if script.is_file() else None
        by_variable = {
            kind: _load(name, spec, home, script) for kind, name in VARIABLES.items() if (spec := variables.get(name))
        }
    decorated_functions = {**decorated, **in_script}
    functions = {kind: getattr(module, name, None) for name, kind in FUNCTIONS.items()}
    handlers = {
        kind: by_variable.get(kind) or decorated_functions.get(kind) or functions.get(kind)
        for kind in ("invoke", "ping")
    }
    handlers["throttle"] = by_variable.get("throttle") or decorated_functions.get("throttle")
    around = (
        by_variable
        if any(by_variable.get(kind) for kind in ("pre_post_process", "pre", "post"))
        else decorated_functions
    )
    if around.get("pre_post_process"):
        handlers["pre_post_process"] = around["pre_post_process"]
    else:  # both from the same source
        handlers.update(pre=around.get("pre"), post=around.get("post"))
    used = Handlers(**handlers)
    for kind in ("invoke", "ping"):
        _check_arguments(kind, getattr(used, kind))
    if not any(used):
        return None
    log.info(
        "custom handlers: %s",
        ", ".join(f"{kind}: {_name(function)}" for kind, function in used._asdict().items() if function),
    )
    return used


def _check_arguments(kind: str, function: Function | None) -> None:
    if function is None:
        return
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:  # not a function, or a built-in one without a signature
        raise ConfigError(f"custom handler {_name(function)!r} ({kind}): {error}") from None
    needed = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    if len(needed) > 1:
        raise ConfigError(
            f"custom handler {_name(function)!r} ({kind}) has {len(needed)} arguments; it must take only the request"
        )


def _load(variable: str, spec: str, home: Path, script: Path) -> Function | None:
    """Load the function in a variable, or return None for the path of a route, which AWS's package ignores."""
    if _is_route(spec):
        log.warning("%s=%s: the path of a route has no effect, as in AWS's image", variable, spec)
        return None
    source, names = _parts(variable, spec)
    path = _file(source, home, script)
    try:
        value: Any = importlib.import_module(source) if path is None else import_once(_existing(path, variable, spec))
        for name in names.split("."):
            value = getattr(value, name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{variable}={spec}: {error}") from None
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # the user's code
        raise ConfigError(f"{variable}={spec}: {type(error).__name__}: {error}") from error
    if not callable(value):
        raise ConfigError(f"{variable}={spec}: is a {type(value).__name__}, not a function")
    function: Function = value
    return function


def _is_route(spec: str) -> bool:
    return spec.startswith("/") and ":" not in spec


def _parts(variable: str, spec: str) -> tuple[str, str]:
    if (match := _SPEC.fullmatch(spec.strip())) is None:
        raise ConfigError(
            f"{variable}={spec[:200]}: must be file.py:function, package.module:function or model:function"
        )
    return match[1], match[2]


def _file(source: str, home: Path, script: Path) -> Path | None:
    """Return the file that a variable names as `file.py` or `model`, or None if the variable names a module."""
    if source == "model":
        return script
    return home / source if source.endswith(".py") else None


def _existing(path: Path, variable: str, spec: str) -> Path:
    if not path.is_file():
        raise ConfigError(f"{variable}={spec}: there is no file {path}")
    return path


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)
