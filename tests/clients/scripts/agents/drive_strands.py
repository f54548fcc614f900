"""Runs Strands' Agent with the tool `weather`, by its providers for OpenAI's APIs, Anthropic's and SageMaker's.

Options: `provider` (chat, responses, anthropic, or sagemaker, for which the URL is SageMaker Runtime's), `more` (what
the user says next, after each answer), `whole` (for SageMaker: the model's answers are no streams).
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

from common import main
from strands import Agent, tool
from strands.models.anthropic import AnthropicModel
from strands.models.openai import OpenAIModel
from strands.models.openai_responses import OpenAIResponsesModel
from strands.models.sagemaker import SageMakerAIModel
from weather import weather

os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}


class Strands:
    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        agent = _agent(url, options)
        for said in (prompt, *options.get("more", ())):
            result = await agent.invoke_async(said)
        return {"text": str(result), "prompt_tokens": result.metrics.accumulated_usage["inputTokens"]}

    async def stream_async(self, url: str, prompt: str, options: dict[str, Any]) -> AsyncIterator[Any]:
        async for event in _agent(url, options).stream_async(prompt):
            if "data" in event:
                yield event["data"]


def _agent(url: str, options: dict[str, Any]) -> Agent:
    model = _model(url, options["provider"], stream=not options.get("whole"))
    return Agent(model=model, tools=[tool(weather)], callback_handler=None)


def _model(url: str, provider: str, *, stream: bool) -> Any:
    if provider == "sagemaker":
        os.environ["AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME"] = url
        usage = {"stream_options": {"include_usage": True}} if stream else {}
        return SageMakerAIModel(
            {"endpoint_name": "local", "region_name": "us-east-1"},
            {"max_tokens": 1000, "stream": stream, "additional_args": usage},
        )
    if provider == "anthropic":
        return AnthropicModel(client_args={"base_url": url, "api_key": "none"}, model_id="model", max_tokens=1000)
    kind = OpenAIResponsesModel if provider == "responses" else OpenAIModel
    return kind(client_args={"base_url": f"{url}/v1", "api_key": "none"}, model_id="model")


main(Strands())
