"""One conversation with openai's client: its calls in order, each answer checked against the client's types."""

from __future__ import annotations

from typing import Any

from common import main
from openai import APIStatusError, AsyncOpenAI, OpenAI


class Conversations:
    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        with OpenAI(**_client(url)) as client:
            items, responses = client.conversations.items, client.responses
            made = client.conversations.create(items=[_user(prompt)], metadata={"topic": "demo"})
            found = [client.conversations.retrieve(made.id)]
            found.append(client.conversations.update(made.id, metadata={"topic": "other"}))
            added = items.create(made.id, items=[_user(f"more {number}") for number in range(5)])
            first = responses.create(**_asked(made.id))
            *_, ended = responses.create(**_asked({"id": made.id}), store=False, stream=True)
            second = ended.response
            listed = [*items.list(made.id, limit=2, order="asc", include=["reasoning.encrypted_content"])]
            newest = items.list(made.id, limit=1).data[0]
            one = items.retrieve(newest.id, conversation_id=made.id)
            found.append(items.delete(newest.id, conversation_id=made.id))
            left = [*items.list(made.id)]
            counted = responses.input_tokens.count(model="model", input="last", conversation=made.id)
            deleted = client.conversations.delete(made.id)
            gone = []
            for call in (lambda: client.conversations.retrieve(made.id), lambda: responses.create(**_asked(made.id))):
                try:
                    call()
                except APIStatusError as error:
                    gone.append([error.status_code, error.body])
        return _transcript(made, found, added.data, first, second, listed, newest, one, left, counted, deleted, gone)

    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        async with AsyncOpenAI(**_client(url)) as client:
            items, responses = client.conversations.items, client.responses
            made = await client.conversations.create(items=[_user(prompt)], metadata={"topic": "demo"})
            found = [await client.conversations.retrieve(made.id)]
            found.append(await client.conversations.update(made.id, metadata={"topic": "other"}))
            added = await items.create(made.id, items=[_user(f"more {number}") for number in range(5)])
            first = await responses.create(**_asked(made.id))
            stream = await responses.create(**_asked({"id": made.id}), store=False, stream=True)
            second = [event async for event in stream][-1].response
            pages = items.list(made.id, limit=2, order="asc", include=["reasoning.encrypted_content"])
            listed = [item async for item in pages]
            newest = (await items.list(made.id, limit=1)).data[0]
            one = await items.retrieve(newest.id, conversation_id=made.id)
            found.append(await items.delete(newest.id, conversation_id=made.id))
            left = [item async for item in items.list(made.id)]
            counted = await responses.input_tokens.count(model="model", input="last", conversation=made.id)
            deleted = await client.conversations.delete(made.id)
            gone = []
            for call in (lambda: client.conversations.retrieve(made.id), lambda: responses.create(**_asked(made.id))):
                try:
                    await call()
                except APIStatusError as error:
                    gone.append([error.status_code, error.body])
        return _transcript(made, found, added.data, first, second, listed, newest, one, left, counted, deleted, gone)


def _user(text: str) -> Any:
    return {"type": "message", "role": "user", "content": text}


def _asked(conversation: Any) -> dict[str, Any]:
    return {"model": "model", "input": "say", "max_output_tokens": 8, "conversation": conversation}


def _client(url: str) -> dict[str, Any]:
    return {
        "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "timeout": 100,
        "_strict_response_validation": True,
    }  # fmt: skip


_NAMES = (
    "made", "found", "added", "first", "second", "listed", "newest", "one", "left", "counted", "deleted", "gone",
)  # fmt: skip


def _transcript(*values: Any) -> dict[str, Any]:
    return dict(zip(_NAMES, map(_plain, values), strict=True))


def _plain(value: Any) -> Any:
    return [*map(_plain, value)] if isinstance(value, list) else getattr(value, "model_dump", lambda: value)()


main(Conversations())
