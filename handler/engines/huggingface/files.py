"""Checks, downloads and converts the files of Hugging Face models, and reads their tensors."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from handler.config import gguf, model_files
from handler.config.model_files import visible
from handler.config.options.option import beginning
from handler.core.errors import ConfigError, Problems
from handler.core.secrets import TOKENS
from handler.engines import downloads, s3
from handler.engines.base import EngineConfig
from handler.engines.downloads import fingerprint, make_once, run_converter
from handler.engines.huggingface.tokenizer import HfTokenizer, mistral_eos_id

log = logging.getLogger("handler.engine")

_JSON_FILES = (
    "config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.json",
)  # fmt: skip
_TOKENIZERS = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json", "*.tiktoken",
)  # fmt: skip
_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_MAX_HEADER = 100_000_000  # bytes; the limit of safetensors itself


def check_tokenizer(directory: Path) -> None:
    """Raise ConfigError if the directory has no tokenizer, or if a tokenizer file or a JSON file in it is broken."""
    check_json(directory, *_JSON_FILES)
    custom_code = model_files.read_json(directory / "tokenizer_config.json").get("auto_map")
    paths = [path for name in _TOKENIZERS for path in model_files.visible(directory, name)]
    if not custom_code and not paths:
        raise ConfigError(f"{directory} has no tokenizer: none of {', '.join(_TOKENIZERS)}")
    for path in paths:
        model_files.check_content(path)


def has_tokenizer(directory: Path) -> bool:
    """Return whether a directory contains the files of a tokenizer."""
    return any(model_files.visible(directory, name) for name in _TOKENIZERS)


def check_checkpoint(directory: Path) -> None:
    """Raise ConfigError if a file is missing, truncated or in the wrong format."""
    check_tokenizer(directory)
    for path in weight_files(directory):
        if not path.is_file():
            raise ConfigError(f"{path} is missing, but {_INDEX} lists it")
    for path in (weights := model_files.visible(directory, "*.safetensors")):
        check_safetensors(path)
    if not weights:
        for path in model_files.visible(directory, "*.bin"):
            model_files.check_content(path)


def weight_files(directory: Path) -> list[Path]:
    """Return the weight files that transformers reads: `model.safetensors`, or else the files listed in the index.

    Raises:
        ConfigError: the index lists a file outside the directory.
    """
    if (directory / _WHOLE).is_file():  # transformers ignores an index beside it
        return [directory / _WHOLE]
    weight_map = model_files.read_json(directory / _INDEX).get("weight_map")
    names = {str(name) for name in weight_map.values()} if isinstance(weight_map, dict) else ()
    if outside := [name for name in sorted(names) if not downloads.is_inner_path(name)]:
        raise ConfigError(f"{directory / _INDEX} lists {outside[0]!r}, which is not a file of this directory")
    return [directory / name for name in sorted(names)]


def check_json(directory: Path, *names: str) -> None:
    """Raise ConfigError if a JSON file that transformers reads exists but is not an object."""
    for name in names:
        model_files.read_json(directory / name, mark=False)


def check_safetensors(path: Path) -> None:
    """Raise ConfigError if the file does not have the size that its header describes."""
    size = path.stat().st_size
    tensors, begin = read_header(path)
    try:
        needed = begin + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    except (TypeError, KeyError, IndexError):
        raise _no_header(path) from None
    if size != needed:
        how = "is cut short" if size < needed else "is broken"
        raise ConfigError(f"{path} {how}: it has {size:,} bytes, but its header describes {needed:,}")


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, by tensor name, and the offset of the tensors' data in bytes.

    The file contains the length of the header in 8 bytes, the header as JSON, and the tensors
    (github.com/huggingface/safetensors).

    Raises:
        ConfigError: the file is truncated, or has no valid header.
    """
    model_files.check_content(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ConfigError(f"{path} is cut short, or not a safetensors file: it ends inside its header")
        if length > _MAX_HEADER:
            raise ConfigError(f"{path} is broken: it specifies a header of {length:,} bytes")
        try:
            tensors = dict(json.loads(file.read(length)))
        except (ValueError, TypeError, RecursionError):
            raise _no_header(path) from None
    tensors.pop("__metadata__", None)
    return tensors, 8 + length


def _no_header(path: Path) -> ConfigError:
    return ConfigError(f"{path} is broken: its header is not a safetensors header")


# -- models of the Hugging Face hub: their names, and their files in huggingface_hub's cache ---------------------------


OTHER_FORMATS = (
    "*.pth", "*.ckpt", "*.msgpack", "*.h5", "*.ot", "*.tflite", "*.gguf", "*.GGUF", "*.onnx", "*.onnx_data",
    "*.mlmodel",
    "original/*", "onnx/*", "openvino/*", "coreml/*",
)  # fmt: skip
"""Patterns for files that contain the same weights in formats that none of the engines reads from a directory.

They do not include Mistral's `consolidated*.safetensors`, which vLLM reads instead of `model*.safetensors`.
"""

TORCH = ("pytorch_model*.bin",)
"""Patterns for files with PyTorch weights, in checkpoints that predate safetensors."""

DESCRIPTIONS = ("*.json", "*.jinja", "*.txt", "*.model", "*.xml")
"""Patterns for all files except weights: tokenizers, templates and configurations, including OpenVINO's."""

_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*/?|(?!.*\.(?i:gguf)$)\w[\w.-]*", re.ASCII)
_GGUF = re.compile(r"(\w[\w.-]*/\w[\w.-]*)/([\w./-]+\.(?i:gguf))", re.ASCII)

_CACHED = re.compile(r"""(?:W/)?"?[A-Za-z0-9](?:[A-Za-z0-9._+=-]{0,126}[A-Za-z0-9=])?"?""")
"""Matches commits and ETags, by which huggingface_hub names files. The hub's have 40 or 64 hexadecimal digits."""

_BESIDE = re.compile(r"mmproj|-(?!00001-)[0-9]{5}-of-[0-9]{5}\.")
"""Matches GGUF files that are read beside another one: projectors, and later parts of a model."""
_USUAL = "Q4_K_M"  # the quantization that llama.cpp prefers too

_ERRNO = re.compile(r"^\[Errno -?[0-9]+\] ")
_SECRET = re.compile(rf"\bhf_\w{{8,}}|(?<=Bearer )\S+|(?<=://)[^/\s@]+(?=@)|{TOKENS}")
"""Matches secrets that must be hidden: tokens, which a hub may include in its responses, and credentials in URLs."""


def is_hub_name(model_id: str | None) -> TypeGuard[str]:
    """Return whether a name refers to a model on the hub (`owner/model`, or `model` for old models), not to a path."""
    if model_id is None or model_id == model_files.DEMO or Path(model_id).exists():
        return False
    return _NAME.fullmatch(model_id) is not None


def is_fetched(model_id: str | None) -> bool:
    """Return whether the model is downloaded at startup.

    Raises:
        ConfigError: an S3 URL is invalid, or boto3 is missing.
    """
    if s3.is_url(model_id):
        s3.check(model_id)
        return True
    return is_hub_name(model_id)


def gguf_file(model_id: str | None) -> tuple[str, str] | None:
    """Split `owner/model/file.gguf` into the model and the file. Return None for other names and for local paths."""
    if model_id is None or Path(model_id).exists():
        return None
    # It may also be a local path whose file is missing.
    match = None if Path(model_id).parent.exists() else _GGUF.fullmatch(model_id)
    return None if match is None else (match[1], match[2])


def is_hub_reference(model_id: str | None) -> TypeGuard[str]:
    """Return whether a name refers to a hub model (`owner/model`) or one of its files (`owner/model/file.gguf`)."""
    return is_hub_name(model_id) or gguf_file(model_id) is not None


def download_checkpoint(name: str, revision: str | None, *, torch: bool = True) -> Path:
    """Download a checkpoint. PyTorch weights are included only if `torch` is true and there are no safetensors."""
    directory = download(name, revision, without=(*OTHER_FORMATS, *TORCH))
    return download(name, revision) if torch and not model_files.visible(directory, "*.safetensors") else directory


def download_descriptions(name: str, revision: str | None) -> Path:
    """Download all files except the weights."""
    return download(name, revision, only=DESCRIPTIONS)


def download_gguf(name: str, file: str, revision: str | None, *beside: str) -> Path:
    """Download a GGUF file of a hub model.

    Args:
        beside: patterns for further files to download if they exist.

    Raises:
        ConfigError: the hub does not have the file, or cannot be reached.
    """
    path = download(name, revision, only=[file, *beside], without=()) / file
    if not path.is_file():
        raise ConfigError(f"{name} on the hub has no file {file!r}")
    return path


def without_file(name: str, revision: str | None, reason: str) -> ConfigError:
    """Return the error for the name of a hub model of which one GGUF file must be named. It lists these files."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    names: list[str] = []
    check_responses()
    with contextlib.suppress(HTTPError, OSError, ValueError, LookupError, TypeError, AttributeError):
        listed = HfApi().list_repo_files(name, revision=revision)
        names = [file for file in sorted(listed) if gguf.is_gguf_name(file) and not _BESIDE.search(file)]
    first = next((file for file in names if _USUAL in file.upper()), next(iter(names), "FILE.gguf"))
    others = f"; its files are {', '.join(names)}" if len(names) > 1 else ""
    return ConfigError(f"{reason}; name a GGUF file, such as {name}/{first}{beginning(others)}")


def download(
    name: str, revision: str | None, *, only: Sequence[str] | None = None, without: Sequence[str] = OTHER_FORMATS
) -> Path:
    """Download a hub model, except for files that huggingface_hub has already cached, and return its directory.

    Args:
        revision: branch, tag or commit; None means the main branch.
        only: patterns for the files to download; None means all files.
        without: patterns for the files to omit.

    Raises:
        ConfigError: the hub does not have the model, or cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    check_responses()
    if not sys.stderr.isatty():
        disable_progress_bars()
    for handler in logging.getLogger("huggingface_hub").handlers:
        handler.addFilter(hide_secrets)
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=None if only is None else list(only),
                ignore_patterns=list(without),
            )
        )
    except (json.JSONDecodeError, LookupError, TypeError, AttributeError) as error:  # the response is not a hub's JSON
        raise _cannot_fetch(name, f"HF_ENDPOINT does not respond like a hub: {error!r}") from None
    # HTTPError is the base of the HTTP library's errors. OSError comes from connections or the cache, ValueError from
    # wrong names.
    except (HTTPError, OSError, ValueError) as error:
        if (failed := _connection_error(error, HTTPError)) is not None:
            raise _cannot_fetch(name, f"it cannot be reached ({_ERRNO.sub('', str(failed))})") from None
        reason, cause = str(error), error.__cause__
        if isinstance(error, LocalEntryNotFoundError) and str(cause) not in reason:  # the status is in the cause
            reason = f"{cause} {reason}"
        raise _cannot_fetch(name, reason) from None


