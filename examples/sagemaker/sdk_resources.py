"""An endpoint by the resources of SageMaker's SDK 3, one streamed answer, and its end.

IMAGE=... ROLE=... HF_MODEL_ID=... python sdk_resources.py
"""

import os

from sagemaker.core.resources import Endpoint, EndpointConfig, Model
from sagemaker.core.shapes import ContainerDefinition, ProductionVariant

from deploy.client import Predictor

NAME = os.environ.get("ENDPOINT_NAME", "resources")
container = ContainerDefinition(image=os.environ["IMAGE"], environment={"HF_MODEL_ID": os.environ["HF_MODEL_ID"]})
variant = ProductionVariant(
    variant_name="AllTraffic",
    model_name=NAME,
    instance_type=os.environ.get("INSTANCE_TYPE", "ml.g6.xlarge"),
    initial_instance_count=1,
    container_startup_health_check_timeout_in_seconds=1200,
)
model = Model.create(model_name=NAME, execution_role_arn=os.environ["ROLE"], primary_container=container)
config = EndpointConfig.create(endpoint_config_name=NAME, production_variants=[variant])
endpoint = Endpoint.create(endpoint_name=NAME, endpoint_config_name=NAME)
try:
    endpoint.wait_for_status("InService")
    prompt = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 24}}
    for text in Predictor(NAME).predict_stream(prompt).text():
        print(text, end="", flush=True)
    print()
finally:  # an endpoint costs money until it is deleted
    endpoint.delete()
    endpoint.wait_for_delete()
    config.delete()
    model.delete()
