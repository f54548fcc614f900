"""Finds, checks, imports and calls the formatters in a user's model.py."""

from __future__ import annotations
import __future__

import ast
import contextlib
import hashlib
import importlib.machinery
import importlib.util
import inspect
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple, TypeVar

from handler.core import text_files
from handler.core.errors import AdapterFailed, ConfigError, FormatterFailed, Problem, Problems, error_text
from handler.core.values import Adapter
from handler.plugins.foreign_handlers import refuse_foreign_handlers, refuse_predictors
from handler.plugins.stand_ins import StandIn
from handler.plugins.stand_ins.djl import DJL_PYTHON, MODULES
from handler.protocols.assistant.tools.parsing import Format

log = logging.getLogger("handler.formatters")

_HAVE = f"its available modules are {', '.join(name.partition('.')[2] for name in [*MODULES][1:])}"

_MAPPINGS = ("dict", "Dict", "Mapping", "MutableMapping")
_OUTPUTS = ("RequestOutput", "TextGenerationOutput")


class Style(Enum):
    """The signature of an output formatter."""

    OUTPUT = "TextGenerationOutput -> str"
    LEGACY = "(token, first_token, last_token, details, generated_text, id) -> str, as in LMI 0.28"
    VALUE = "dict -> dict, with the response before it is framed"
    RESPONSE = "response -> response, dict or str, with OpenAI's response as an object, or a chunk of a stream as text"


class InputFormatter(NamedTuple):
    """A function that reads request bodies.

    Attributes:
        takes_payload: whether the function takes the decoded body instead of an `Input`.
        accepts: the names of its keyword arguments, or None if it accepts any name.
        is_annotated: whether its first argument has a type annotation. Without an annotation, LMI's async mode passes
            the decoded body.
    """

    name: str
    function: Callable[..., Any]
    takes_payload: bool
    accepts: frozenset[str] | None
    is_annotated: bool = True

    def as_in(self, *, asynchronous: bool) -> InputFormatter:
        """Return the formatter for async or other modes. Without an annotation, it takes the body in async mode."""
        return self if self.is_annotated or not asynchronous else self._replace(takes_payload=True)

    @property
    def title(self) -> str:
        return f"input formatter {self.name!r} of model.py"


class OutputFormatter(NamedTuple):
    """A function that writes responses.

    Attributes:
        unpacks_index: whether it expects `get_next_token` to also return the index of the token, as in LMI since 0.32.
    """

    name: str
    function: Callable[..., Any]
    style: Style
    unpacks_index: bool = True

    @property
    def title(self) -> str:
        return f"output formatter {self.name!r} of model.py"


class Formatters(NamedTuple):
    """The user functions that the server calls. Each is None if the user has not defined it.

    Attributes:
        configs: the keyword argument `configs` of input formatters.
        handlers: the custom handlers of AWS's vLLM image, as `Handlers`.
        handle: the function `handle` as in LMI, as `Handle`.
        tool_format: the user-defined format of tool calls.
    """

    input: InputFormatter | None = None
    output: OutputFormatter | None = None
    configs: Any = None
    handlers: Any = None
    handle: Any = None
    tool_format: Format | None = None


class Decorated(NamedTuple):
    """All formatters that a model.py defines, by name."""

    inputs: Mapping[str, InputFormatter]
    outputs: Mapping[str, OutputFormatter]


def find_formatters(directory: Path | None, *, module: str = "", handlers: StandIn | None = None) -> Decorated:
    """Import the model.py in `directory`, if it exists, and find its decorated functions.

    Args:
        directory: the model directory, or None.
        module: a name under which to import the file even if it has already been imported, or "" to import it only
            once.
        handlers: the stand-in for AWS's package, or None if this server does not call custom handlers.

    Raises:
        ConfigError: if the file cannot be imported or the signature of a formatter is not supported. The message
            contains the file and line.
    """
    path = model_py(directory)
    if path is None:
        return Decorated({}, {})
    check_model_py(path, handlers=handlers)
    DJL_PYTHON.install()
    model = import_file(path, module) if module else import_once(path)
    inputs = {name: _input(name, function, path) for name, function in _find_decorated(model, "is_input_formatter")}
    outputs = {name: _output(name, function, path) for name, function in _find_decorated(model, "is_output_formatter")}
    if inputs or outputs:
        log.info("%s: input formatters: %s; output formatters: %s", path, *(_names(x) for x in (inputs, outputs)))
    elif not handlers:
        log.info("%s has no decorated functions and is not used", path)
    return Decorated(inputs, outputs)