def check_responses() -> None:
    """Make huggingface_hub raise ValueError if a response contains a path outside the model's part of its cache.

    The library joins paths from commits, ETags and file names as a hub or a mirror sends them.
    """
    from huggingface_hub.utils import _http

    if hasattr(_http, "set_client_factory"):  # since 1.0

        def client() -> Any:
            result = _http.default_client_factory()
            result.event_hooks["response"].append(check_response)
            return result

        _http.set_client_factory(client)
    else:

        def session() -> Any:
            result = _http._default_backend_factory()
            result.hooks["response"].append(lambda response, **more: check_response(response))
            return result

        _http.configure_http_backend(session)


def check_response(response: Any) -> None:
    """Raise ValueError if a hub's response contains a commit, an ETag or a file name that is not a path in the cache.

    Args:
        response: response of httpx or requests.
    """
    headers, request = response.headers, response.request
    names = {"commit": headers.get("x-repo-commit")}
    if request.method == "HEAD":  # the body may come from another server, whose ETag names no file
        names |= {"ETag": headers.get("etag"), "linked ETag": headers.get("x-linked-etag")}
    for kind, name in names.items():
        if name is not None and not _CACHED.fullmatch(name):
            raise ValueError(f"HF_ENDPOINT does not respond like a hub: {name!r} cannot be the {kind} of a file")
    if "/api/" not in str(request.url) or "json" not in headers.get("content-type", ""):
        return
    if hasattr(response, "read"):  # httpx calls this function before it reads the body
        response.read()
    _check_names(response.json())


