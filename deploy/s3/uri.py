"""`s3://bucket/key`, as specifications have it. Users' own URIs are looked at closer, in `client/` and `local/`."""

from __future__ import annotations


def bucket_and_key(uri: str) -> tuple[str, str]:
    """Of a URI that the specification has taken; the key may be empty."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key
