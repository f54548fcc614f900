"""The form of a policy's statements. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from deploy.iam.arns import Arns
from deploy.s3.uri import bucket_and_key

Statement = dict[str, Any]
Policy = dict[str, Any]


def allow(
    sid: str, actions: Sequence[str], resources: Sequence[str], condition: dict[str, Any] | None = None
) -> Statement:
    """Return a statement that allows actions on resources."""
    statement = {"Sid": sid, "Effect": "Allow", "Action": list(actions), "Resource": list(resources)}
    return {**statement, "Condition": condition} if condition else statement


def listing(arns: Arns, sid: str, places: Sequence[str]) -> Iterator[dict[str, Any]]:
    buckets: dict[str, list[str]] = {}
    for place in places:
        bucket, key = bucket_and_key(place)
        buckets.setdefault(bucket, []).append(f"{key}*")
    for number, (bucket, prefixes) in enumerate(buckets.items()):
        condition = {"StringLike": {"s3:prefix": sorted(set(prefixes))}}
        yield allow(f"{sid}{number or ''}", ["s3:ListBucket"], [arns.bucket(bucket)], condition)


def key_via(arns: Arns, service: str, sid: str, key: str | None, actions: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A key that a service uses in its caller's name, for what it stores."""
    if key is not None:
        yield allow(sid, actions, *arns.key(key, arns.via(service)))