def _check_names(value: Any) -> None:
    """Check the description of a model on the hub, or a list of its files.

    Raises:
        ValueError: the commit or the name of a file is not valid.
    """
    entries = value.get("siblings") if isinstance(value, dict) else value
    commit = value.get("sha") if isinstance(value, dict) else None
    if commit is not None and not _CACHED.fullmatch(str(commit)):
        raise ValueError(f"HF_ENDPOINT does not respond like a hub: {commit!r} cannot be a commit")
    for entry in entries or ():
        name = str(entry.get("path", entry.get("rfilename", "-")))
        if not downloads.is_inner_path(name):
            raise ValueError(f"the hub's file name {name!r} is not a valid file path")


@contextlib.contextmanager
def first_bytes(name: str, file: str, revision: str | None, count: int) -> Iterator[Iterable[bytes]]:
    """Read the beginning of a file of a hub model in parts, from the cache or else from the hub.

    Args:
        revision: branch, tag or commit; None means the main branch.
        count: maximum number of bytes. A hub that does not support ranges may send more.

    Raises:
        ConfigError: the hub does not have the file, or cannot be reached.
    """
    from huggingface_hub import hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.utils import build_hf_headers, get_session

    cached = try_to_load_from_cache(name, file, revision=revision)
    if isinstance(cached, str):
        with open(cached, "rb") as source:
            yield [source.read(count)]
        return
    url, headers = hf_hub_url(name, file, revision=revision), {**build_hf_headers(), "Range": f"bytes=0-{count - 1}"}
    try:
        with get_session().stream("GET", url, headers=headers, follow_redirects=True) as response:
            response.raise_for_status()
            yield response.iter_bytes(1 << 20)
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        raise _cannot_fetch(name, str(error)) from None


