"""Web pages instead of AWS's answers: from a proxy, a load balancer, or a network that requires a login."""

from __future__ import annotations

import html
import re
from typing import Any

from botocore.exceptions import BotoCoreError

_MOST = 2**14  # bytes in which to look for a title
# The content type does not tell: moto calls JSON and XML HTML too, and proxies send pages without one.
_PAGE = re.compile(
    rb"(?:\xef\xbb\xbf)?\s*(?:<!--.*?-->\s*)?<(?:!doctype\s+html|html|head|body|h1|center)\b", re.I | re.S
)
_TITLE = re.compile(r"<title[^>]*>([^<]*)<", re.IGNORECASE)


class WebPage(BotoCoreError):  # type: ignore[misc]
    """The answer is a web page, not AWS's."""

    fmt = "{operation}: HTTP {status}: a web page{title} instead of AWS's answer (a proxy's, or a login's?)"


def refused(client: Any) -> Any:
    """Make a boto3 client raise `WebPage` for a page, which botocore would show whole; return the client."""
    client.meta.events.register_first("before-parse", _check, unique_id="lmi-web-pages")
    return client


def _check(operation_model: Any, response_dict: dict[str, Any], **more: object) -> None:
    body, status = response_dict["body"], response_dict["status_code"]
    if not isinstance(body, bytes) or _PAGE.match(body[:_MOST]) is None:
        return
    if status >= 500:  # one that passes: botocore repeats the call, and names the status if that does not help
        response_dict["body"] = b""
        return
    raise WebPage(operation=operation_model.name, status=status, title=_title(body))


def _title(body: bytes) -> str:
    found = _TITLE.search(body[:_MOST].decode("utf-8", "replace"))
    text = " ".join(html.unescape(found[1]).split())[:100] if found else ""
    return f" ({text})" if text else ""
