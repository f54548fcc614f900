"""Read a server's configuration; of a model directory on S3 its serving.properties too."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from handler import engines
from handler.config.loader import Reading, read_server_config
from handler.engines import downloads, s3


def read_sources(
    model: str | None = None,
    engine: str | None = None,
    properties: Path | None = None,
    overrides: Iterable[str] = (),
) -> Reading:
    """Read the sources of a server that starts, and download options and code of `HF_MODEL_ID=s3://...`.

    As in LMI, that variable names the model directory itself, so that its serving.properties and model.py count.
    `option.model_id` names the model's files alone.

    Args:
        model, engine, properties, overrides: as in `read_server_config`.

    Raises:
        ConfigError: they cannot be downloaded.
    """
    overrides = list(overrides)
    reading = read_server_config(model, engine, properties, overrides)
    url = reading.config.model_id
    if reading.config.directory or "OPTION_MODEL_ID" in os.environ or url != os.environ.get("HF_MODEL_ID"):
        return reading
    if not (reading.engine and engines.fetches(reading.engine) and s3.is_url(url)):
        return reading
    directory = Path(downloads.fetch(s3.download, url, list(s3.SETTINGS)))
    if (own := directory / "serving.properties").is_file():
        reading = read_server_config(None, engine, own, overrides)
    model_id = reading.config.model_id or url
    return reading._replace(config=replace(reading.config, model_id=model_id, directory=directory))
