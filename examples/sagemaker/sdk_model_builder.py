"""An endpoint by SageMaker's ModelBuilder, one streamed answer, and its end.

IMAGE=... ROLE=... BUCKET=... MODEL=s3://.../model.tar.gz python sdk_model_builder.py
"""

import os

import boto3
from sagemaker.core.helper.session_helper import Session
from sagemaker.serve import ModelBuilder

from deploy.client import Predictor

NAME = os.environ.get("ENDPOINT_NAME", "model-builder")
builder = ModelBuilder(
    image_uri=os.environ["IMAGE"],
    model_path=os.environ["MODEL"],
    role_arn=os.environ["ROLE"],
    instance_type=os.environ.get("INSTANCE_TYPE", "ml.g6.xlarge"),
    sagemaker_session=Session(default_bucket=os.environ["BUCKET"]),
)
model = builder.build(model_name=NAME)
endpoint = builder.deploy(endpoint_name=NAME, wait=False, container_startup_health_check_timeout=1200)
try:
    endpoint.wait_for_status("InService")
    prompt = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 24}}
    for text in Predictor(NAME).predict_stream(prompt).text():
        print(text, end="", flush=True)
    print()
finally:  # an endpoint costs money until it is deleted
    endpoint.delete()
    endpoint.wait_for_delete()
    boto3.client("sagemaker").delete_endpoint_config(EndpointConfigName=NAME)
    model.delete()
