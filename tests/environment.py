"""What processes under test are started with."""

from __future__ import annotations

import os

_SETTINGS = ("OPTION_", "SERVING_", "HF_", "LMI_API_KEY")


def clean_environment() -> dict[str, str]:
    """Ours, without what DJL or the handler would take for settings."""
    return {key: value for key, value in os.environ.items() if not key.startswith(_SETTINGS)}
