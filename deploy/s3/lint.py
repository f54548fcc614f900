"""Check model data against what SageMaker and the engines can load, on this machine or in S3.

SageMaker has rules for uncompressed model data (S3DataSource). No 0-byte object ends in a slash, no key is both file
and directory, no name has more than 255 bytes. A directory and a prefix are both a list of `Entry`s and a `Read`.
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
from handler.config.loader import decode_properties
from handler.core.text_files import placeholder

Read = Callable[[str], bytes]
"""Read a small file by its name below the directory or prefix."""

_CONTROL = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")  # surrogates: bytes that are no UTF-8
_LONGEST = 255  # bytes of a name
_SKIPPED_DIRECTORIES = (".git", ".cache", "__pycache__", ".ipynb_checkpoints", ".huggingface", "__MACOSX")
_SKIPPED_NAMES = (".DS_Store", ".gitattributes", ".gitignore", "Thumbs.db", "desktop.ini")
_APPLE_DOUBLE = "._"  # begins the files in which macOS keeps what other systems do not
_POINTER = 200  # bytes that a Git LFS pointer has at most
_DUPLICATES = (".bin", ".pth", ".pt", ".h5", ".msgpack", ".ckpt")  # formats that safetensors replace
WEIGHTS = (".safetensors", ".gguf", ".bin", ".pth", ".pt", ".engine")
"""Suffixes of the names of weight files."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tekken.json", "vocab.txt")
_ARCHIVES = (".tar.gz", ".tgz", ".tar", ".zip")
_ELSEWHERE = re.compile(r"demo|\w[\w.-]*/\w[\w.-]*(/[\w./-]+\.gguf)?", re.ASCII)  # a hub's model, or one of its files


class Level(enum.Enum):
    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True)
class Finding:
    """A problem of model data. `place`: the file's name; empty: the whole."""

    level: Level
    place: str
    says: str
    advice: str

    def __str__(self) -> str:
        return f"{self.place}: {self.says}" if self.place else self.says


@dataclass(frozen=True)
class Listing:
    """The files of a directory to upload, and problems."""

    files: tuple[Entry, ...]
    findings: tuple[Finding, ...]


def errors(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level is Level.ERROR]


def refuse(findings: Sequence[Finding], where: str) -> None:
    """Stop if there is an error.

    Raises:
        Refused: there is one; the advice lists all.
    """
    if wrong := errors(findings):
        lines = [f"  {finding}\n    {finding.advice}" for finding in wrong]
        raise Refused(f"{where} cannot be loaded as it is: {wrong[0]}", "\n".join(lines))


def list_directory(directory: Path) -> Listing:
    """List the files to upload. Links to files are followed (a hub's cache consists of them).

    Raises:
        Refused: it is not a directory.
    """
    if not directory.is_dir():
        raise Refused(
            f"{directory} is not a directory", "model.path is the directory that contains config.json and weights."
        )
    files: list[Entry] = []
    findings: list[Finding] = []

    def unreadable(error: OSError) -> None:
        place = Path(str(error.filename)).relative_to(directory).as_posix()
        findings.append(Finding(Level.ERROR, place, f"cannot be read: {error.strerror}", "Allow it, or delete it."))

    for root, directories, names in os.walk(directory, onerror=unreadable):
        here = Path(root).relative_to(directory)
        for name in sorted(directories):
            place = (here / name).as_posix()
            if name in _SKIPPED_DIRECTORIES:
                directories.remove(name)
            elif (Path(root) / name).is_symlink():
                findings.append(Finding(Level.ERROR, place, "a link to a directory", "Put the directory itself there."))
                directories.remove(name)
        directories.sort()
        for name in sorted(names):
            place, path = (here / name).as_posix(), Path(root) / name
            if name in _SKIPPED_NAMES or name.startswith(_APPLE_DOUBLE):
                continue
            if fault := _fault(place, path):
                findings.append(fault)
            else:
                files.append(Entry(place, path.stat().st_size))
                if path.is_symlink() and not _within(path.resolve(), directory):
                    findings.append(_leads_out(place, path.resolve()))
    return Listing(tuple(_without_duplicates(files)), tuple(findings))


