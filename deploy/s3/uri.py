"""Split a validated `s3://bucket/key` of a specification."""

from __future__ import annotations


def bucket_and_key(uri: str) -> tuple[str, str]:
    """Return bucket and key; the key may be empty."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key
