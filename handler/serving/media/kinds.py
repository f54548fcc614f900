"""The kinds of media that this server decodes; a folder beside this file has each."""

from __future__ import annotations

import importlib.util

from handler.serving.media import audio, image
from handler.serving.media.decoder import Decoder

DECODERS: dict[str, Decoder] = {"image": image.DECODER, "audio": audio.DECODER}

_FETCHING = ("aiohttp",)


def missing_packages(kind: str) -> str:
    """Say what has to be installed before media of a kind can be served; "" where all is there."""
    decoder = DECODERS[kind]
    missing = [name for name in (*decoder.packages, *_FETCHING) if importlib.util.find_spec(name) is None]
    install = f"pip install 'lmi-handler[{decoder.extra}]'"
    return f"the server takes text only: {' and '.join(missing)} cannot be imported: {install}" if missing else ""
