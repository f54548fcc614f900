"""OpenAI's own client on an endpoint's /openai route: ENDPOINT_NAME=... python openai_client.py

The key is a bearer token, made here from AWS credentials. It is valid for an hour and has their permissions.
Needs: pip install boto3 openai
"""

import base64
import os

import boto3
from botocore.auth import SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from openai import OpenAI

session = boto3.Session()
HOST = "sagemaker.amazonaws.com"
request = AWSRequest("POST", f"https://{HOST}/", {"host": HOST}, params={"Action": "CallWithBearerToken"})
SigV4QueryAuth(session.get_credentials(), "sagemaker", session.region_name, expires=3600).add_auth(request)
token = base64.b64encode((request.url.removeprefix("https://") + "&Version=1").encode()).decode()

runtime = session.client("sagemaker-runtime").meta.endpoint_url
client = OpenAI(
    base_url=f"{runtime}/endpoints/{os.environ['ENDPOINT_NAME']}/openai/v1", api_key=f"sagemaker-api-key-{token}"
)
messages = [{"role": "user", "content": "Name the capital of France."}]
stream = client.chat.completions.create(model="", messages=messages, max_tokens=24, temperature=0, stream=True)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
print()
