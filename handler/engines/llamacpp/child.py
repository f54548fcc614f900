"""A llama-server that the engine starts itself: its program, flags, environment and log.

Settings that a user's flags may override are passed in the environment, because an older llama-server ignores variables
that it does not know. The environment contains nothing else that llama-server reads.

Sources: llama.cpp b11434, common/arg.cpp (flags and variables) and tools/server/server.cpp (start).
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import orjson

from handler.config import gguf, llama_server, model_files
from handler.core.errors import ConfigError, Problem, Problems, log_words
from handler.core.numbers import is_digits
from handler.core.values import Task
from handler.engines.base import EngineConfig, EngineInfo
from handler.engines.huggingface.files import download_gguf, gguf_file, is_fetched, is_hub_reference, without_file
from handler.engines.llamacpp import adapters, readable
from handler.engines.llamacpp.files import model_directory
from handler.engines.llamacpp.parameters import check_pooling
from handler.engines.process.output import LastError
from handler.engines.process.own_server import OwnServer

_PROGRAM, _ARGUMENTS = "option.llama_server", "option.llama_server_args"
_WAYS = f"{readable.WAYS}; or set {_PROGRAM} to the program's path"
NAME = llama_server.NAME
_ATTEMPTS = 3  # ports to try; another process may take a free port before the server does
_PORT_TAKEN = "couldn't bind"
_POLL_INTERVAL = 0.02  # seconds

# -- flags of option.llama_server_args ---------------------------------------------------------------------------------

_OWN = "this handler sets it itself, because only this handler may send requests to llama-server"
_MODEL = "set option.model_id instead"
_TEMPLATE = "this handler applies the chat template itself: set option.chat_template or option.reasoning_parser instead"
_LOG = "this handler reads the log of llama-server, and writes it to its own log"
_TOOLS = "llama-server must not run tools, fetch URLs or show a web page here"
_CHANGES = "it would change all responses: send stop or structured output in requests instead"
_SYNTHETIC = "llama-server would take draft tokens at random, so its responses would be wrong"
_ENDS = "llama-server would only print something and exit"
_REFUSED = {
    _OWN: (
        *("--host", "--port", "--reuse-port", "--path", "--api-prefix", "--api-key", "--api-key-file"),
        *("--ssl-key-file", "--ssl-cert-file", "--cors-origins", "--cors-methods", "--cors-headers"),
        *("--cors-credentials", "--no-cors-credentials", "--props", "--alias", "-a"),
    ),
    _MODEL: (
        *("-m", "--model", "-mu", "--model-url", "-dr", "--docker-repo", "-hf", "-hfr", "--hf-repo", "-hff"),
        *("--hf-file", "-hft", "--hf-token", "--models-dir", "--models-preset", "--models-max"),
        *("--models-autoload", "--no-models-autoload", "--embd-gemma-default", "--fim-qwen-1.5b-default"),
        *("--fim-qwen-3b-default", "--fim-qwen-7b-default", "--fim-qwen-7b-spec", "--fim-qwen-14b-spec"),
        *("--fim-qwen-30b-default", "--gpt-oss-20b-default", "--gpt-oss-120b-default"),
        *("--vision-gemma-4b-default", "--vision-gemma-12b-default"),
    ),
    _TEMPLATE: (
        *("--jinja", "--no-jinja", "--chat-template", "--chat-template-file", "--chat-template-kwargs"),
        *("--reasoning-format", "--reasoning", "-rea", "--reasoning-effort", "--reasoning-budget"),
        *("--reasoning-budget-message", "--reasoning-preserve", "--no-reasoning-preserve", "--skip-chat-parsing"),
        *("--no-skip-chat-parsing", "--prefill-assistant", "--no-prefill-assistant"),
    ),
    _TOOLS: (
        *("--tools", "--tools-runtime", "--mcp-servers-config", "--mcp-servers-json", "-ag", "--agent"),
        *("--ui", "--webui", "--ui-config", "--webui-config", "--ui-config-file", "--webui-config-file"),
        *("--ui-mcp-proxy", "--webui-mcp-proxy", "--media-path"),
    ),
    _LOG: (
        *("--log-disable", "--log-file", "--log-jsonl", "--log-colors", "--log-prefix", "--no-log-prefix"),
        *("--log-timestamps", "--no-log-timestamps", "--log-prompts-dir"),
    ),
    _CHANGES: (
        *("-r", "--reverse-prompt", "--grammar", "--grammar-file", "-j", "--json-schema", "-jf", "--json-schema-file"),
    ),
    _SYNTHETIC: ("--spec-synth-len", "--spec-synth-rates"),
    _ENDS: ("-h", "--help", "--usage", "--version", "-cl", "--cache-list", "--completion-bash", "--list-devices"),
}
"""Maps the reasons why flags are refused to the flags."""
REASONS = {flag: reason for reason, flags in _REFUSED.items() for flag in flags}


class LlamaSetting:
    """The model and the options of a llama-server that the engine starts. They are checked before it is started."""

    def check(self, model_id: str | None, config: EngineConfig) -> None:
        """See `engines.check`."""
        problems = Problems()
        with problems:
            program(config)
        with problems:
            check_flags(config)
        with problems:
            check_options(config)
        with problems:
            check_pooling(config)
        with problems:
            adapters.check_files(config)
        with problems:
            if not (is_hub_reference(model_id) or is_fetched(model_id) or model_id in (None, model_files.DEMO)):
                self.prepare(model_id, config)
        problems.check()

    def prepare(self, model_id: str | None, config: EngineConfig) -> Path:
        """Return the directory of the model's tokenizer, chat template and configuration; see `engines.prepare`.

        Raises:
            ConfigError: there is no model, its file is incomplete, or it is not a model for the task.
        """
        file = self.weights(model_id)
        if config.task is Task.RERANK and not gguf.check_parts(file).has_head:
            reason = f"{file} is no reranker: it contains no matrix that scores texts"
            raise _wrong("option.task", f"option.task={config.options.task}: {reason}")
        return model_directory(file)

    @staticmethod
    def weights(model_id: str | None) -> Path:
        """Return the GGUF file of a model; see `engines.weights`.

        Raises:
            ConfigError: there is no GGUF file, or it is incomplete.
        """
        expected = "a .gguf file, or a directory that contains one"
        model = model_files.locate(model_id or model_files.DEMO, expected, parts=True)
        if model.kind != "gguf":
            raise ConfigError(f"{model.path}: the llamacpp engine reads only .gguf files")
        try:
            gguf.check_parts(model.path)
        except (OSError, ValueError) as error:
            raise ConfigError(str(error)) from None
        return model.path


def download(model_id: str, revision: str | None) -> Path:
    """Download a GGUF file from the hub.

    Raises:
        ConfigError: `model_id` names no file, the file does not exist, or the hub cannot be reached.
    """
    if (file := gguf_file(model_id)) is None:
        raise without_file(model_id, revision, f"{model_id}: the llamacpp engine serves one file of a hub model")
    return download_gguf(*file, revision, gguf.parts_pattern(file[1]), PROJECTOR_PATTERN)


def _wrong(key: str, message: str) -> ConfigError:
    return ConfigError(Problem("", key, message))


def program(config: EngineConfig) -> str:
    """Return the absolute path of llama-server.

    Raises:
        ConfigError: there is no such program.
    """
    name = config.engine_options.get("llama_server") or NAME
    path = llama_server.find(name)
    if path is None:
        what = llama_server.missing(name)
        raise _wrong(_PROGRAM, f"the llamacpp engine starts llama.cpp's llama-server, but {what}: {_WAYS}")
    return path


def check_flags(config: EngineConfig) -> None:
    """Raise ConfigError if `option.llama_server_args` contains flags that this handler sets, or that make no sense."""
    problems = Problems()
    for word in config.engine_options.get("llama_server_args", ()):
        # llama-server also reads underscores in long flags, but not --flag=value.
        flag = word.partition("=")[0].replace("_", "-") if word.startswith("--") else word
        reason = REASONS.get(flag)
        if reason is None and flag != word.replace("_", "-") and word.startswith("--"):
            reason = "llama-server reads no `=`, so write the flag and its value as two words"
        if reason is not None:
            problems.append(Problem("", _ARGUMENTS, f"{_ARGUMENTS}: {flag} is refused: {reason}"))
    problems.check()


def check_options(config: EngineConfig) -> None:
    """Raise ConfigError if general options are set that the engine does not support."""
    options, problems = config.options, Problems()
    if options.dtype != "auto":
        reason = "the .gguf file determines the precision of the weights"
        problems.append(Problem("", "option.dtype", f"option.dtype={options.dtype}: {reason}; omit the option"))
    if options.engine_isolation == "thread":
        key = "option.engine_isolation"
        reason = "the llamacpp engine runs only in a separate process, which ends together with llama-server"
        problems.append(Problem("", key, f"{key}=thread: {reason}; omit the option"))
    problems.check()


# -- sizes: slots, context, cache, threads -----------------------------------------------------------------------------

_GIB = 1 << 30
_CACHE_GIB = 4  # most memory of the KV cache if option.kv_cache_gib does not set it
_PROMPTS_GIB = 8  # most memory of the prompt cache, as llama-server itself
_LEAST_CONTEXT = 4096
_STEP, _STEP_OF_LARGE = 1024, 512
"""Numbers of tokens that are computed before running requests get their next tokens, and long prompts report progress.

