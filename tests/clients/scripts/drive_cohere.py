"""Calls rerank with cohere's own client, which checks answers against its types; `version` is 1 or 2."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import cohere
from common import main


class Cohere:
    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        client = cohere.Client if options.pop("version") == 1 else cohere.ClientV2
        return client(api_key="none", base_url=url).rerank(query=prompt, **options).model_dump()

    def stream(self, url: str, prompt: str, options: dict[str, Any]) -> Iterator[Any]:
        raise NotImplementedError

    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        client = cohere.AsyncClient if options.pop("version") == 1 else cohere.AsyncClientV2
        return (await client(api_key="none", base_url=url).rerank(query=prompt, **options)).model_dump()

    def stream_async(self, url: str, prompt: str, options: dict[str, Any]) -> AsyncIterator[Any]:
        raise NotImplementedError


main(Cohere())
