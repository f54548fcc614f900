"""Background responses of openai's client: polled, streamed, read again and cancelled."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from common import main
from openai import AsyncOpenAI, OpenAI

_OPEN = ("queued", "in_progress")


class Background:
    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        with OpenAI(**_client(url)) as client:
            responses = client.responses
            made = responses.create(**_asked(prompt))
            polled = made
            while polled.status in _OPEN:
                time.sleep(0.05)
                polled = responses.retrieve(made.id)
            events = []
            with responses.create(**_asked(prompt), stream=True) as stream:
                for event in stream:
                    events.append(event)
                    if len(events) == 6:
                        break  # the connection is lost
            id = events[0].response.id
            rest = [*responses.retrieve(id, stream=True, starting_after=events[-1].sequence_number)]
            with responses.stream(response_id=id, starting_after=3) as stream:
                helped = [*stream]
                final = stream.get_final_response()
            long = responses.create(**_asked(prompt, 4000))
            cancelled = [responses.cancel(long.id) for _ in range(2)]
            responses.delete(id)
        return _transcript(made, polled, events, rest, helped, final, cancelled)

    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        async with AsyncOpenAI(**_client(url)) as client:
            responses = client.responses
            made = await responses.create(**_asked(prompt))
            polled = made
            while polled.status in _OPEN:
                await asyncio.sleep(0.05)
                polled = await responses.retrieve(made.id)
            events = []
            async with await responses.create(**_asked(prompt), stream=True) as stream:
                async for event in stream:
                    events.append(event)
                    if len(events) == 6:
                        break
            id = events[0].response.id
            again = await responses.retrieve(id, stream=True, starting_after=events[-1].sequence_number)
            rest = [event async for event in again]
            async with responses.stream(response_id=id, starting_after=3) as helper:
                helped = [event async for event in helper]
                final = await helper.get_final_response()
            long = await responses.create(**_asked(prompt, 4000))
            cancelled = [await responses.cancel(long.id) for _ in range(2)]
            await responses.delete(id)
        return _transcript(made, polled, events, rest, helped, final, cancelled)


def _asked(prompt: str, length: int = 20) -> dict[str, Any]:
    return {
        "model": "model",
        "input": prompt,
        "max_output_tokens": length,
        "background": True,
        "extra_body": {"stop": [] if length > 20 else ["assistant:"]},
    }


def _client(url: str) -> dict[str, Any]:
    return {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "timeout": 100}


def _transcript(*values: Any) -> dict[str, Any]:
    return dict(
        zip(("made", "polled", "events", "rest", "helped", "final", "cancelled"), map(_plain, values), strict=True)
    )


def _plain(value: Any) -> Any:
    return [*map(_plain, value)] if isinstance(value, list) else value.model_dump()


main(Background())
