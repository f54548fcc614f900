"""Check request signatures and bearer tokens. The secret key and the signer's identity are not checked.

A bearer token is `sagemaker-api-key-` followed by a base64-encoded presigned URL, which states the region and the
expiry time.
"""

from __future__ import annotations

import base64
import ipaddress
import re
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

from deploy.emulator.protocol import ApiError
from handler.core.numbers import is_digits

TOKEN_PREFIX = "sagemaker-api-key-"
SERVICE = "sagemaker"
_LONGEST = 12 * 3600  # maximum lifetime of a token, in seconds
_LONGEST_URL = 7 * 24 * 3600  # maximum lifetime of a presigned URL, in seconds
_PRESIGNED = ("Credential", "Algorithm", "SignedHeaders", "Signature")
_SIGNED = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^\s,]+),\s*SignedHeaders=[^\s,]+,\s*Signature=([0-9a-f]{64})", re.ASCII
)


class RequestSignature(NamedTuple):
    """The fields of an Authorization header.

    Attributes:
        key: the access key.
        region: region that the request is signed for.
        value: the signature, 64 hexadecimal digits.
    """

    key: str
    region: str
    value: str


def check_host(host: str, origin: str | None, address: str, site: str | None = None) -> None:
    """Reject requests from foreign web pages, including pages that use DNS rebinding.

    Args:
        host: the Host header. It must name this machine if the connection uses a loopback address.
        origin: the Origin header, or None. Pages served from this machine are accepted.
        address: local address of the connection.
        site: the Sec-Fetch-Site header, or None. Browsers also send it for images and links, without an Origin header.

    Raises:
        ApiError: the request is rejected.
    """
    if origin is not None and not _is_loopback(urlsplit(origin).hostname or ""):
        raise ApiError(403, "AccessDeniedException", f"Pages of {origin[:100]!r} may not call this endpoint.")
    if origin is None and site == "cross-site":
        raise ApiError(403, "AccessDeniedException", "Pages of other sites may not call this endpoint.")
    if _is_loopback(address) and not _is_loopback(urlsplit(f"//{host}").hostname or ""):
        raise ApiError(403, "AccessDeniedException", f"Host {host[:100]!r} does not name this machine.")


def _is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def check_signed(authorization: str | None, query: Mapping[str, str], region: str | None, now: datetime) -> str:
    """Return the region that a request is signed for, according to its Authorization header or presigned URL.

    Args:
        authorization: the Authorization header, or None if the request has none.
        query: query parameters of the URL.
        region: the required region, or None to accept any region.

    Raises:
        ApiError: the signature is missing or expired, is not Signature Version 4, or is for another service or region.
    """
    if authorization is None and "X-Amz-Signature" in query:
        return check_presigned(query, region, now)
    return read_signature(authorization, region).region


def read_signature(authorization: str | None, region: str | None) -> RequestSignature:
    """Return the fields of an Authorization header.

    Args:
        authorization: the Authorization header, or None if the request has none.
        region: the required region, or None to accept any region.

    Raises:
        ApiError: the signature is missing, is not Signature Version 4, or is for another service or region.
    """
    if not authorization:
        raise ApiError(403, "MissingAuthenticationToken", "Missing Authentication Token")
    signed = _SIGNED.fullmatch(authorization)
    if signed is None:
        raise ApiError(403, "IncompleteSignature", "The Authorization header is not a Signature Version 4.")
    signed_region = _region(signed[1], region, "InvalidSignatureException")
    return RequestSignature(signed[1].rsplit("/", 4)[0], signed_region, signed[2])


def check_presigned(query: Mapping[str, str], region: str | None, now: datetime) -> str:
    """Return the region that a presigned URL is signed for.

    Args:
        query: query parameters of the URL, which include the signature.
        region: the required region, or None to accept any region.

    Raises:
        ApiError: the signature is incomplete, expired, not Signature Version 4, or for another service or region.
    """
    try:
        signed_at, seconds = _period(query)
        scope, algorithm, _, _ = (query[f"X-Amz-{name}"] for name in _PRESIGNED)
    except (ValueError, KeyError) as error:
        raise ApiError(403, "IncompleteSignature", f"The presigned URL is incomplete or invalid: {error}.") from error
    if algorithm != "AWS4-HMAC-SHA256" or not 1 <= seconds <= _LONGEST_URL:
        raise ApiError(403, "IncompleteSignature", "Presign with Signature Version 4, for at most 7 days.")
    if now > signed_at + timedelta(seconds=seconds):
        text = f"Signature expired: it was valid for {seconds} s from {signed_at.isoformat()}."
        raise ApiError(403, "InvalidSignatureException", text)
    return _region(scope, region, "InvalidSignatureException")


def _period(query: Mapping[str, str]) -> tuple[datetime, int]:
    """Return the time at which a URL was signed, and the number of seconds for which it is valid.

    Raises:
        ValueError: the time or the number of seconds is invalid.
        KeyError: the time or the number of seconds is missing.
    """
    signed_at, seconds = query["X-Amz-Date"], query["X-Amz-Expires"]
    if not signed_at.isascii() or not is_digits(seconds):
        raise ValueError(f"X-Amz-Date={signed_at}, X-Amz-Expires={seconds}")
    return datetime.strptime(signed_at, "%Y%m%dT%H%M%SZ").replace(tzinfo=timezone.utc), int(seconds)


def check_token(authorization: str | None, region: str | None, now: datetime) -> str:
    """Return the region that a bearer token is signed for.

    Raises:
        ApiError: the token is missing, malformed or expired, or is for another action, service or region.
    """
    if not authorization:
        raise ApiError(403, "MissingAuthenticationToken", "Missing Authentication Token")
    if not authorization.startswith(f"Bearer {TOKEN_PREFIX}"):
        raise _access_denied(f"this route requires the header Authorization: Bearer {TOKEN_PREFIX}...")
    try:
        query = _query_of_token(authorization.removeprefix(f"Bearer {TOKEN_PREFIX}"))
        signed_at, seconds = _period(query)
        until = signed_at + timedelta(seconds=seconds)
        scope, action, _ = query["X-Amz-Credential"], query["Action"], query["X-Amz-Signature"]
    except (ValueError, OverflowError, KeyError) as error:
        raise _access_denied("the bearer token is not a base64-encoded presigned URL") from error
    if action != "CallWithBearerToken":
        raise _access_denied(f"the bearer token is signed for {action}, not for CallWithBearerToken")
    if not 1 <= seconds <= _LONGEST:
        raise _access_denied(f"the bearer token is valid for {seconds} s, but the maximum is {_LONGEST} s")
    if now > until:
        text = f"The bearer token has expired: it was valid for {seconds} s from {signed_at.isoformat()}."
        raise ApiError(403, "ExpiredTokenException", text)
    return _region(scope, region, "AccessDeniedException")


def _query_of_token(encoded: str) -> dict[str, str]:
    url = base64.b64decode(encoded, validate=True).decode()
    return {name: values[0] for name, values in parse_qs(url.partition("?")[2]).items()}


def _region(credential: str, expected: str | None, code: str) -> str:
    """Return the region of a credential scope, `key/date/region/service/aws4_request`."""
    match credential.rsplit("/", 4):
        case [_, _, region, service, "aws4_request"] if service == SERVICE:
            if expected is None or region == expected:
                return region
            raise ApiError(403, code, f"Credential is scoped to {region}; this endpoint is in {expected}.")
        case _:
            raise ApiError(403, code, f"Credential must be scoped to service {SERVICE}.")


def _access_denied(reason: str) -> ApiError:
    return ApiError(403, "AccessDeniedException", f"Not authorized: {reason}.")
