"""Asks for decisions with typesafe-sdk and openai, which check answers against their types.

`what` is systemone, models or openai. A file of `images` is an image's path; a state may name it as {image}.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import typesafe_sdk
from common import main

KEY = {"api_key": "none"}
TYPESAFE: dict[str, Any] = {**KEY, "compression": False, "timeout": 120.0}  # seconds: the machine may be busy


def _systemone(asked: dict[str, Any]) -> dict[str, Any]:
    if path := asked.pop("image", None):
        asked["state"] = {"photo": typesafe_sdk.Image(Path(path)), "text": asked["state"]}
    return asked


def _plain(answer: typesafe_sdk.SystemOneResponse) -> dict[str, Any]:
    groups = {"nouls": answer.nouls, "choices": answer.choices, "scores": answer.scores}
    named = {name: [*group] for name, group in groups.items()}
    return {**answer.model_dump(mode="json"), **named, "request_id": answer.request_id}


class Decisions:
    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        what = options.pop("what")
        if what == "openai":
            return openai.OpenAI(**KEY, base_url=f"{url}/v1").decisions.create(input=prompt, **options).model_dump()
        with typesafe_sdk.TypeSafeClient(**TYPESAFE, base_url=url) as client:
            if what == "models":
                return client.models.list().model_dump(mode="json")
            return _plain(client.system_one(**_systemone({"state": prompt, **options})))

    def stream(self, url: str, prompt: str, options: dict[str, Any]) -> Iterator[Any]:
        raise NotImplementedError

    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        what = options.pop("what")
        if what == "openai":
            client = openai.AsyncOpenAI(**KEY, base_url=f"{url}/v1")
            return (await client.decisions.create(input=prompt, **options)).model_dump()
        async with typesafe_sdk.AsyncTypeSafeClient(**TYPESAFE, base_url=url) as typesafe:
            if what == "models":
                return (await typesafe.models.list()).model_dump(mode="json")
            return _plain(await typesafe.system_one(**_systemone({"state": prompt, **options})))

    def stream_async(self, url: str, prompt: str, options: dict[str, Any]) -> AsyncIterator[Any]:
        raise NotImplementedError


main(Decisions())
