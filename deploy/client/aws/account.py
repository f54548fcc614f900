"""Which credentials and region a request is signed with."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

import boto3

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_ANY_REGION = "us-east-1"


def boto_session(region: str | None = None, endpoint_url: str | None = None) -> Any:
    """boto3's session.

    For an emulator on this machine, which wants requests signed but not by whom, it has a region and credentials even
    where none are set.
    """
    session = boto3.session.Session(region_name=region or os.environ.get("AWS_REGION"))
    if endpoint_url is None or urlsplit(endpoint_url).hostname not in _LOOPBACK:
        return session
    region = session.region_name or _ANY_REGION
    if session.get_credentials() is None:
        return boto3.session.Session("local", "local", region_name=region)
    return boto3.session.Session(region_name=region)