def check_syntax(path: Path) -> None:
    """Compile a user's file without running it.

    Raises:
        ConfigError: if the file is not valid Python. The message names the file and line.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the import shows them
            compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise _failure(path, error) from None


def check_model_py(path: Path | None, *, handlers: StandIn | None = None) -> None:
    """Check the syntax, the imports from the DJL package, and the functions of a model.py without running it.

    Args:
        path: the file, or None if there is none.
        handlers: the stand-in for AWS's package, or None if this server does not call custom handlers.

    Raises:
        ConfigError: if the file is not valid Python, imports a name that is not available, or has a function that this
            server cannot call. The message names the file and line.
    """
    if path is None:
        return
    check_syntax(path)
    tree = ast.parse(path.read_bytes(), str(path))
    refuse_foreign_handlers(path, tree, called=handlers)
    refuse_predictors(path, tree)
    problems = Problems()
    for line, name in DJL_PYTHON.lacking(tree):
        problems.append(Problem("", "", f"{path}, line {line}: {name} is not available without DJL Serving; {_HAVE}"))
    for decorator, bare in _bare_formatters(tree):
        with problems:
            (_input if decorator == "input_formatter" else _output)(bare.__name__, bare, path)
    problems.check()


def _bare_formatters(tree: ast.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the kind of each formatter without other decorators, and an empty function with its signature.

    No user code is run. Decorators from AWS's package with the same names are skipped, because they mark middleware.
    """
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    ours = [
        statement for statement in imports if (statement.module or "").partition(".")[0] in ("handler", "djl_python")
    ]
    decorators = {alias.asname or alias.name: alias.name for statement in ours for alias in statement.names}
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.decorator_list) != 1:
            continue
        decorator = decorators.get(ast.unparse(node.decorator_list[0]), "")
        if decorator in ("input_formatter", "output_formatter"):
            nothing = ast.copy_location(ast.Constant(None), node)
            node.args.defaults = [nothing] * len(node.args.defaults)
            node.args.kw_defaults = [default and nothing for default in node.args.kw_defaults]
            node.decorator_list = []
            namespace: dict[str, Any] = {}
            module = ast.Module([node], type_ignores=[])
            exec(compile(module, "model.py", "exec", __future__.annotations.compiler_flag), namespace)
            yield decorator, namespace[node.name]


def model_py(directory: Path | None) -> Path | None:
    """Return the path of the model.py in `directory`, or None if there is none."""
    path = directory / "model.py" if directory is not None else None
    return path if path is not None and path.is_file() else None


F = TypeVar("F", InputFormatter, OutputFormatter)


def choose(formatters: Mapping[str, F], name: str | None, kind: str) -> F | None:
    """Return the formatter with this name. If `name` is None, return the only formatter, or None if there is none.

    Raises:
        ValueError: if no formatter has the name, or if `name` is None and there are several formatters.
    """
    if name is not None and name not in formatters:
        builtin = "json, jsonlines, sse, or " if kind == "output" else ""
        raise ValueError(
            f"must be {builtin}the name of an @{kind}_formatter function of model.py, which has {_names(formatters)}"
        )
    if name is None and len(formatters) > 1:
        raise ValueError(f"model.py has several {kind} formatters, {_names(formatters)}: choose one of them")
    return formatters[name] if name is not None else next(iter(formatters.values()), None)


def _names(formatters: Mapping[str, Any]) -> str:
    return ", ".join(formatters) or "none"


def _find_decorated(module: ModuleType, attribute: str) -> list[tuple[str, Callable[..., Any]]]:
    """Return each marked function once, with the first of its names in the module."""
    decorated: dict[int, tuple[str, Callable[..., Any]]] = {}
    for name, value in vars(module).items():
        if callable(value) and getattr(value, attribute, False) is True:
            decorated.setdefault(id(value), (name, value))
    return list(decorated.values())


# -- importing ---------------------------------------------------------------------------------------------------


