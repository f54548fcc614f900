"""Rules for the media of requests: where they may come from, and how large they may be."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from handler.config.config import Config
from handler.core.errors import ConfigError, Problem
from handler.serving.media.decoder import FileRules
from handler.serving.media.kinds import DECODERS

ANY_HOST = "*"


class MediaRules(NamedTuple):
    """Rules for media, from the options.

    Attributes:
        domains: hosts, each `name` for the usual ports or `name:port`; `*` is any name with the usual ports.
        directory: of `file:` URLs, without symbolic links; None where there are none.
        files: by kind.
    """

    files: Mapping[str, FileRules]
    domains: Collection[str] = ()
    directory: Path | None = None


def media_rules(config: Config) -> MediaRules:
    """Read the rules.

    Raises:
        ConfigError: there is no such directory.
    """
    key, given = "option.allowed_local_media_path", config.allowed_local_media_path
    directory = None if given is None else Path(given).resolve()
    if directory is not None and not directory.is_dir():
        raise ConfigError(Problem(config.where(key), key, f"{key}={given}: there is no such directory"))
    files = {kind: decoder.rules(config) for kind, decoder in DECODERS.items()}
    return MediaRules(files, config.allowed_media_domains or (), directory)
