"""Read a request's id and media type from its headers, and write the header that reports ignored parameters."""

from __future__ import annotations

import re
import urllib.parse
import uuid
from collections.abc import Mapping, Sequence

Headers = Mapping[str, str]
"""A request's headers, names in lower case."""

_REQUEST_ID = re.compile(r"[!-~]{1,128}")


def request_id(headers: Headers) -> str:
    """Return DJL's or SageMaker's id, or the client's where it is harmless, else a new one."""
    for name in ("requestid", "x-amzn-sagemaker-inference-id", "x-request-id"):
        if _REQUEST_ID.fullmatch(id := headers.get(name, "").strip()):
            return id
    return str(uuid.uuid4())


def media_type(headers: Headers) -> str:
    """Return the content type without its parameters, in lower case; "" where there is none."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Return the answer's header that lists ignored parameters.

    The names are the client's text: quoted, so that they fit a header, and cut to what SageMaker lets through.
    """
    quoted = ", ".join(urllib.parse.quote(name[:64], safe="._-") for name in names[:32])
    return {"x-lmi-ignored-parameters": quoted[:1024]} if names else {}
