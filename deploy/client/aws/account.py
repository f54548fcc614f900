"""Credentials and region of requests, and boto3's client of SageMaker Runtime."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

import boto3
from botocore.config import Config

from deploy import web_pages

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_ANY_REGION = "us-east-1"


def boto_session(region: str | None = None, endpoint_url: str | None = None) -> Any:
    """Return boto3's session.

    For an emulator on this machine it has a region and credentials even if none are set, as any signature is accepted.
    """
    session = boto3.session.Session(region_name=region or os.environ.get("AWS_REGION"))
    if endpoint_url is None or urlsplit(endpoint_url).hostname not in _LOOPBACK:
        return session
    region = session.region_name or _ANY_REGION
    if session.get_credentials() is None:
        return boto3.session.Session("local", "local", region_name=region)
    return boto3.session.Session(region_name=region)


def runtime_client(
    session: Any, region: str | None, endpoint_url: str | None, service: str = "sagemaker-runtime", **config: Any
) -> Any:
    """Return boto3's client of SageMaker Runtime without retries: a retry would be another generation.

    Args:
        service: boto3's name of it, or of the inference routers' runtime.
        config: further arguments of botocore's `Config`.
    """
    once = {"total_max_attempts": 1, "mode": "standard"}
    own = Config(tcp_keepalive=True, retries=once, user_agent_extra="lmi-client", **config)
    return web_pages.refused(session.client(service, region_name=region, endpoint_url=endpoint_url, config=own))
