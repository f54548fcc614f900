"""The command `lmi models`, which lists, fetches, converts and removes models in the caches of this machine."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from handler.config import model_files
from handler.config.engines import LLM_ENGINES
from handler.core import log
from handler.core.command_line import add_json, add_repeatable, hint_of, print_json
from handler.core.errors import ConfigError
from handler.core.sizes import format_size


class CachedModel(NamedTuple):
    """A cached model.

    Attributes:
        name: the name of the model for `lmi serve`. A conversion has the name of its source.
        format: the format of the weights, for display.
        size: the size in bytes.
        used_at: last time at which one of its files was read, in seconds since the epoch.
    """

    name: str
    format: str
    size: int
    used_at: float
    path: Path


def add_parser(commands: Any) -> None:
    models = commands.add_parser(
        "models",
        help="list, fetch and remove the models on this machine",
        usage="lmi models [-h] [--json | get MODEL | rm MODEL ...]",
        description="List the models on this machine. With get or rm, fetch or remove models instead. "
        "Exit status: 0, or 2 if there is no such model.",
    )
    add_json(models)
    models.set_defaults(run=_list)
    models.meant = {
        **dict.fromkeys(("list", "ls"), "lmi models"),
        **dict.fromkeys(("pull", "download", "fetch"), "lmi models get MODEL"),
        **dict.fromkeys(("remove", "delete"), "lmi models rm MODEL"),
    }
    actions = models.add_subparsers(metavar="get | rm", prog="lmi models")
    get = actions.add_parser("get", help="fetch a model, and convert it if its engine requires that")
    get.add_argument(
        "model",
        metavar="MODEL",
        help="a name on the Hugging Face hub (owner/model), s3://BUCKET/PREFIX/, a local file, or demo",
    )
    get.add_argument(
        "--engine", choices=LLM_ENGINES[1:], help="the engine that will serve the model (default: as for lmi serve)"
    )
    add_repeatable(get, "-o", "options", "KEY=VALUE", "set an option, as lmi serve -o does")
    get.set_defaults(run=_get)
    remove = actions.add_parser("rm", help="remove models and their conversions")
    remove.add_argument("models", nargs="+", metavar="MODEL", help="a name that lmi models prints")
    remove.set_defaults(run=_remove)


# -- the caches --------------------------------------------------------------------------------------------------------


def cached_models() -> list[CachedModel]:
    """List the models in the caches of the Hugging Face hub, of S3 and of conversions, sorted by name."""
    models = [*_of_hub(), *_of_s3(), *_converted()]
    demo = model_files.cache_directory() / Path(model_files.DEMO_MEMBER).name
    if demo.is_file():
        models.append(_model(model_files.DEMO, "GGUF", demo))
    return sorted(models)


def _of_hub() -> Iterator[CachedModel]:
    from handler.engines.huggingface.files import cached

    for repo in cached():
        path = Path(repo.repo_path)
        names = [file.file_name for revision in repo.revisions for file in revision.files]
        yield CachedModel(repo.repo_id, _format(names, path), repo.size_on_disk, repo.last_accessed, path)


def _of_s3() -> Iterator[CachedModel]:
    from handler.engines import s3

    for url, path in s3.downloads():
        yield _model(url, _format([file.name for file in path.iterdir()], path), path)


def _converted() -> Iterator[CachedModel]:
    from handler.engines.downloads import SOURCE

    for path in sorted((model_files.cache_directory() / "converted").glob("*")):
        if not path.is_dir():
            continue
        source = Path((path / SOURCE).read_text()) if (path / SOURCE).is_file() else path
        yield _model(_name_of(source), "incomplete" if path.suffix else "converted", path)


def _name_of(source: Path) -> str:
    """Return the name of the source of a conversion: its name on the hub, "demo", or its path."""
    if source.name == Path(model_files.DEMO_MEMBER).name:
        return model_files.DEMO
    hub = re.search(r"/models--(.+?)/snapshots/", f"{source}/")
    return hub[1].replace("--", "/") if hub else str(source)


_FORMATS = {
    "GGUF": r".*\.(?i:gguf)",
    "OpenVINO": r"openvino_.*\.xml",
    "safetensors": r".*\.safetensors",
    "torch": r"pytorch_model.*\.bin",
}


def _format(names: Sequence[str], path: Path) -> str:
    formats = [form for form, pattern in _FORMATS.items() if any(re.fullmatch(pattern, name) for name in names)]
    if path.suffix == ".part" or any(path.glob("blobs/*.incomplete")):
        return "incomplete"
    return ", ".join(formats) or "no weights"


def _model(name: str, form: str, path: Path) -> CachedModel:
    states = [file.stat() for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]
    used_at = max((state.st_atime for state in states), default=0.0)
    return CachedModel(name, form, sum(state.st_size for state in states), used_at, path)


# -- the commands ------------------------------------------------------------------------------------------------------


def _list(arguments: argparse.Namespace) -> int:
    models = cached_models()
    if arguments.json:
        print_json({"models": [*map(_as_json, models)], "bytes": sum(model.size for model in models)})
        return 0
    if not models:
        print("no models; fetch one with `lmi models get MODEL`")
        return 0
    _print_table([("MODEL", "FORMAT", "SIZE", "LAST READ"), *map(_row, models)])
    print(f"{format_size(sum(model.size for model in models))} in total")
    return 0


def _print_table(rows: Sequence[tuple[str, str, str, str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, form, size, used in rows:
        print(f"{name:{widths[0]}}  {form:{widths[1]}}  {size:>{widths[2]}}  {used}")


def _as_json(model: CachedModel) -> dict[str, Any]:
    """Return a model as JSON. `read` is the day on which one of its files was last read, or null."""
    day = _day(model)
    facts = {"name": model.name, "format": model.format, "bytes": model.size}
    return {**facts, "read": day or None, "path": str(model.path)}


def _day(model: CachedModel) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(model.used_at)) if model.used_at else ""


def _row(model: CachedModel) -> tuple[str, str, str, str]:
    return model.name, model.format, format_size(model.size), _day(model) or "-"


def _get(arguments: argparse.Namespace) -> int:
    from handler.serving.engine import engine_spec, read_sources

    log.set_up(os.environ)
    config = read_sources(arguments.model, arguments.engine, overrides=arguments.options).checked()
    spec = engine_spec(config)
    print(f"{arguments.model}: {spec.config.model or 'nothing to fetch'} (engine {spec.engine})")
    return 0


def _remove(arguments: argparse.Namespace) -> int:
    models, chosen = cached_models(), list[CachedModel]()
    for name in arguments.models:
        matching = [model for model in models if model.name == name]
        if not matching:
            hint = hint_of(name, [model.name for model in models])
            raise ConfigError(f"lmi models rm: no model {name!r} in the caches{hint}")
        chosen += matching
    if used := model_in_use([model.path for model in chosen]):
        raise ConfigError(
            f"lmi models rm: nothing was removed, because process {used[0]} is using files in {used[1]}; stop it first"
        )
    for model in chosen:
        message = f"removed {model.name} ({model.format}, {format_size(model.size)})"
        if model.path.is_symlink():
            message = f"removed the link to {model.name}; its files stay in {model.path.resolve()}"
            model.path.unlink()
        elif model.path.is_dir():
            shutil.rmtree(model.path)
        else:
            model.path.unlink()
        print(message)
    return 0


def model_in_use(paths: Sequence[Path]) -> tuple[int, Path] | None:
    """Find a process that has opened or mapped one of the paths, or a file below one of them.

    Only processes that the current user may inspect are considered.

    Returns:
        The process ID and the path, or None if there is no such process.
    """
    folders = [str(path.resolve()) for path in paths]
    for process in Path("/proc").glob("[0-9]*"):
        opened = list[str]()
        with contextlib.suppress(OSError):
            opened += re.findall(r"\s(/.*)$", (process / "maps").read_text(errors="replace"), re.MULTILINE)
            for link in (process / "fd").iterdir():
                with contextlib.suppress(OSError):  # closed in the meantime
                    opened.append(os.readlink(link))
        for path, folder in zip(paths, folders, strict=True):
            if any(file == folder or file.startswith(f"{folder}/") for file in opened):
                return int(process.name), path
    return None
