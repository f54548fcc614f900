"""One whole answer of an endpoint: ENDPOINT_NAME=... python invoke.py"""

import json
import os

import boto3
from botocore.config import Config

# A slow answer is not asked for again: SageMaker allows 60 s, and a retry would generate it once more.
config = Config(read_timeout=70, retries={"total_max_attempts": 1})
runtime = boto3.client("sagemaker-runtime", config=config)

body = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 24, "details": True}}
answer = runtime.invoke_endpoint(
    EndpointName=os.environ["ENDPOINT_NAME"], ContentType="application/json", Body=json.dumps(body)
)
found = json.load(answer["Body"])
print(found["generated_text"])
print(found["details"]["finish_reason"], "after", found["details"]["generated_tokens"], "tokens")
