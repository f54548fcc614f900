"""A chat in OpenAI's form by boto3, token by token: ENDPOINT_NAME=... python openai_chat.py

The custom attribute asks the container to answer as /v1/chat/completions does: OpenAI's chunks as server-sent events.
"""

import json
import os

import boto3

runtime = boto3.client("sagemaker-runtime")
messages = [{"role": "user", "content": "Name the capital of France."}]
body = {"messages": messages, "max_tokens": 24, "temperature": 0, "stream": True}
answer = runtime.invoke_endpoint_with_response_stream(
    EndpointName=os.environ["ENDPOINT_NAME"],
    ContentType="application/json",
    CustomAttributes="route=/v1/chat/completions",
    Body=json.dumps(body),
)

rest = b""
for event in answer["Body"]:
    *lines, rest = (rest + event["PayloadPart"]["Bytes"]).split(b"\n")
    for line in lines:
        if not line.startswith(b"data:") or line == b"data: [DONE]":
            continue
        found = json.loads(line.removeprefix(b"data:"))
        if "error" in found:
            raise SystemExit(f"\nthe model failed: {found['error']['message']}")
        for choice in found["choices"]:
            print(choice["delta"].get("content") or "", end="", flush=True)
print()
