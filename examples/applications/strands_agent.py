"""An agent of Strands, AWS's SDK, on your own server: it calls tools until it has the answer.

    lmi serve Qwen/Qwen3-8B                            # or any model that calls tools
    python strands_agent.py "What are 12 boxes of 24 bottles?"

LMI_URL is another server, LMI_API_KEY its key. Needs: pip install 'strands-agents[openai]'
docs/agents.md has the same on a SageMaker endpoint.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from strands import Agent, tool
from strands.models.openai import OpenAIModel


def multiply(a: float, b: float) -> float:
    """Multiply two numbers.

    Args:
        a: the first one.
        b: the second one.
    """
    return a * b


def show(**event: Any) -> None:
    print(event.get("data", ""), end="", flush=True)  # a piece of the answer


url, key = os.environ.get("LMI_URL", "http://127.0.0.1:8080"), os.environ.get("LMI_API_KEY", "none")
model = OpenAIModel(client_args={"base_url": f"{url}/v1", "api_key": key}, model_id="model", params={"temperature": 0})
agent = Agent(model=model, tools=[tool(multiply)], callback_handler=show)
agent(sys.argv[1])
print()
