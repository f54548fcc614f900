"""The environment of processes under test."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

_SETTINGS = ("OPTION_", "SERVING_", "HF_", "AWS_", "LMI_API_KEY", "API_KEY", "VLLM_API_KEY")


def clean_environment() -> dict[str, str]:
    """Ours, without what DJL, the handler or boto3 would take for settings."""
    return {key: value for key, value in os.environ.items() if not key.startswith(_SETTINGS)}


@contextlib.contextmanager
def skipped_on(missing: type[Exception]) -> Iterator[None]:
    """Where a tool is missing, the test is skipped; in CI that is a failure."""
    try:
        yield
    except missing as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