def cached() -> list[Any]:
    """Return a `CachedRepoInfo` for each model in huggingface_hub's cache, or [] without the package or a cache."""
    try:
        from huggingface_hub import scan_cache_dir
        from huggingface_hub.errors import CacheNotFound
    except ModuleNotFoundError:
        return []
    try:
        return [repo for repo in scan_cache_dir().repos if repo.repo_type == "model"]
    except CacheNotFound:
        return []


def _connection_error(error: BaseException | None, kind: type[Exception]) -> BaseException | None:
    """Return the HTTP library's connection error that caused `error`, or None if the cause was a server's response."""
    while error is not None and not (isinstance(error, kind) and getattr(error, "response", None) is None):
        error = error.__cause__ or error.__context__
    return error


def hide_secrets(record: logging.LogRecord) -> bool:
    record.msg, record.args = _SECRET.sub("***", record.getMessage()), ()
    return True


def _cannot_fetch(name: str, reason: str) -> ConfigError:
    directory = name.rpartition("/")[2]
    reason = beginning(" ".join(_SECRET.sub("***", reason).split()))
    return ConfigError(
        f"there is no directory {name!r} here, and the model cannot be fetched from the hub: {reason}"
        f"{'' if reason.endswith('.') else '.'} "
        f"Where the hub can be reached, run: hf download {name} --local-dir {directory}; "
        f"then copy the directory, and run: lmi serve ./{directory}"
    )


Download = Callable[[str, "str | None"], Path]
"""Type of a function that downloads a model at a revision, and returns the model's directory or file. It must be a
module-level function, because another process calls it.
"""


def fetch(
    model_id: str | None,
    config: EngineConfig,
    download: Download = download_checkpoint,
    is_name: Callable[[str | None], TypeGuard[str]] = is_hub_name,
) -> str | None:
    """Download a model from the hub or S3; see `engines.fetch`.

    From S3, all files are downloaded, or only descriptions if `download` is `download_descriptions`.

    Args:
        download: function that downloads a model from the hub unless it is cached.
        is_name: function that returns whether a name refers to a model on the hub.

    Raises:
        ConfigError: the model cannot be downloaded, or the download process died or was stopped.
    """
    if s3.is_url(model_id):
        only = DESCRIPTIONS if download is download_descriptions else ()
        return downloads.fetch(s3.download, model_id, list(only))
    if not is_name(model_id):
        return model_id
    model_id = model_id.rstrip("/")  # the hub does not accept a slash at the end
    log.info("fetching %s from the hub, unless it is in the cache", model_id)
    return downloads.fetch(download, model_id, config.engine_options.get("revision"))


fetch_descriptions = partial(fetch, download=download_descriptions)


# -- Hugging Face model directories for the GPU engines: location, conversion of the demo model, end tokens ------------