def _fault(place: str, path: Path) -> Finding | None:
    """Say why a file cannot be uploaded."""
    if _CONTROL.search(path.name):
        advice = "Rename it: S3 and its lists may change such a name."
        return Finding(Level.ERROR, ascii(place), "a name with control characters or invalid UTF-8", advice)
    if not path.exists():
        return Finding(Level.ERROR, place, "a broken link", "Download the model again, or delete it.")
    return None if path.is_file() else Finding(Level.ERROR, place, "neither file nor directory", "Delete it.")


def _within(target: Path, directory: Path) -> bool:
    """Return whether the target is in the directory, or in the blobs of a hub's cache, to which its snapshots link."""
    top = directory.resolve()
    blobs = top.parent.parent / "blobs" if top.parent.name == "snapshots" else top
    return target.is_relative_to(top) or target.is_relative_to(blobs)


def _leads_out(place: str, target: Path) -> Finding:
    return Finding(
        Level.WARNING,
        place,
        f"a link to {target}, outside the directory; that file is uploaded",
        "Check that it belongs to the model, and is not private.",
    )


def _without_duplicates(files: list[Entry]) -> list[Entry]:
    """Leave out weights in other formats if there are safetensors: they would double upload, storage and loading."""
    if not any(entry.name.endswith(".safetensors") and "/" not in entry.name for entry in files):
        return files
    return [
        entry
        for entry in files
        if not entry.name.endswith(_DUPLICATES) or PurePosixPath(entry.name).name.startswith("openvino")
    ]


def lint(entries: Sequence[Entry], read: Read, *, isolated: bool = False, own_code: bool = False) -> list[Finding]:
    """Return all problems of model data.

    Args:
        entries: all files or objects.
        read: reads a small file of `entries`.
        isolated: the container reaches no hub (network.isolated).
        own_code: options.trust_remote_code is set.
    """
    return [*lint_layout(entries), *_content({entry.name: entry.size for entry in entries}, read, isolated, own_code)]


def lint_layout(entries: Sequence[Entry]) -> Iterator[Finding]:
    """Yield the problems of names and sizes."""
    names = {entry.name for entry in entries}
    parents = {parent.as_posix() for name in names for parent in PurePosixPath(name.rstrip("/")).parents}
    for entry in entries:
        if entry.name.endswith("/") or entry.name == "":
            yield Finding(
                Level.ERROR,
                entry.name or "the prefix itself",
                "a 0-byte object that stands for a folder" if entry.size == 0 else "a name that ends in a slash",
                "Delete the object (the console makes them): SageMaker fails on it.",
            )
        elif entry.name in parents:
            yield Finding(Level.ERROR, entry.name, "both a file and a directory", "Delete the object, or rename it.")
        elif entry.size == 0:
            yield Finding(Level.WARNING, entry.name, "empty", "Check that its download was complete.")
        for part in entry.name.split("/"):
            if len(part.encode()) > _LONGEST:
                yield Finding(Level.ERROR, entry.name, f"a name of more than {_LONGEST} bytes", "Rename it.")
        if entry.name.endswith(_ARCHIVES):
            yield Finding(
                Level.WARNING, entry.name, "an archive, which nothing unpacks", "Put its contents there instead."
            )


