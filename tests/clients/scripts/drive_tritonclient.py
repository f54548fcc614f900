"""Asks with tritonclient, which knows no generate: what it wants to know of a server and its model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import tritonclient.http
import tritonclient.http.aio
from common import main

_STATES = ("is_server_live", "is_server_ready", "get_server_metadata", "get_model_repository_index")
_OF_MODEL = ("is_model_ready", "get_model_metadata", "get_model_config")


class Tritonclient:
    """`url` is host:port, `prompt` the model's name."""

    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        client = tritonclient.http.InferenceServerClient(url)
        found = {name: getattr(client, name)() for name in _STATES}
        return found | {name: getattr(client, name)(prompt, **options) for name in _OF_MODEL}

    def stream(self, url: str, prompt: str, options: dict[str, Any]) -> Iterator[Any]:
        raise NotImplementedError

    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        async with tritonclient.http.aio.InferenceServerClient(url) as client:
            found = {name: await getattr(client, name)() for name in _STATES}
            return found | {name: await getattr(client, name)(prompt, **options) for name in _OF_MODEL}

    def stream_async(self, url: str, prompt: str, options: dict[str, Any]) -> AsyncIterator[Any]:
        raise NotImplementedError


main(Tritonclient())