TORCH_DTYPES = {"auto": "auto", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Maps each value of `option.dtype` to its name in torch."""

_NEEDED = ("config.json", "model.safetensors", "tokenizer.json")
_RECIPE = b"hf 2"  # part of every fingerprint: change it with _FROM_GGUF

# transformers can make a tokenizer from the GGUF file. But this tokenizer does not split digits, has another end token,
# and decodes like SentencePiece, so that xgrammar before 0.2.8 does not recognize spaces. transformers would also save
# some weights twice, because the embeddings and the last matrix are the same.
_FROM_GGUF = """
import json, sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
source, target = Path(sys.argv[1]), Path(sys.argv[2])
read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
given = read.config.to_dict()
kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "rope_theta",
        "bos_token_id", "eos_token_id", "pad_token_id")
config = LlamaConfig(**{name: given[name] for name in kept if given.get(name) is not None}, tie_word_embeddings=True)
model = LlamaForCausalLM(config)
missing, unexpected = model.load_state_dict(read.state_dict(), strict=False)
assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
model.tie_weights()
model.to(torch.bfloat16).save_pretrained(target)
made = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
made.eos_token = made.convert_ids_to_tokens(config.eos_token_id)
made.save_pretrained(target)
file = target / "tokenizer.json"
tokenizer = json.loads(file.read_text())
bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
    {"type": "Digits", "individual_digits": True}, bytes]}
tokenizer["decoder"], tokenizer["model"]["byte_fallback"] = bytes, False
file.write_text(json.dumps(tokenizer))
"""

_EXPECTED = f"a Hugging Face model directory, a hub's name (owner/model), or {model_files.DEMO!r}"


def prepare_checkpoint(model_id: str | None) -> Path:
    """Return the directory of `option.model_id`. If it is the demo model, convert it unless this has been done before.

    Raises:
        ConfigError: the model does not exist, or is not a directory in Hugging Face's format.
    """
    if model_id is None or model_id == model_files.DEMO:
        return _demo_checkpoint(model_files.locate(model_files.DEMO).path)
    return find_checkpoint(model_id)


def find_checkpoint(model_id: str) -> Path:
    """Check the directory of `option.model_id`, and return it.

    Raises:
        ConfigError: the model does not exist, is not a directory in Hugging Face's format, or has a broken file.
    """
    directory = Path(model_id)
    mistrals = (directory / "params.json").is_file() and not (directory / "config.json").exists()
    if mistrals or ((directory / "config.json").is_file() and model_files.visible(directory, "*.safetensors")):
        # Other files in the directory do not matter. vLLM also reads Mistral's own format.
        model = model_files.ModelFiles("huggingface", directory)
    else:
        model = model_files.locate(model_id, _EXPECTED)
    if model.kind != "huggingface":
        raise ConfigError(f"{model.path} is a {model.kind} model; this engine serves Hugging Face model directories")
    check_checkpoint(model.path)
    return model.path


def check_model(model_id: str | None, config: EngineConfig, arguments: Callable[[EngineConfig], object]) -> None:
    """Check the model's directory and the engine's arguments.

    Args:
        arguments: function that returns the engine's arguments, and raises ConfigError if an option is invalid.

    Raises:
        ConfigError: the directory or an option is invalid; the message lists the problems of both.
    """
    problems, model = Problems(), None
    with problems:
        if model_id not in (None, model_files.DEMO) and not is_fetched(model_id):
            model = find_checkpoint(model_id)
    with problems:
        arguments(replace(config, model=model))
    problems.check()


def _demo_checkpoint(source: Path) -> Path:
    """Convert SmolLM2 to a Hugging Face directory in bf16. This needs torch, transformers, gguf and accelerate."""

    def make(directory: Path, lock: int) -> None:
        log.info("converting the demo model to a Hugging Face directory, once; this takes half a minute")
        run_converter(_FROM_GGUF, source, directory, lock, _NEEDED, "Hugging Face's format")

    return make_once(model_files.cache_directory() / "converted" / fingerprint(_RECIPE, [source]), make)


def load_tokenizer(config: EngineConfig, make: type[HfTokenizer] = HfTokenizer) -> HfTokenizer:
    return make(
        config.model_path,
        trust_remote_code=bool(config.engine_options.get("trust_remote_code")),
        chat_template=config.chat_template,
        content_format=config.engine_options.get("chat_template_content_format", "auto"),
    )


def eos_ids(config: EngineConfig) -> frozenset[int]:
    """Return the ids that end a response, for all engines.

    These are the tokenizer's end token, and the ids in generation_config.json or, if it has none, in config.json. For a
    GGUF file, they are the end ids in its header, which a directory converted from the file has in
    generation_config.json.
    """
    if gguf.is_gguf_name(config.model_path):
        return gguf.end_ids(config.model_path)
    eos_id = tokenizer_eos_id(config.model_path)
    of_tokenizer = frozenset() if eos_id is None else frozenset({eos_id})
    generation = model_files.file_values(config.options, config.model)
    for values in (generation, model_files.read_text_config(config.model_path)):
        if (ids := values.get("eos_token_id")) is not None:
            ids = ids if isinstance(ids, list) else [ids]
            return of_tokenizer | {id for id in ids if isinstance(id, int) and id >= 0}
    return of_tokenizer


def tokenizer_eos_id(model: Path) -> int | None:
    """Return the EOS id from tokenizer_config.json, special_tokens_map.json or tekken.json; None if unknown."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = model_files.read_json(model / name).get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        if text is not None:
            tokenizer = model_files.read_json(model / "tokenizer.json")
            added = {token_entry["content"]: token_entry["id"] for token_entry in tokenizer.get("added_tokens") or ()}
            vocabulary = (tokenizer.get("model") or {}).get("vocab")
            id = {**(vocabulary if isinstance(vocabulary, dict) else {}), **added}.get(text)
            return None if id is None else int(id)
    return mistral_eos_id(model)


