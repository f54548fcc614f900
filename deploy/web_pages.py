"""Detect web pages that arrive instead of AWS responses, from a proxy, a load balancer or a login page."""

from __future__ import annotations

import html
import re
from typing import Any

from botocore.exceptions import BotoCoreError

_MOST = 2**14  # number of bytes that are searched for a title
# The content type is unreliable: moto labels JSON and XML as HTML, and some proxies send pages without a type.
_PAGE = re.compile(
    rb"(?:\xef\xbb\xbf)?\s*(?:<!--.*?-->\s*)?<(?:!doctype\s+html|html|head|body|h1|center)\b", re.I | re.S
)
_TITLE = re.compile(r"<title[^>]*>([^<]*)<", re.IGNORECASE)


class WebPage(BotoCoreError):  # type: ignore[misc]
    """The error for a web page that arrived instead of an AWS response."""

    fmt = "{operation}: HTTP {status}: got a web page{title} instead of AWS's response (from a proxy or a login page?)"


def refused(client: Any) -> Any:
    """Make a boto3 client raise `WebPage` for web pages, which botocore would quote in full, and return the client."""
    client.meta.events.register_first("before-parse", _check, unique_id="lmi-web-pages")
    return client


def _check(operation_model: Any, response_dict: dict[str, Any], **more: object) -> None:
    body, status = response_dict["body"], response_dict["status_code"]
    if not isinstance(body, bytes) or _PAGE.match(body[:_MOST]) is None:
        return
    if status >= 500:  # temporary: botocore retries the call, and reports the status if no retry succeeds
        response_dict["body"] = b""
        return
    raise WebPage(operation=operation_model.name, status=status, title=_title(body))


def _title(body: bytes) -> str:
    match = _TITLE.search(body[:_MOST].decode("utf-8", "replace"))
    text = " ".join(html.unescape(match[1]).split())[:100] if match else ""
    return f" ({text})" if text else ""
