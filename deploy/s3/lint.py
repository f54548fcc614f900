"""Check whether SageMaker and the engines can load model data, on this machine or in S3.

In uncompressed model data (S3DataSource), SageMaker does not allow object keys that end in a slash, keys that are both
a file and a directory, or names longer than 255 bytes. `lint` accepts a directory or a prefix as a list of `Entry` and
a `Read`.
"""

from __future__ import annotations

import enum
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import javaproperties

from deploy.errors import Refused
from deploy.s3.prefix import Entry
from handler.config.sources import decode_properties
from handler.core.text_files import placeholder

Read = Callable[[str], bytes]
"""A function that reads a small file by its name relative to the directory or prefix."""

_CONTROL = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")  # surrogates stand for bytes that are not UTF-8
_LONGEST = 255  # maximum size of a name, in bytes
_SKIPPED_DIRECTORIES = (".git", ".cache", "__pycache__", ".ipynb_checkpoints", ".huggingface", "__MACOSX")
_SKIPPED_NAMES = (".DS_Store", ".gitattributes", ".gitignore", "Thumbs.db", "desktop.ini")
_APPLE_DOUBLE = "._"  # prefix of the names of files in which macOS stores its own metadata
_POINTER = 200  # maximum size of a Git LFS pointer, in bytes
_DUPLICATES = (".bin", ".pth", ".pt", ".h5", ".msgpack", ".ckpt")  # formats that safetensors files replace
WEIGHTS = (".safetensors", ".gguf", ".bin", ".pth", ".pt", ".engine")
"""Suffixes of weight files."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tekken.json", "vocab.txt")
_ARCHIVES = (".tar.gz", ".tgz", ".tar", ".zip")
# A model on the hub, or one of its files.
_ELSEWHERE = re.compile(r"demo|\w[\w.-]*/\w[\w.-]*(/[\w./-]+\.gguf)?", re.ASCII)


class Level(enum.Enum):
    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True)
class Finding:
    """A problem with model data. `file` is the name of the file, or "" if the problem is not about one file."""

    level: Level
    file: str
    says: str
    advice: str

    def __str__(self) -> str:
        return f"{self.file}: {self.says}" if self.file else self.says


@dataclass(frozen=True)
class Listing:
    """The files of a directory to upload, and the problems with the directory."""

    files: tuple[Entry, ...]
    findings: tuple[Finding, ...]


def errors(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level is Level.ERROR]


def refuse(findings: Sequence[Finding], where: str) -> None:
    """Check that no finding is an error.

    Raises:
        Refused: there is an error. The advice lists all errors.
    """
    if wrong := errors(findings):
        lines = [f"  {finding}\n    {finding.advice}" for finding in wrong]
        raise Refused(f"{where} cannot be loaded: {wrong[0]}", "\n".join(lines))


def list_directory(directory: Path) -> Listing:
    """List the files to upload. Links to files are followed, because the hub cache consists of links.

    Raises:
        Refused: the path is not a directory.
    """
    if not directory.is_dir():
        raise Refused(f"{directory} is not a directory", "model.path is the directory with config.json and weights.")
    files: list[Entry] = []
    findings: list[Finding] = []

    def unreadable(error: OSError) -> None:
        path = Path(str(error.filename)).relative_to(directory).as_posix()
        findings.append(
            Finding(Level.ERROR, path, f"cannot be read: {error.strerror}", "Make it readable, or delete it.")
        )

    for root, directories, names in os.walk(directory, onerror=unreadable):
        here = Path(root).relative_to(directory)
        for name in sorted(directories):
            relative = (here / name).as_posix()
            if name in _SKIPPED_DIRECTORIES:
                directories.remove(name)
            elif (Path(root) / name).is_symlink():
                findings.append(
                    Finding(Level.ERROR, relative, "a link to a directory", "Replace it with the directory.")
                )
                directories.remove(name)
        directories.sort()
        for name in sorted(names):
            relative, path = (here / name).as_posix(), Path(root) / name
            if name in _SKIPPED_NAMES or name.startswith(_APPLE_DOUBLE):
                continue
            if fault := _fault(relative, path):
                findings.append(fault)
            else:
                files.append(Entry(relative, path.stat().st_size))
                if path.is_symlink() and not _within(path.resolve(), directory):
                    findings.append(_leads_out(relative, path.resolve()))
    return Listing(tuple(_without_duplicates(files)), tuple(findings))


def _fault(name: str, path: Path) -> Finding | None:
    """Return a finding that says why a file cannot be uploaded, or None if it can."""
    if _CONTROL.search(path.name):
        advice = "Rename it, as S3 may change such a name."
        return Finding(Level.ERROR, ascii(name), "a name with control characters or invalid UTF-8", advice)
    if not path.exists():
        return Finding(Level.ERROR, name, "a broken link", "Download the model again, or delete it.")
    return None if path.is_file() else Finding(Level.ERROR, name, "neither a file nor a directory", "Delete it.")


def _within(target: Path, directory: Path) -> bool:
    """Return whether the target is in the directory, or in the blobs of the hub cache, to which snapshots link."""
    top = directory.resolve()
    blobs = top.parent.parent / "blobs" if top.parent.name == "snapshots" else top
    return target.is_relative_to(top) or target.is_relative_to(blobs)


def _leads_out(name: str, target: Path) -> Finding:
    return Finding(
        Level.WARNING,
        name,
        f"a link to {target}, which is outside the directory but will be uploaded",
        "Check that the file belongs to the model and is not private.",
    )


def _without_duplicates(files: list[Entry]) -> list[Entry]:
    """Omit weights in other formats if there are safetensors files, as they would double the upload and the storage."""
    if not any(entry.name.endswith(".safetensors") and "/" not in entry.name for entry in files):
        return files
    return [
        entry
        for entry in files
        if not entry.name.endswith(_DUPLICATES) or PurePosixPath(entry.name).name.startswith("openvino")
    ]


def lint(entries: Sequence[Entry], read: Read, *, isolated: bool = False, trusts_code: bool = False) -> list[Finding]:
    """Return all problems with model data.

    Args:
        entries: all files or objects.
        read: function that reads a small file of `entries`.
        isolated: whether the container is isolated from the network, and therefore from the hub (network.isolated).
        trusts_code: whether the model's own code may run (options.trust_remote_code).
    """
    return [
        *lint_layout(entries),
        *_content({entry.name: entry.size for entry in entries}, read, isolated, trusts_code),
    ]


def lint_layout(entries: Sequence[Entry]) -> Iterator[Finding]:
    """Yield the problems with names and sizes."""
    names = {entry.name for entry in entries}
    parents = {parent.as_posix() for name in names for parent in PurePosixPath(name.rstrip("/")).parents}
    for entry in entries:
        if entry.name.endswith("/") or entry.name == "":
            yield Finding(
                Level.ERROR,
                entry.name or "the prefix itself",
                "a 0-byte object that represents a folder" if entry.size == 0 else "a name that ends in a slash",
                "Delete the object: SageMaker cannot load it. The S3 console creates such objects.",
            )
        elif entry.name in parents:
            yield Finding(Level.ERROR, entry.name, "both a file and a directory", "Delete the object, or rename it.")
        elif entry.size == 0:
            yield Finding(Level.WARNING, entry.name, "empty", "Check that the file was downloaded completely.")
        for part in entry.name.split("/"):
            if len(part.encode()) > _LONGEST:
                yield Finding(Level.ERROR, entry.name, f"a name of more than {_LONGEST} bytes", "Rename it.")
        if entry.name.endswith(_ARCHIVES):
            yield Finding(Level.WARNING, entry.name, "an archive, which is not unpacked", "Unpack it.")


def _content(sizes: dict[str, int], read: Read, isolated: bool, trusts_code: bool) -> Iterator[Finding]:
    if not sizes:
        yield Finding(Level.ERROR, "", "it contains no files", "Check model.path or model.s3.")
        return
    top = {name for name in sizes if "/" not in name}
    has_weights = any(name.endswith(WEIGHTS) for name in sizes)
    may_name_model = "serving.properties" in top and "config.json" not in top
    elsewhere = _model_elsewhere(read) if may_name_model else None
    yield from _pointers(sizes, read)
    if not has_weights and elsewhere is None:
        yield Finding(Level.ERROR, "", "there are no weights", "Add the model's *.safetensors files, or a .gguf file.")
    if isolated and elsewhere not in (None, "demo"):
        says = f"names the model {elsewhere}, which an isolated container cannot download"
        yield Finding(Level.ERROR, "serving.properties", says, "Add the model's files next to it.")
    if any(name.endswith(".gguf") for name in top) or may_name_model:
        return  # a GGUF file is complete by itself
    if "config.json" not in top:
        yield _without_config(sizes)
        return
    if not top & set(_TOKENIZERS) and "openvino_tokenizer.xml" not in top:
        yield Finding(
            Level.ERROR if isolated else Level.WARNING,
            "tokenizer.json",
            "missing, and there is no other tokenizer",
            "Add the model's tokenizer files.",
        )
    config = _json(read, "config.json")
    if config is None:
        yield Finding(Level.ERROR, "config.json", "not JSON", "Download it again.")
        return
    yield from _code(config, sizes, isolated, trusts_code)
    yield from _shards(sizes, read)


def _pointers(sizes: dict[str, int], read: Read) -> Iterator[Finding]:
    for name, size in sizes.items():
        if 0 < size <= _POINTER and name.endswith((*WEIGHTS, *_TOKENIZERS)) and (reason := placeholder(read(name))):
            yield Finding(Level.ERROR, name, reason, "It comes from a clone without Git LFS: run `git lfs pull` there.")


def _without_config(sizes: dict[str, int]) -> Finding:
    below = [name for name in sizes if name.endswith("/config.json")]
    advice = f"It is in {PurePosixPath(below[0]).parent}/: use that directory." if below else "Add it."
    return Finding(Level.ERROR, "config.json", "missing", advice)


def _model_elsewhere(read: Read) -> str | None:
    """Return the hub model (or `demo`) that serving.properties names, or None if it names a path or no model."""
    try:
        name = javaproperties.loads(decode_properties(read("serving.properties"))).get("option.model_id")
    except ValueError:
        return None  # the check of the options reports problems of the file
    return name if name and _ELSEWHERE.fullmatch(name) else None


def _code(config: dict[str, Any], sizes: dict[str, int], isolated: bool, trusts_code: bool) -> Iterator[Finding]:
    """Check the Python files that `auto_map` names: `module.Class`, or `REPO--module.Class` in another repository."""
    auto_map = config.get("auto_map")
    if not isinstance(auto_map, dict):
        return
    modules = [item for value in auto_map.values() for item in (value if isinstance(value, list) else [value]) if item]
    if not trusts_code:
        yield Finding(
            Level.WARNING,
            "config.json",
            "the model comes with its own code, which is not run",
            "Set options.trust_remote_code: true if the model needs its code and you trust it.",
        )
    for item in sorted(set(map(str, modules))):
        repository, _, local = item.rpartition("--")
        file = f"{local.rpartition('.')[0].replace('.', '/')}.py"
        if repository and isolated:
            yield Finding(
                Level.ERROR,
                "config.json",
                f"its code must be downloaded from {repository}, which an isolated container cannot do",
                f"Put {file} next to config.json, and remove '{repository}--' from auto_map.",
            )
        elif not repository and file not in sizes:
            yield Finding(
                Level.ERROR if trusts_code or isolated else Level.WARNING,
                file,
                "missing, but auto_map in config.json names it",
                "Download the model's .py files, too.",
            )


def _shards(sizes: dict[str, int], read: Read) -> Iterator[Finding]:
    index = "model.safetensors.index.json"
    if index not in sizes:
        return
    index_json = _json(read, index)
    weight_map = index_json.get("weight_map") if index_json is not None else None
    if not isinstance(weight_map, dict):
        yield Finding(Level.ERROR, index, "not a valid index of weights", "Download it again.")
        return
    for shard in sorted(set(map(str, weight_map.values())) - set(sizes)):
        yield Finding(Level.ERROR, shard, "missing, but the index names it", "Download the model completely.")


def _json(read: Read, name: str) -> dict[str, Any] | None:
    try:
        value = json.loads(read(name))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
