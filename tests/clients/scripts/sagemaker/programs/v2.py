"""An endpoint by SageMaker's SDK, version 2; test_sagemaker_sdk.py runs it step by step."""

from sagemaker import Model, Session
from sagemaker.compute_resource_requirements.resource_requirements import ResourceRequirements
from sagemaker.deserializers import JSONDeserializer
from sagemaker.enums import EndpointType
from sagemaker.iterators import LineIterator
from sagemaker.predictor import Predictor
from sagemaker.serializers import JSONSerializer

body = {"inputs": "one two three", "parameters": {"max_new_tokens": 3}}

# Create
session = Session(default_bucket="my-bucket")
prefix = {"S3Uri": "s3://my-bucket/model/", "S3DataType": "S3Prefix", "CompressionType": "None"}
model = Model(
    image_uri="123456789012.dkr.ecr.us-east-1.amazonaws.com/lmi-handler:2.0.0",
    model_data={"S3DataSource": prefix},
    env={"OPTION_MAX_MODEL_LEN": "8192"},
    role="arn:aws:iam::123456789012:role/lmi",
    name="chat-v2",
    predictor_cls=Predictor,
    sagemaker_session=session,
)
predictor = model.deploy(
    endpoint_name="chat-v2",
    instance_type="ml.g6.xlarge",
    initial_instance_count=1,
    container_startup_health_check_timeout=1200,
    serializer=JSONSerializer(),
    deserializer=JSONDeserializer(),
    wait=False,
)

# Wait
session.wait_for_endpoint("chat-v2")

# Invoke
print(predictor.predict(body)["generated_text"])

# Stream
for line in predictor.predict_stream({**body, "stream": True}, iterator=LineIterator):
    print(line.decode())

# Delete
predictor.delete_model()
predictor.delete_endpoint()

# Component
shared = model.deploy(
    endpoint_name="shared-v2",
    instance_type="ml.g6.12xlarge",
    initial_instance_count=1,
    endpoint_type=EndpointType.INFERENCE_COMPONENT_BASED,
    inference_component_name="a-v2",
    resources=ResourceRequirements(requests={"num_accelerators": 1, "memory": 8192, "copies": 1}),
    serializer=JSONSerializer(),
    deserializer=JSONDeserializer(),
)
print(shared.predict(body)["generated_text"])
