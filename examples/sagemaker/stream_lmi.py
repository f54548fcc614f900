"""An answer token by token, in LMI's schema: ENDPOINT_NAME=... python stream_lmi.py

Each line of the stream is JSON; async mode ends with empty lines. SageMaker splits the stream anywhere: a part may end
in the middle of a line.
"""

import json
import os

import boto3

runtime = boto3.client("sagemaker-runtime")
body = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 24}, "stream": True}
answer = runtime.invoke_endpoint_with_response_stream(
    EndpointName=os.environ["ENDPOINT_NAME"], ContentType="application/json", Body=json.dumps(body)
)

rest = b""
for event in answer["Body"]:
    *lines, rest = (rest + event["PayloadPart"]["Bytes"]).split(b"\n")
    for line in filter(bytes.strip, lines):
        found = json.loads(line)
        if "error" in found or (found.get("details") or {}).get("finish_reason") == "error":
            raise SystemExit(f"\nthe model failed: {line.decode()}")
        print(found["token"]["text"], end="", flush=True)
print()