The second is for files of more than 1 GiB per core, with which a step takes much longer. llama-server itself computes
2,048 tokens. Fewer tokens are less efficient if several prompts arrive at once, because they are split more often.
"""
_BATCH = 512  # tokens, as llama-server itself
_MAX_BATCH = 8192  # tokens; larger batches need much more memory
_MEMORY = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


class Sizes(NamedTuple):
    """The sizes of a server's caches.

    Attributes:
        num_slots: number of requests that run at once.
        num_tokens: number of tokens in the KV cache.
        shared: whether the slots share the KV cache.
        prompts_mib: most memory of the prompt cache, in MiB.
    """

    num_slots: int
    num_tokens: int
    shared: bool
    prompts_mib: int


def sizes(config: EngineConfig, header: gguf.Header, free: int | None) -> Sizes:
    """Return the sizes of a server's caches.

    Each slot has a cache for the context of a request if all of them fit into the memory for the KV cache. Otherwise,
    the slots share a cache that is as large as the memory allows.

    Args:
        header: that of the model.
        free: number of bytes of memory that are available; None if unknown.
    """
    options, num_slots = config.options, config.options.max_rolling_batch_size
    context = gguf.find_context_length(header.values.items()) or _LEAST_CONTEXT
    token_bytes = cache_bytes(header.values)
    left = None if free is None else max(free - gguf.size(config.weights_path, header.num_parts), 0)
    memory = options.kv_cache_gib * _GIB or min(_CACHE_GIB * _GIB, _CACHE_GIB * _GIB if left is None else left // 2)
    room = memory // token_bytes if token_bytes else num_slots * context
    context = options.max_model_len or min(context, max(room, _LEAST_CONTEXT))
    prompts = _PROMPTS_GIB * _GIB if left is None else min(_PROMPTS_GIB * _GIB, left // 4)
    if options.enable_prefix_caching is False:
        prompts = 0
    if num_slots * context <= room:
        return Sizes(num_slots, num_slots * context, False, prompts >> 20)
    return Sizes(num_slots, max(room, context), True, prompts >> 20)


def cache_bytes(values: Mapping[bytes, object]) -> int:
    """Return an upper estimate of the bytes in the KV cache for a token, in 16 bits; 0 if the header does not tell."""
    prefix = _prefix(values)

    def number(name: bytes) -> int:
        value = values.get(prefix + b"." + name)
        return value if isinstance(value, int) else 0

    layers, heads = number(b"block_count"), number(b"attention.head_count")
    listed = values.get(prefix + b".attention.head_count_kv")
    if isinstance(listed, list):
        num_heads = sum(count for count in listed if isinstance(count, int))
    else:
        num_heads = layers * (listed if isinstance(listed, int) else heads)
    width = number(b"embedding_length") // heads if heads else 0
    key, value = (number(b"attention." + name) or width for name in (b"key_length", b"value_length"))
    return 2 * num_heads * (key + value)


def _prefix(values: Mapping[bytes, object]) -> bytes:
    """Return the prefix of the names of a model's own values."""
    architecture = values.get(b"general.architecture")
    return architecture if isinstance(architecture, bytes) else b""


