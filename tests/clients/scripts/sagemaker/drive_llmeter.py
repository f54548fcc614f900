"""Measures with llmeter as its users do: a Runner on one of its endpoints, and what it counted."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

from common import main
from llmeter.endpoints.openai import OpenAICompletionStreamEndpoint
from llmeter.endpoints.sagemaker import SageMakerEndpoint, SageMakerStreamEndpoint
from llmeter.runner import Runner

_SAGEMAKER = {"whole": SageMakerEndpoint, "stream": SageMakerStreamEndpoint}


class Llmeter:
    """`url` is the runtime's; options: `endpoint` (whole, stream, openai), `key`, `tokens`, `clients`, `requests`."""

    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        raise NotImplementedError

    def stream(self, url: str, prompt: str, options: dict[str, Any]) -> Iterator[Any]:
        raise NotImplementedError

    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        endpoint: Any
        if options["endpoint"] == "openai":
            endpoint = OpenAICompletionStreamEndpoint("", api_key=options["key"], base_url=url)
            payload = endpoint.create_payload(prompt, max_tokens=options["tokens"])
        else:
            os.environ |= {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
            endpoint = _SAGEMAKER[options["endpoint"]]("local", "model", region="us-east-1")
            payload = endpoint.create_payload(prompt, max_tokens=options["tokens"])
        result = await Runner(endpoint).run(
            payload=payload, n_requests=options["requests"], clients=options["clients"], progress_bar_stats={}
        )
        return {
            "total": result.total_requests,
            "failed": result.stats["failed_requests"],
            "responses": [
                {
                    "text": response.response_text,
                    "error": response.error,
                    "tokens": response.num_tokens_output,
                    "first": response.time_to_first_token,
                    "last": response.time_to_last_token,
                }
                for response in result.responses
            ],
        }

    def stream_async(self, url: str, prompt: str, options: dict[str, Any]) -> AsyncIterator[Any]:
        raise NotImplementedError


main(Llmeter())
