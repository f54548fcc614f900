"""Runs openai-agents' Runner with the tool `weather`, on OpenAI's responses and chats.

Options: `provider` (responses, chat, or socket for responses over a WebSocket), `more` (what the user says next, after
each answer).
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from typing import Any

from agents import Agent, Model, Runner, function_tool, set_tracing_disabled
from agents.models.openai_chatcompletions import OpenAIChatCompletionsModel
from agents.models.openai_provider import OpenAIProvider
from agents.models.openai_responses import OpenAIResponsesModel
from common import main
from openai import AsyncOpenAI
from weather import weather

set_tracing_disabled(True)  # traces go to OpenAI


class OpenAIAgents:
    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        agent = _agent(url, options)
        result = await Runner.run(agent, prompt)
        for said in options.get("more", ()):
            result = await Runner.run(agent, [*result.to_input_list(), {"role": "user", "content": said}])
        return {"text": result.final_output, "prompt_tokens": result.context_wrapper.usage.input_tokens}

    async def stream_async(self, url: str, prompt: str, options: dict[str, Any]) -> AsyncIterator[Any]:
        async for event in Runner.run_streamed(_agent(url, options), prompt).stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                yield event.data.delta


def _agent(url: str, options: dict[str, Any]) -> Agent:
    model = _model(f"{url}/v1", options["provider"])
    return Agent(name="Forecaster", instructions="Answer briefly.", model=model, tools=[function_tool(weather)])


def _model(url: str, provider: str) -> Model:
    if provider == "socket":
        return _provider(url).get_model("model")
    kind = OpenAIResponsesModel if provider == "responses" else OpenAIChatCompletionsModel
    return kind("model", AsyncOpenAI(base_url=url, api_key="none"))


@functools.cache
def _provider(url: str) -> OpenAIProvider:
    """One for all runs, which share its connection. It has no way back to HTTP."""
    return OpenAIProvider(base_url=url, api_key="none", use_responses_websocket=True)


main(OpenAIAgents())
