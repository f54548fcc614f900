"""A chat page of your own: Gradio draws it, the server streams the answers.

    lmi serve
    python gradio_chat.py                              # http://127.0.0.1:7860

LMI_URL is another server, LMI_API_KEY its key, PORT another port. Needs: pip install gradio openai
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import gradio
from openai import OpenAI

url, key = os.environ.get("LMI_URL", "http://127.0.0.1:8080"), os.environ.get("LMI_API_KEY", "none")
client = OpenAI(base_url=f"{url}/v1", api_key=key)


def answer(message: str, history: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the answer so far, at each token."""
    said = [{"role": one["role"], "content": one["content"]} for one in history]
    messages: Any = [*said, {"role": "user", "content": message}]
    text = ""
    for chunk in client.chat.completions.create(model="model", messages=messages, max_tokens=512, stream=True):
        text += chunk.choices[0].delta.content or ""
        yield text


page = gradio.ChatInterface(answer, title="My model", examples=["Name three rivers.", "Write a haiku about rain."])
page.launch(server_name="127.0.0.1", server_port=int(os.environ.get("PORT", "7860")))