def free_memory() -> int | None:
    """Return the number of bytes of memory that this process may still use; None if unknown."""
    free: list[int] = []
    try:
        line = next(line for line in _MEMORY.read_text().splitlines() if line.startswith("MemAvailable:"))
        free.append(int(line.split()[1]) << 10)
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            free.append(max(int(limit) - int((_CGROUP / "memory.current").read_text()), 0))
    except (OSError, ValueError, StopIteration):
        pass  # not on Linux, or no cgroup
    return min(free, default=None)


def step_tokens(config: EngineConfig, num_parts: int) -> int:
    """Return the number of prompt tokens that a server computes before it responds to other requests.

    Args:
        num_parts: number of files into which the model is split.
    """
    num_cores = num_threads() or os.cpu_count() or 1
    is_large = gguf.size(config.weights_path, num_parts) > num_cores * _GIB
    return config.options.max_num_batched_tokens or (_STEP_OF_LARGE if is_large else _STEP)


def num_threads() -> int | None:
    """Return the number of cores that this process may use; None if it may use all of them.

    llama-server itself uses all of the machine's cores.
    """
    if is_digits(threads := os.environ.get("OMP_NUM_THREADS", "")) and int(threads) > 0:
        return int(threads)
    if not hasattr(os, "sched_getaffinity"):
        return None
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        if quota != "max":
            allowed = min(allowed, max(int(quota) // int(period), 1))
    except (OSError, ValueError):
        pass  # no cgroup
    return allowed if allowed < (os.cpu_count() or 1) else None


# -- the projector -----------------------------------------------------------------------------------------------------

PROJECTORS = frozenset({"-mm", "--mmproj", "-mmu", "--mmproj-url", "--no-mmproj", "--no-mmproj-auto"})
_BASE, _WIDTH = b"general.basename", b"clip.vision.projection_dim"
PROJECTOR_PATTERN = "*mmproj*[-_.][fF]16.gguf"
"""Names of projectors on the hub. Most repositories have one in 16 bits."""


# -- the server --------------------------------------------------------------------------------------------------------

_INHERITED = re.compile(
    r"PATH|HOME|TMPDIR|LANG|LC_\w+|TZ|XDG_\w+|LD_LIBRARY_PATH|LD_PRELOAD|DYLD_\w+|GGML_\w+|OMP_\w+|KMP_\w+|GOMP_\w+"
    r"|OPENBLAS_\w+|MKL_\w+|BLIS_\w+|CUDA_\w+|NVIDIA_\w+|HIP_\w+|ROCR_\w+|HSA_\w+|VK_\w+|SYCL_\w+|ONEAPI_\w+|ZE_\w+"
)
"""Matches the variables that a server inherits: those of the system, of GPUs and of numerical libraries."""


def environment(config: EngineConfig, key: str) -> dict[str, str]:
    """Return the environment of a server: variables of the system, and this handler's settings for llama-server.

    Args:
        key: the API key of the server, which other users of the machine do not see in the environment.
    """
    header, threads = gguf.check_parts(config.weights_path), num_threads()
    size = sizes(config, header, free_memory())
    variables: dict[str, object] = {
        "LLAMA_API_KEY": key,
        "LLAMA_ARG_CTX_SIZE": size.num_tokens,
        "LLAMA_ARG_N_PARALLEL": size.num_slots,
        "LLAMA_ARG_KV_UNIFIED": int(size.shared),
        "LLAMA_ARG_CACHE_RAM": size.prompts_mib,
        "LLAMA_ARG_BATCH": step_tokens(config, header.num_parts),
        "LLAMA_ARG_CTX_CHECKPOINTS": 0,  # b11434 can restore one that contains a token of another prompt
        "LLAMA_ARG_OFFLINE": 1,
        "LLAMA_ARG_UI": 0,
        "LLAMA_ARG_NO_WEBUI": 1,
    }
    if config.task is not Task.GENERATION:
        # A text must fit into one batch.
        context = config.options.max_model_len or gguf.find_context_length(header.values.items())
        batch = min(context or _BATCH, _MAX_BATCH)
        step = config.options.max_num_batched_tokens or batch
        variables |= {"LLAMA_ARG_EMBEDDINGS": 1, "LLAMA_ARG_BATCH": step, "LLAMA_ARG_UBATCH": batch}
        if config.task is Task.RERANK:
            variables["LLAMA_ARG_RERANKING"] = 1
        elif config.options.pooling != "auto":
            variables["LLAMA_ARG_POOLING"] = config.options.pooling
    if threads is not None:
        variables["LLAMA_ARG_THREADS"] = threads
    verbosity = 3 if is_verbose(config) else 2
    for prefix in ("LLAMA_ARG_LOG_", "LLAMA_LOG_"):  # the second is of older releases
        values = {"PREFIX": 1, "TIMESTAMPS": 0, "COLORS": "off", "VERBOSITY": verbosity}
        variables |= {f"{prefix}{name}": value for name, value in values.items()}
    inherited = {name: value for name, value in os.environ.items() if _INHERITED.fullmatch(name)}
    return {**inherited, **{name: str(value) for name, value in variables.items()}, **projector_variables(config)}


def is_verbose(config: EngineConfig) -> bool:
    """Return whether the log contains lines about each request, which contain no texts unless the flags say so."""
    flags = {"-v", "--verbose", "--log-verbose", "-lv", "--verbosity", "--log-verbosity"}
    chosen = not flags.isdisjoint(config.engine_options.get("llama_server_args", ()))
    return chosen or os.environ.get("LMI_LOG_LEVEL", "").upper() == "DEBUG"


def projector_variables(config: EngineConfig) -> dict[str, str]:
    """Return the variable with the path of the projector next to the model's file; empty if there is no projector."""
    file = None if _sets_projector(config) else find_projector(config.weights_path)
    return {} if file is None else {"LLAMA_ARG_MMPROJ": str(file.absolute())}


def has_projector(config: EngineConfig) -> bool:
    """Return whether the server has a projector for images."""
    if words := _sets_projector(config):
        return not words & {"--no-mmproj", "--no-mmproj-auto"}
    return config.weights is not None and find_projector(config.weights) is not None


def _sets_projector(config: EngineConfig) -> frozenset[str]:
    """Return the flags in `option.llama_server_args` that set or disable a projector."""
    return PROJECTORS.intersection(
        word.replace("_", "-") for word in config.engine_options.get("llama_server_args", ())
    )


def find_projector(file: Path) -> Path | None:
    """Return the projector beside a model's file, preferably in 16 bits, or None if there is none.

    A directory may contain several models. A projector belongs to those with its width and its base model.
    """
    projectors = dict[Path, Mapping[bytes, object]]()
    for path in model_files.gguf_files(file.parent):
        with contextlib.suppress(OSError, ValueError):
            values = gguf.values_before_tokenizer(path)
            if gguf.contents_of(values)[0] == "mmproj":
                projectors[path] = values
    if not projectors:
        return None
    model = gguf.check_parts(file).values
    name, width = (model.get(key) for key in (_BASE, _prefix(model) + b".embedding_length"))
    fitting = [
        (values.get(b"general.file_type") != 1, path)  # 1: F16
        for path, values in projectors.items()
        if values.get(_WIDTH) == width and values.get(_BASE) in (None, name)
    ]
    return min(fitting)[1] if fitting else None


def command(config: EngineConfig) -> list[str]:
    """Return the command that starts a server, without its address."""
    return [
        program(config),
        *("-m", str(config.weights_path.absolute())),
        *config.engine_options.get("llama_server_args", ()),
        *adapters.flags(config),
    ]


_LINE = re.compile(r"(?:[0-9.]+ )?([DIWE]) +(?=\S)")
_LEVELS = {"D": "DEBUG", "I": "INFO", "W": "WARNING", "E": "ERROR"}
_FAILS = re.compile(r"(?i)(\S+: )*error|terminate called|\S+: .*: version .* not found|.*(assert|abort|out of memory)")
"""Matches the errors that llama-server, its libraries and the system's loader write without a level."""
_RESPONDS = re.compile(r"srv +send_error:")
"""Matches the errors with which llama-server responds to a request."""


class ServerLog(LastError):
    """Chooses the lines of a server's output to log, and keeps the error that may end the server.

    Until the server has loaded its model, that is its first error. A server that has loaded continues after most errors
    of requests, so only recent errors may end it.

    An error of one request is not the server's. The server also sends it in response, and this handler reports it.

    Args:
        hidden: words that are masked.
        is_verbose: whether to log all lines.

    Attributes:
        is_loaded: whether the server has loaded its model. Its later warnings are about ordinary requests.
    """

    def __init__(self, *hidden: str, is_verbose: bool = False) -> None:
        super().__init__(*hidden, is_loaded=False)
        self._is_verbose = is_verbose

    def read(self, line: str) -> str:
        """Return a line as it should be logged, or "" if it should not."""
        match = _LINE.match(line)
        text = log_words(line[match.end() :] if match else line, self._hidden)
        level = _LEVELS[match[1]] if match else "ERROR" if _FAILS.match(line) else "INFO"
        if _RESPONDS.match(text):
            level = "DEBUG"
        if level == "ERROR":
            self.keep(text)
        is_of_start = not self.is_loaded and level != "DEBUG"
        is_logged = self._is_verbose or is_of_start or level == "ERROR"
        return f"{level} {NAME}: {text}" if is_logged else ""


class LlamaServer(OwnServer):
    """A llama-server that the engine starts.

    Attributes:
        key: its API key.
        log: reads its output.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.key = secrets.token_hex(32)
        self.log = ServerLog(self.key, is_verbose=is_verbose(config))
        super().__init__("http", NAME, command(config), environment(config, self.key), self.log)


def described(info: EngineInfo, props: bytes) -> EngineInfo:
    """Return the information about an engine with that of its llama-server, from the body of /props."""
    build = None
    with contextlib.suppress(ValueError, AttributeError):
        build = orjson.loads(props).get("build_info")
    return replace(info, name="llamacpp", version=str(build or NAME)[:100], device="this machine", dtype="gguf")


def start(config: EngineConfig) -> LlamaServer:
    """Start a llama-server, and wait until it listens or has ended. It loads its model after that.

    Raises:
        ConfigError: it ended.
    """
    for attempt in range(_ATTEMPTS):
        server = LlamaServer(config)
        try:
            server.start()
        except OSError as error:
            raise ConfigError(f"{NAME} cannot be started: {error}") from None
        while not server.listens() and server.exit_status is None:
            time.sleep(_POLL_INTERVAL)
        if not (failure := server.failure()):
            return server
        server.stop()
        if _PORT_TAKEN not in failure or attempt == _ATTEMPTS - 1:
            break
    raise ConfigError(f"{NAME} {failure}")
