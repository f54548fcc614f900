"""A connection of openai's client to Responses or Realtime; each event is checked against the client's types.

The prompt names the resource to connect to (`responses` or `realtime`, with the query string in `query`). Without it,
the connection of the call before is used.

Options: `calls` (pairs of a method, such as `conversation.item.create`, and its arguments), `until` (types of events)
and `times` (how many of them end the call).
"""

from __future__ import annotations

import functools
import json
from typing import Any

from common import main
from openai import AsyncOpenAI, OpenAI


class Sockets:
    """Both modes may be used in turn, each with a connection of its own."""

    _connection: Any = None
    _async_connection: Any = None

    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        if prompt:
            if self._connection is not None:
                self._connection.close()
            self._connection = self._manager(OpenAI(**_client(url)), prompt, options).enter()
        for name, arguments in options.get("calls", ()):
            _method(self._connection, name)(**arguments)
        events: list[Any] = []
        while self._goes_on(events, options):
            events.append(self._checked(self._connection, self._connection.recv_bytes()))
        return events

    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        if prompt:
            if self._async_connection is not None:
                await self._async_connection.close()
            self._async_connection = await self._manager(AsyncOpenAI(**_client(url)), prompt, options).enter()
        for name, arguments in options.get("calls", ()):
            await _method(self._async_connection, name)(**arguments)
        events: list[Any] = []
        while self._goes_on(events, options):
            events.append(self._checked(self._async_connection, await self._async_connection.recv_bytes()))
        return events

    def _manager(self, client: Any, resource: str, options: dict[str, Any]) -> Any:
        query = options.get("query", {})
        if resource == "responses":
            return client.responses.connect(extra_query=query)
        model = {} if query else {"model": "model"}
        return client.realtime.connect(extra_query=query, **model)

    def _goes_on(self, events: list[Any], options: dict[str, Any]) -> bool:
        kinds = options.get("until", ())
        ended = [event for event in events if event["type"] in kinds]
        return len(ended) < options.get("times", 1) if kinds else False

    def _checked(self, connection: Any, data: bytes) -> Any:
        event = connection.parse_event(data)
        type(event).model_validate(json.loads(data))  # the client itself makes an object of any event
        return event.to_dict(mode="json")


def _method(connection: Any, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), connection)


def _client(url: str) -> dict[str, Any]:
    return {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "timeout": 100}


main(Sockets(), keeps_connections=True)
