"""A client for endpoints: `Predictor`, its results and its errors."""

from deploy.client.asynchronous import AsyncAnswer
from deploy.client.errors import (
    Broken,
    ComponentFailed,
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
from deploy.client.predictor import OpenAIRoute, Predictor, Session
from deploy.client.runtime import Patience, Timeouts, bearer_token
from deploy.client.serializers import BytesDeserializer, JSONDeserializer, JSONSerializer
from deploy.client.streaming import Event, Finish, Raw, Stream, Token

__all__ = [
    "AsyncAnswer",
    "Broken",
    "BytesDeserializer",
    "ComponentFailed",
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
