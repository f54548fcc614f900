"""An endpoint by SageMaker's SDK, version 3, by ModelBuilder; test_sagemaker_sdk.py runs it step by step."""

import json

import boto3
from sagemaker.core.helper.session_helper import Session
from sagemaker.core.inference_config import ResourceRequirements
from sagemaker.core.resources import InferenceComponent
from sagemaker.serve import ModelBuilder

from deploy.client import Predictor

body = {"inputs": "one two three", "parameters": {"max_new_tokens": 3}}

# Create
builder = ModelBuilder(
    image_uri="123456789012.dkr.ecr.us-east-1.amazonaws.com/lmi-handler:2.0.0",
    model_path="s3://my-bucket/model.tar.gz",
    env_vars={"OPTION_MAX_MODEL_LEN": "8192"},
    role_arn="arn:aws:iam::123456789012:role/lmi",
    instance_type="ml.g6.xlarge",
    sagemaker_session=Session(default_bucket="my-bucket"),
)
builder.build(model_name="chat-serve")
endpoint = builder.deploy(
    endpoint_name="chat-serve",
    wait=False,
    container_startup_health_check_timeout=1200,
    model_data_download_timeout=1200,
)

# Wait
endpoint.wait_for_status("InService")

# Invoke
answer = endpoint.invoke(body=json.dumps(body), content_type="application/json")
print(json.load(answer.body)["generated_text"])

# Stream
for text in Predictor("chat-serve").predict_stream(body).text():
    print(text, end="", flush=True)

# Delete
endpoint.delete()
endpoint.wait_for_delete()
boto3.client("sagemaker").delete_endpoint_config(EndpointConfigName="chat-serve")
builder.built_model.delete()

# Component
shared = builder.deploy(
    endpoint_name="shared-serve",
    inference_component_name="a-serve",
    inference_config=ResourceRequirements(requests={"num_accelerators": 1, "memory": 8192, "copies": 1}),
    container_startup_health_check_timeout=1200,
)
InferenceComponent.get("a-serve").wait_for_status("InService")
answer = shared.invoke(body=json.dumps(body), content_type="application/json", inference_component_name="a-serve")
print(json.load(answer.body)["generated_text"])
