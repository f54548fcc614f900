"""An endpoint by SageMaker's SDK, version 3, by its resources; test_sagemaker_sdk.py runs it step by step."""

import json

from sagemaker.core.deserializers import JSONDeserializer
from sagemaker.core.resources import Endpoint, EndpointConfig, InferenceComponent, Model
from sagemaker.core.serializers import JSONSerializer
from sagemaker.core.shapes import (
    ContainerDefinition,
    InferenceComponentComputeResourceRequirements,
    InferenceComponentRuntimeConfig,
    InferenceComponentSpecification,
    ModelDataSource,
    ProductionVariant,
    S3ModelDataSource,
)

from deploy.client import Predictor

body = {"inputs": "one two three", "parameters": {"max_new_tokens": 3}}

# Create
model = Model.create(
    model_name="chat-core",
    execution_role_arn="arn:aws:iam::123456789012:role/lmi",
    primary_container=ContainerDefinition(
        image="123456789012.dkr.ecr.us-east-1.amazonaws.com/lmi-handler:2.0.0",
        environment={"OPTION_MAX_MODEL_LEN": "8192"},
        model_data_source=ModelDataSource(
            s3_data_source=S3ModelDataSource(
                s3_uri="s3://my-bucket/model/", s3_data_type="S3Prefix", compression_type="None"
            )
        ),
    ),
)
config = EndpointConfig.create(
    endpoint_config_name="chat-core",
    production_variants=[
        ProductionVariant(
            variant_name="AllTraffic",
            model_name="chat-core",
            instance_type="ml.g6.xlarge",
            initial_instance_count=1,
            container_startup_health_check_timeout_in_seconds=1200,
        )
    ],
)
endpoint = Endpoint.create(endpoint_name="chat-core", endpoint_config_name="chat-core")

# Wait
endpoint.wait_for_status("InService")

# Invoke
answer = endpoint.invoke(body=json.dumps(body), content_type="application/json")
print(json.load(answer.body)["generated_text"])

# Stream
for text in Predictor("chat-core").predict_stream(body).text():
    print(text, end="", flush=True)

# Delete
endpoint.delete()
endpoint.wait_for_delete()
config.delete()
model.delete()

# Component
variant = ProductionVariant(variant_name="AllTraffic", instance_type="ml.g6.12xlarge", initial_instance_count=1)
EndpointConfig.create(
    endpoint_config_name="shared-core",
    execution_role_arn="arn:aws:iam::123456789012:role/lmi",
    production_variants=[variant],
)
shared = Endpoint.create(endpoint_name="shared-core", endpoint_config_name="shared-core")
shared.wait_for_status("InService")
component = InferenceComponent.create(
    inference_component_name="a-core",
    endpoint_name="shared-core",
    variant_name="AllTraffic",
    specification=InferenceComponentSpecification(
        model_name="chat-core",
        compute_resource_requirements=InferenceComponentComputeResourceRequirements(
            number_of_accelerator_devices_required=1, min_memory_required_in_mb=8192
        ),
    ),
    runtime_config=InferenceComponentRuntimeConfig(copy_count=1),
)
component.wait_for_status("InService")

answer = shared.invoke(body=json.dumps(body), content_type="application/json", inference_component_name="a-core")
print(json.load(answer.body)["generated_text"])

# Serializers
own = Predictor("chat-core", serializer=JSONSerializer(), deserializer=JSONDeserializer())
print(own.predict(body)["generated_text"])