def import_once(path: Path) -> ModuleType:
    """Return the module of a user's file, importing the file if necessary.

    Raises:
        ConfigError: if the file cannot be imported. The message names the file and line.
    """
    return _find_imported(path) or import_file(path)


def _find_imported(path: Path) -> ModuleType | None:
    """Return the module of a file that was imported under any name. The name that DJL uses depends on its version."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and Path(file).name == path.name and os.path.exists(file) and path.samefile(file):
            return module
    return None


class _SourceOnly(importlib.machinery.SourceFileLoader):
    """Loader that always compiles the source.

    Python's bytecode cache does not detect a change within the same second that leaves the file size unchanged.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def import_file(path: Path, name: str = "") -> ModuleType:
    """Import a user's file.

    Args:
        name: the name of the module, which replaces any existing module with that name. The default is the name of the
            file, with a suffix if that name is taken.

    Raises:
        ConfigError: if the file cannot be imported. The message names the file and line.
    """
    directory = str(path.parent.resolve())
    if directory not in sys.path:
        sys.path.insert(0, directory)  # as in DJL, so that model.py can import files next to it
    if not name:
        name = path.stem
        if name in sys.modules:
            name = f"{name}_{hashlib.sha1(directory.encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_SourceOnly(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _failure(path, error) from error
    return module


def _failure(path: Path, error: BaseException) -> ConfigError:
    if isinstance(error, (SyntaxError, ValueError)) and text_files.is_utf_16(path.read_bytes()[:2]):
        return ConfigError(f"{path}: {text_files.UTF_16}")
    return ConfigError(f"{path}, line {_line(error, path)}: {type(error).__name__}: {error}")