# -- the tensors of a checkpoint's safetensors files, mapped into memory: a read touches only its own tensor -----------


TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8"}
"""Weight types, with their numpy types. BF16 is the upper half of float32."""


class Tensor(NamedTuple):
    """The location of a tensor. `start` and `end` are offsets within the file, in bytes."""

    path: Path
    kind: str
    shape: tuple[int, ...]
    start: int
    end: int


class Tensors:
    """The tensors of a directory: in `model.safetensors`, in the files of the index, or else in all safetensors files.

    Raises:
        ConfigError: a file has no header, or a tensor's position, type and shape contradict each other.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._places: dict[str, Tensor] = {}
        for path in weight_files(directory) or visible(directory, "*.safetensors"):
            header, begin = read_header(path)
            self._places |= {name: _tensor(path, name, entry, begin) for name, entry in header.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def location(self, name: str) -> Tensor:
        """Return the location of a tensor.

        Raises:
            ConfigError: there is no tensor with this name.
        """
        if name not in self._places:
            raise ConfigError(f"{self.directory}: its safetensors files have no tensor {name}")
        return self._places[name]

    def weight(self, name: str) -> Tensor:
        """Return the location of a weight.

        Raises:
            ConfigError: there is no tensor with this name, or its type is not supported.
        """
        tensor = self.location(name)
        if tensor.kind not in TYPES:
            raise ConfigError(f"{tensor.path}: {name}: dtype {tensor.kind} must be one of {', '.join(TYPES)}")
        return tensor

    def raw(self, name: str) -> Any:
        """Map a weight into memory as it is stored, with BF16 numbers as 16-bit integers. See `weight` for errors."""
        import numpy

        tensor = self.weight(name)
        if tensor.start == tensor.end:
            return numpy.zeros(tensor.shape, TYPES[tensor.kind])
        data = numpy.memmap(tensor.path, numpy.uint8, "c", tensor.start, (tensor.end - tensor.start,))
        return data.view(TYPES[tensor.kind]).reshape(tensor.shape)

    def __getitem__(self, name: str) -> Any:
        """Read a tensor as float32."""
        return as_float32(self.raw(name), self.location(name).kind)


def as_float32(data: Any, kind: str) -> Any:
    """Convert stored numbers to float32."""
    import numpy

    if kind == "BF16":
        return (data.astype(numpy.uint32) << 16).view(numpy.float32)
    return data.astype(numpy.float32)


def _tensor(path: Path, name: str, entry: Any, data: int) -> Tensor:
    try:
        kind, shape = str(entry["dtype"]), tuple(entry["shape"])
        first, end = entry["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, first, end))
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise ConfigError(f"{path} is broken: its header does not give the position and shape of {name}")
    if kind in TYPES:
        needed = math.prod(shape) * int(TYPES[kind][-1])
        if needed != end - first:
            raise ConfigError(
                f"{path} is broken: {name} has {end - first:,} bytes, but {kind} {list(shape)} needs {needed:,}"
            )
    return Tensor(path, kind, shape, data + first, data + end)
