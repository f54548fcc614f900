"""Client of an endpoint: `Predictor`, its results and its errors."""

from deploy.client.asynchronous import AsyncAnswer
from deploy.client.aws.bearer import bearer_token
from deploy.client.aws.runtime import Timeouts
from deploy.client.errors import (
    Broken,
    Forbidden,
    ModelBusy,
    ModelFailed,
    ModelRefused,
    NoCapacity,
    NoSuchEndpoint,
    NotReady,
    NotSent,
    NotStarted,
    RequestFailed,
    ServiceFailed,
    StreamBroken,
    Throttled,
    TimedOut,
    Unreachable,
)
from deploy.client.openai_route import OpenAIRoute
from deploy.client.predictor import Predictor
from deploy.client.retry import Patience
from deploy.client.serializers import BytesDeserializer, JSONDeserializer, JSONSerializer
from deploy.client.session import Session
from deploy.client.streaming.events import Event, Finish, Raw, Token
from deploy.client.streaming.stream import Stream

__all__ = [
    "AsyncAnswer",
    "Broken",
    "BytesDeserializer",
    "Event",
    "Finish",
    "Forbidden",
    "JSONDeserializer",
    "JSONSerializer",
    "ModelBusy",
    "ModelFailed",
    "ModelRefused",
    "NoCapacity",
    "NoSuchEndpoint",
    "NotReady",
    "NotSent",
    "NotStarted",
    "OpenAIRoute",
    "Patience",
    "Predictor",
    "Raw",
    "RequestFailed",
    "ServiceFailed",
    "Session",
    "Stream",
    "StreamBroken",
    "Throttled",
    "TimedOut",
    "Timeouts",
    "Token",
    "Unreachable",
    "bearer_token",
]