def _content(sizes: dict[str, int], read: Read, isolated: bool, own_code: bool) -> Iterator[Finding]:
    if not sizes:
        yield Finding(Level.ERROR, "", "it is empty", "Check model.path or model.s3.")
        return
    top = {name for name in sizes if "/" not in name}
    has_weights = any(name.endswith(WEIGHTS) for name in sizes)
    may_name_model = "serving.properties" in top and "config.json" not in top
    elsewhere = _model_elsewhere(read) if may_name_model else None
    for name, size in sizes.items():
        if 0 < size <= _POINTER and name.endswith((*WEIGHTS, *_TOKENIZERS)) and (why := placeholder(read(name))):
            yield Finding(Level.ERROR, name, why, "Its directory is a clone without Git LFS: run `git lfs pull` in it.")
    if not has_weights and elsewhere is None:
        yield Finding(Level.ERROR, "", "there are no weights", "Put *.safetensors (or a .gguf file) there.")
    if isolated and elsewhere not in (None, "demo"):
        says = f"names the model {elsewhere}, which an isolated container cannot fetch"
        yield Finding(Level.ERROR, "serving.properties", says, "Put the model's files next to it.")
    if any(name.endswith(".gguf") for name in top) or may_name_model:
        return  # a GGUF file has everything
    if "config.json" not in top:
        below = [name for name in sizes if name.endswith("/config.json")]
        advice = f"It is in {PurePosixPath(below[0]).parent}/: give that directory." if below else "Add it."
        yield Finding(Level.ERROR, "config.json", "missing", advice)
        return
    if not top & set(_TOKENIZERS) and "openvino_tokenizer.xml" not in top:
        yield Finding(
            Level.ERROR if isolated else Level.WARNING,
            "tokenizer.json",
            "missing, and no other tokenizer is there",
            "Add the tokenizer's files of the same model.",
        )
    config = _json(read, "config.json")
    if config is None:
        yield Finding(Level.ERROR, "config.json", "not JSON", "Download it again.")
        return
    yield from _code(config, sizes, isolated, own_code)
    yield from _shards(sizes, read)


def _model_elsewhere(read: Read) -> str | None:
    """Return the hub's model, or `demo`, that serving.properties names; None if it names none or a path."""
    try:
        name = javaproperties.loads(decode_properties(read("serving.properties"))).get("option.model_id")
    except ValueError:
        return None  # `options` names what is wrong with the file
    return name if name and _ELSEWHERE.fullmatch(name) else None


def _code(config: dict[str, Any], sizes: dict[str, int], isolated: bool, own_code: bool) -> Iterator[Finding]:
    """Check the model's Python files: `auto_map` names `module.Class`, after `REPOSITORY--` if it is elsewhere."""
    auto_map = config.get("auto_map")
    if not isinstance(auto_map, dict):
        return
    modules = [item for value in auto_map.values() for item in (value if isinstance(value, list) else [value]) if item]
    if not own_code:
        yield Finding(
            Level.WARNING,
            "config.json",
            "the model has code of its own, which is not run",
            "Set options.trust_remote_code: true if it needs it and you trust it.",
        )
    for item in sorted(set(map(str, modules))):
        repository, _, local = item.rpartition("--")
        file = f"{local.rpartition('.')[0].replace('.', '/')}.py"
        if repository and isolated:
            yield Finding(
                Level.ERROR,
                "config.json",
                f"its code is fetched from {repository}, which an isolated container cannot",
                f"Put {file} next to config.json, and remove '{repository}--' from auto_map.",
            )
        elif not repository and file not in sizes:
            yield Finding(
                Level.ERROR if own_code or isolated else Level.WARNING,
                file,
                "missing, though config.json's auto_map names it",
                "Download the model's .py files too.",
            )


def _shards(sizes: dict[str, int], read: Read) -> Iterator[Finding]:
    index = "model.safetensors.index.json"
    if index not in sizes:
        return
    index_json = _json(read, index)
    weight_map = index_json.get("weight_map") if index_json is not None else None
    if not isinstance(weight_map, dict):
        yield Finding(Level.ERROR, index, "not an index of weights", "Download it again.")
        return
    for shard in sorted(set(map(str, weight_map.values())) - set(sizes)):
        yield Finding(Level.ERROR, shard, "missing, though the index names it", "Download the model completely.")


def _json(read: Read, name: str) -> dict[str, Any] | None:
    try:
        value = json.loads(read(name))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