def _line(error: BaseException, path: Path) -> int:
    """Return the line number of the last frame in the traceback that is in the file."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno or 1
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return lines[-1] if lines and lines[-1] is not None else 1


# -- signatures --------------------------------------------------------------------------------------------------


def _input(name: str, function: Callable[..., Any], path: Path) -> InputFormatter:
    where, parameters = _signature(name, function, path)
    positional = [
        parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if not positional or sum(parameter.default is parameter.empty for parameter in positional) > 1:
        raise ConfigError(f"{where}: input formatter {name!r} must have the signature (input, **kwargs)")
    first = positional[0]
    accepts = None
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        accepts = frozenset(parameter.name for parameter in parameters[1:])
    takes_payload = first.name == "decoded_payload" or _annotation(first) in _MAPPINGS
    return InputFormatter(name, function, takes_payload, accepts, first.annotation is not first.empty)


def _output(name: str, function: Callable[..., Any], path: Path) -> OutputFormatter:
    where, parameters = _signature(name, function, path)
    needed = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    ]
    if len(needed) == 6:
        style = Style.LEGACY
    elif len(needed) == 1:
        style = _style(needed[0])
    else:
        styles = "; ".join(style.value for style in Style)
        raise ConfigError(
            f"{where}: output formatter {name!r} takes {len(needed)} arguments; its signature must be one of: {styles}"
        )
    return OutputFormatter(name, function, style, not _unpacks_three(path))


def _unpacks_three(path: Path) -> bool:
    """Return whether a file unpacks three values from `get_next_token`, as returned by LMI up to 0.31."""
    return any(
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr == "get_next_token"
        and any(isinstance(target, ast.Tuple | ast.List) and len(target.elts) == 3 for target in node.targets)
        for node in ast.walk(ast.parse(path.read_bytes(), str(path)))
    )


def _style(parameter: inspect.Parameter) -> Style:
    """Return the style of an output formatter from the annotation or the name of its only argument.

    Without an annotation, LMI's rolling batch would not recognize the style.
    """
    annotated = parameter.annotation is not parameter.empty
    if _annotation(parameter) in _MAPPINGS or (parameter.name == "response_data" and not annotated):
        return Style.VALUE
    if _annotation(parameter) in _OUTPUTS or (parameter.name == "request_output" and not annotated):
        return Style.OUTPUT
    return Style.RESPONSE


def _signature(name: str, function: Callable[..., Any], path: Path) -> tuple[str, list[inspect.Parameter]]:
    code = getattr(inspect.unwrap(function), "__code__", None)
    where = f"{path}, line {code.co_firstlineno}" if code is not None else str(path)
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise ConfigError(f"{where}: formatter {name!r} must be a plain function, not async or a generator")
    return where, list(inspect.signature(function).parameters.values())


def _annotation(parameter: inspect.Parameter) -> str:
    """Return the name of the annotation without module and parameters, or "_empty" if there is no annotation."""
    annotation = parameter.annotation
    origin = getattr(annotation, "__origin__", annotation)
    text = annotation if isinstance(annotation, str) else getattr(origin, "__name__", "")
    return str(text.partition("[")[0].rpartition(".")[2])


# -- calls -------------------------------------------------------------------------------------------------------


def run(formatter: InputFormatter | OutputFormatter, *arguments: Any, **keywords: Any) -> Any:
    """Call the user's function.

    Raises:
        FormatterFailed: if the function raises an exception, whose traceback is logged.
    """
    with _guard(formatter, "raised"):
        return formatter.function(*arguments, **keywords)


def users_objects(formatter: InputFormatter | OutputFormatter) -> contextlib.AbstractContextManager[None]:
    """Guard access to objects that a user function has created or changed, because this may run user code.

    Raises:
        FormatterFailed: if access to the objects raises an exception, whose traceback is logged.
    """
    return _guard(formatter, "returned an object that raises")


@contextlib.contextmanager
def _guard(formatter: InputFormatter | OutputFormatter, reason: str) -> Iterator[None]:
    try:
        yield
    except FormatterFailed:
        raise
    except BaseException as error:  # SystemExit in user code must end only its request
        log.exception("%s failed", formatter.title)
        raise failed(formatter, f"{reason} {type(error).__name__}", error) from error


def failed(
    formatter: InputFormatter | OutputFormatter, reason: str, error: BaseException | None = None
) -> FormatterFailed:
    """Return the error for a failed formatter. Its public message omits `error`, which may quote the client."""
    return FormatterFailed(f"{formatter.title} {reason}", "" if error is None else error_text(error))


def kind(value: Any) -> str:
    """Return the type of a wrong return value, for messages."""
    return "None" if value is None else type(value).__name__


# -- the formatters of LoRA adapters: a model.py in an adapter's directory replaces the model's own --------------------


def load_adapter_formatters(directory: Path, name: str) -> Formatters | None:
    """Import the model.py in an adapter directory, and return its formatters, or None if it has none.

    Args:
        name: the name of the adapter. The name of the module is derived from it, as in LMI.

    Raises:
        AdapterFailed: if the model.py cannot be used.
    """
    try:
        by_name = find_formatters(directory, module="ns_" + name.replace("-", "_").replace(".", "_"))
        formatters = Formatters(choose(by_name.inputs, None, "input"), choose(by_name.outputs, None, "output"))
    except (ConfigError, ValueError) as error:
        raise AdapterFailed(f"={directory}: {error}", field="src") from None
    return formatters if formatters.input or formatters.output else None


class AdapterFormatters:
    """The formatters of registered adapters, by directory. Thread-safe.

    Attributes:
        exist: whether any adapter has a formatter.
        read: whether any adapter has an input formatter.
    """

    def __init__(self) -> None:
        self._by_path: dict[str, Formatters] = {}
        self.exist = self.read = False

    def set(self, path: str, formatters: Formatters | None) -> Formatters | None:
        """Replace the formatters of a directory, and return its previous formatters."""
        earlier = self._by_path.pop(path, None)
        if formatters is not None:
            self._by_path[path] = formatters
        self._note()
        return earlier

    def keep(self, paths: Collection[str]) -> None:
        """Remove the formatters of all directories except `paths`."""
        self._by_path = {path: formatters for path, formatters in self._by_path.items() if path in paths}
        self._note()

    def of(self, adapter: Adapter | None, base: Formatters) -> Formatters:
        """Return the formatters for a request: its adapter's, and the model's for kinds that the adapter lacks."""
        of_adapter = None if adapter is None else self._by_path.get(adapter.path)
        if of_adapter is None:
            return base
        return base._replace(input=of_adapter.input or base.input, output=of_adapter.output or base.output)

    def _note(self) -> None:
        self.exist = bool(self._by_path)
        self.read = any(entry.input is not None for entry in self._by_path.values())
