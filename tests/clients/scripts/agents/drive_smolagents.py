"""Runs smolagents' ToolCallingAgent and CodeAgent with the tool `weather`.

Options: `provider` (calls or code), `more` (what the user says next, after each answer).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from common import main
from smolagents import ChatMessageStreamDelta, CodeAgent, OpenAIModel, ToolCallingAgent, tool
from weather import weather


class Smolagents:
    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        agent = _agent(url, options, stream=False)
        text = agent.run(prompt)
        for said in options.get("more", ()):
            text = agent.run(said, reset=False)
        return {"text": text, "prompt_tokens": agent.monitor.get_total_token_counts().input_tokens}

    def stream(self, url: str, prompt: str, options: dict[str, Any]) -> Iterator[Any]:
        """The pieces of the model's text and of its calls, and at the end the answer."""
        for event in _agent(url, options, stream=True).run(prompt, stream=True):
            if isinstance(event, ChatMessageStreamDelta):
                yield event.content
                yield from (call.function.arguments for call in event.tool_calls or ())
        yield event.output


def _agent(url: str, options: dict[str, Any], *, stream: bool) -> Any:
    kind = CodeAgent if options["provider"] == "code" else ToolCallingAgent
    model = OpenAIModel("model", api_base=f"{url}/v1", api_key="none")
    return kind(tools=[tool(weather)], model=model, stream_outputs=stream, verbosity_level=0)


main(Smolagents())
