"""The emulator's parts: the event stream's bytes, and presigned URLs."""

from __future__ import annotations

import json
import random
import time
from datetime import datetime, timedelta, timezone
from typing import Any, cast
from urllib.parse import parse_qsl, urlsplit

import pytest
from botocore.auth import SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.eventstream import EventStreamBuffer

from deploy.emulator.access import check_presigned
from deploy.emulator.protocol import ApiError
from deploy.emulator.relay import internal_stream_failure, model_stream_error, payload_part
from deploy.emulator.runtimes import Accepted

# -- asynchronous requests ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("waited", "place", "content"), [
    (30, "s3://b/a.out", b"done"),
    (61, "s3://b/a-error.out", b"The request expired: it waited for more than 60 s."),
])  # fmt: skip
def test_one_that_waits_beyond_its_time_expires(waited: float, place: str, content: bytes) -> None:
    class Store:
        """S3, for a role that may write everything."""

        def check(self, *needs: Any) -> None: ...

        def writing(self, uri: str) -> list[Any]:
            return []

        def write(self, uri: str, data: bytes, **headers: str) -> None:
            written[uri] = data

    written: dict[str, bytes] = {}
    since = time.monotonic() - waited
    accepted = Accepted(
        cast("Any", Store()),
        "e",
        "text/plain",
        "i",
        b"{}",
        None,
        {},
        "s3://b/a.out",
        "s3://b/a-error.out",
        60,
        1,
        since=since,
    )
    accepted.work(lambda body: b"done")
    assert written == {place: content}


# -- the event stream's bytes: one message written out, and all of them as botocore reads them -------------------------


HEADERS = (
    b"\x0b:event-type\x07\x00\x0bPayloadPart"
    b"\x0d:content-type\x07\x00\x18application/octet-stream"
    b"\x0d:message-type\x07\x00\x05event"
)


def read(data: bytes) -> list[tuple[dict[str, str], bytes]]:
    buffer = EventStreamBuffer()
    buffer.add_data(data)
    return [(dict(message.headers), message.payload) for message in buffer]


def test_a_part_is_these_bytes() -> None:
    message = payload_part(b"hi")
    assert message[:8] == b"\x00\x00\x00\x6b\x00\x00\x00\x59"  # 107 bytes, 89 of them headers
    assert message[8:12] == bytes.fromhex("99777065")
    assert message[12:-6] == HEADERS
    assert message[-6:-4] == b"hi"
    assert message[-4:] == bytes.fromhex("f0e10a16")


@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"\xf0\x9f", bytes(range(256)) * 300], ids=["empty", "nul", "half", "long"]
)
def test_botocore_reads_a_part_as_it_was(data: bytes) -> None:
    [(headers, payload)] = read(payload_part(data))
    assert payload == data
    assert headers == {
        ":event-type": "PayloadPart",
        ":content-type": "application/octet-stream",
        ":message-type": "event",
    }


def test_parts_one_after_another_and_cut_anywhere() -> None:
    random_ = random.Random(7)
    parts = [random_.randbytes(random_.randrange(40)) for _ in range(50)]
    stream = b"".join(map(payload_part, parts))
    buffer, got = EventStreamBuffer(), []
    while stream:
        size = random_.randrange(1, 90)
        buffer.add_data(stream[:size])
        stream = stream[size:]
        got += [message.payload for message in buffer]
    assert got == parts


def test_exceptions_name_their_kind_and_carry_json() -> None:
    [(headers, payload)] = read(model_stream_error("StreamBroken", "cut “off”"))
    assert headers == {
        ":exception-type": "ModelStreamError",
        ":content-type": "application/json",
        ":message-type": "exception",
    }
    assert json.loads(payload) == {"Message": "cut “off”", "ErrorCode": "StreamBroken"}
    [(headers, payload)] = read(internal_stream_failure("boom"))
    assert headers[":exception-type"] == "InternalStreamFailure"
    assert json.loads(payload) == {"Message": "boom"}


# -- presigned URLs, made by botocore's own signer ---------------------------------------------------------------------


def presigned(seconds: int = 60, service: str = "sagemaker") -> dict[str, str]:
    request = AWSRequest("POST", "http://127.0.0.1/endpoints/e/invocations", data=b"{}")
    SigV4QueryAuth(Credentials("AKID", "secret"), service, "eu-west-1", expires=seconds).add_auth(request)
    return dict(parse_qsl(urlsplit(request.url).query))


def test_a_presigned_url_is_taken() -> None:
    assert check_presigned(presigned(), "eu-west-1", datetime.now(timezone.utc)) == "eu-west-1"


@pytest.mark.parametrize(("query", "code"), [
    (presigned(service="s3"), "InvalidSignatureException"),
    (presigned(700_000), "IncompleteSignature"),
    ({**presigned(), "X-Amz-Expires": "soon"}, "IncompleteSignature"),
    ({**presigned(), "X-Amz-Expires": "٦٠"}, "IncompleteSignature"),
    ({**presigned(), "X-Amz-Date": presigned()["X-Amz-Date"].replace("0", "٠")}, "IncompleteSignature"),
    ({"X-Amz-Signature": "0"}, "IncompleteSignature"),
])  # fmt: skip
def test_another_one_is_refused(query: dict[str, str], code: str) -> None:
    with pytest.raises(ApiError) as raised:
        check_presigned(query, None, datetime.now(timezone.utc))
    assert code in str(vars(raised.value))


def test_an_expired_one_and_one_of_another_region_are_refused() -> None:
    now = datetime.now(timezone.utc)
    for region, at in ((None, now + timedelta(hours=1)), ("us-east-1", now)):
        with pytest.raises(ApiError):
            check_presigned(presigned(), region, at)
