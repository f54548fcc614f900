"""Runs openai-agents' Runner with the tool `weather`, on OpenAI's responses and chats.

Options: `provider` (responses or chat), `more` (what the user says next, after each answer).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from agents import Agent, Runner, function_tool, set_tracing_disabled
from agents.models.openai_chatcompletions import OpenAIChatCompletionsModel
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
    kind = OpenAIResponsesModel if options["provider"] == "responses" else OpenAIChatCompletionsModel
    model = kind("model", AsyncOpenAI(base_url=f"{url}/v1", api_key="none"))
    return Agent(name="Forecaster", instructions="Answer briefly.", model=model, tools=[function_tool(weather)])


main(OpenAIAgents())
