"""Chat over one bidirectional stream, a line of standard input each: ENDPOINT_NAME=... python bidirectional_chat.py

Needs Python 3.12: pip install 'aws-sdk-sagemaker-runtime-http2[awscrt]~=0.12.0'
On this machine: `lmi deploy local --bidirectional-port 8443`, URL=https://localhost:8443 and the printed SSL_CERT_FILE.
"""

import asyncio
import json
import os
import sys

from aws_sdk_sagemaker_runtime_http2.client import AsyncSageMakerRuntimeHTTP2Client
from aws_sdk_sagemaker_runtime_http2.config import AsyncSageMakerRuntimeHTTP2Config
from aws_sdk_sagemaker_runtime_http2.models import (
    InvokeEndpointWithBidirectionalStreamInput,
    RequestPayloadPart,
    RequestStreamEventPayloadPart,
)
from smithy_http.aio.crt import AWSCRTHTTPClient

REGION = os.environ["AWS_REGION"]
URL = os.environ.get("URL", f"https://runtime.sagemaker.{REGION}.amazonaws.com:8443")


async def respond(stream, messages):
    """Print the response to the messages as it arrives, and return its text."""
    body = {"messages": messages, "max_tokens": 64, "temperature": 0, "stream": True}
    part = RequestPayloadPart(bytes_=json.dumps(body).encode(), data_type="UTF8")
    await stream.input_stream.send(RequestStreamEventPayloadPart(value=part))
    text = ""
    while (event := await stream.output_stream.receive()) is not None:
        chunk = json.loads(event.value.bytes_)
        if "choices" not in chunk:
            sys.exit(f"error {chunk.get('status')}: {chunk.get('error')}")
        choice = chunk["choices"][0]
        piece = choice["delta"].get("content") or ""
        print(piece, end="", flush=True)
        text += piece
        if choice["finish_reason"]:
            print()
            return text
    sys.exit("the endpoint ended the stream")


async def main():
    config = await AsyncSageMakerRuntimeHTTP2Config.resolve(
        endpoint_uri=URL, region=REGION, transport=AWSCRTHTTPClient()
    )
    client = AsyncSageMakerRuntimeHTTP2Client(config=config)
    request = InvokeEndpointWithBidirectionalStreamInput(endpoint_name=os.environ["ENDPOINT_NAME"])
    messages = []
    async with await client.invoke_endpoint_with_bidirectional_stream(request) as stream:
        await stream.await_output()
        for line in sys.stdin:
            messages.append({"role": "user", "content": line.strip()})
            messages.append({"role": "assistant", "content": await respond(stream, messages)})


asyncio.run(main())
