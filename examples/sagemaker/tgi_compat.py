"""An answer token by token, as TGI streams it, from an endpoint with option.tgi_compat=true (OPTION_TGI_COMPAT).

ENDPOINT_NAME=... python tgi_compat.py
"""

import json
import os

import boto3

runtime = boto3.client("sagemaker-runtime")
body = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 24}, "stream": True}
answer = runtime.invoke_endpoint_with_response_stream(
    EndpointName=os.environ["ENDPOINT_NAME"], ContentType="application/json", Body=json.dumps(body)
)
if answer["ContentType"] != "text/event-stream":
    raise SystemExit(f"the endpoint answers {answer['ContentType']}: it runs without option.tgi_compat=true")

rest = b""
for event in answer["Body"]:
    *lines, rest = (rest + event["PayloadPart"]["Bytes"]).split(b"\n")
    for line in lines:
        if not line.startswith(b"data:"):  # what parts the events, or a sign of life
            continue
        found = json.loads(line.removeprefix(b"data:"))
        if "error" in found:
            raise SystemExit(f"\nthe model failed: {found['error']}")
        print(found["token"]["text"], end="", flush=True)
print()
