"""Calls with SageMaker's Python SDK 2: Predictor.predict and predict_stream on boto3."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import boto3
from botocore.config import Config
from common import main
from sagemaker import Session
from sagemaker.deserializers import JSONDeserializer
from sagemaker.iterators import ByteIterator, LineIterator
from sagemaker.predictor import Predictor
from sagemaker.serializers import JSONSerializer

os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}


class Sagemaker:
    """Options: `endpoint`, `bytes` (a stream's parts as they come), and the body beside its `inputs`."""

    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        return _predictor(url, options).predict({"inputs": prompt, **options})

    def stream(self, url: str, prompt: str, options: dict[str, Any]) -> Iterator[Any]:
        predictor = _predictor(url, options)
        iterator = ByteIterator if options.pop("bytes", False) else LineIterator
        for piece in predictor.predict_stream({"inputs": prompt, "stream": True, **options}, iterator=iterator):
            yield json.loads(piece) if iterator is LineIterator else piece.decode()

    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        raise NotImplementedError

    def stream_async(self, url: str, prompt: str, options: dict[str, Any]) -> AsyncIterator[Any]:
        raise NotImplementedError


def _predictor(url: str, options: dict[str, Any]) -> Predictor:
    session = boto3.Session(region_name="us-east-1")
    runtime = session.client("sagemaker-runtime", endpoint_url=url, config=Config(retries={"total_max_attempts": 1}))
    return Predictor(
        options.pop("endpoint", "local"),
        sagemaker_session=Session(session, sagemaker_client=object(), sagemaker_runtime_client=runtime),
        serializer=JSONSerializer(),
        deserializer=JSONDeserializer(),
    )


main(Sagemaker())
