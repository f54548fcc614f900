"""Rules for the images of requests: where they may come from, and how large they may be."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from handler.config.config import Config
from handler.core.errors import ConfigError, Problem

ANY_HOST = "*"

EXTRA = "pip install 'lmi-handler[images]'"


class MediaRules(NamedTuple):
    """Rules for images, from the options.

    Attributes:
        domains: hosts, each `name` for the usual ports or `name:port`; `*` is any name with the usual ports.
        directory: of `file:` URLs, without symbolic links; None where there are none.
        max_bytes: of a file.
        max_pixels: of an image, width times height.
        seconds: that a fetch may take in all.
    """

    domains: Collection[str] = ()
    directory: Path | None = None
    max_bytes: int = 20 << 20
    max_pixels: int = 1 << 25
    seconds: float = 5.0


def media_rules(config: Config) -> MediaRules:
    """Read the rules.

    Raises:
        ConfigError: there is no such directory.
    """
    key, given = "option.allowed_local_media_path", config.allowed_local_media_path
    directory = None if given is None else Path(given).resolve()
    if directory is not None and not directory.is_dir():
        raise ConfigError(Problem(config.where(key), key, f"{key}={given}: there is no such directory"))
    return MediaRules(
        domains=config.allowed_media_domains or (),
        directory=directory,
        max_bytes=config.max_image_bytes,
        max_pixels=config.max_image_pixels,
        seconds=config.image_fetch_timeout,
    )


def missing_packages() -> str:
    """Say what has to be installed before images can be served; "" where all is there."""
    missing = [name for name in ("PIL", "aiohttp") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(missing)} cannot be imported: {EXTRA}" if missing else ""
