"""Wait until the response to an asynchronous request is in S3."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from botocore.exceptions import ClientError

from deploy.client.errors import FROM_AWS, ModelFailed, NotSent, TimedOut, s3_failure
from deploy.client.serializers import Deserializer, deserialize_body

MAX_INLINE_BYTES = 128_000
_ABSENT = ("404", "NoSuchKey", "NotFound")
_DENIED = ("403", "AccessDenied")
_FORBIDDEN = "Allow s3:GetObject, and s3:ListBucket: without it, S3 reports missing objects as forbidden."
_FIRST, _LONGEST = 0.5, 10.0  # seconds between two polls


class AsyncAnswer:
    """The response to an asynchronous request, which SageMaker will write to S3.

    Args:
        response: response of InvokeEndpointAsync.
        s3: boto3's client for S3.

    Attributes:
        id: the ID of the inference.
        output: the URI to which the response will be written.
        failure: the URI to which a failure would be written, or None if the endpoint has no location for failures.
    """

    def __init__(
        self,
        response: dict[str, Any],
        s3: Any,
        deserializer: Deserializer,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.id: str = response.get("InferenceId", "")
        self.output: str = response["OutputLocation"]
        self.failure: str | None = response.get("FailureLocation")
        self._s3 = s3
        self._deserializer = deserializer
        self._clock = clock
        self._sleep = sleep

    def ready(self) -> bool:
        """Return whether the response or a failure has been written."""
        return self._fetch(self.output) is not None or self._fetch(self.failure) is not None

    def wait(self, seconds: float = 3600) -> Any:
        """Wait for the response, and return it deserialized.

        Args:
            seconds: timeout. The default, an hour, is SageMaker's maximum (InvocationTimeoutSeconds).

        Raises:
            ModelFailed: the model failed. The message quotes the failure that SageMaker wrote.
            TimedOut: neither a response nor a failure was written in time.
            RequestFailed: reading from S3 failed.
        """
        until, pause = self._clock() + seconds, _FIRST
        while True:
            if (fetched := self._fetch(self.output)) is not None:
                body, content_type = fetched
                return deserialize_body(self._deserializer, body, content_type)
            if (failed := self._fetch(self.failure)) is not None:
                raise ModelFailed(f"the model failed: {failed[0].decode('utf-8', 'replace').strip()}")
            if (left := until - self._clock()) <= 0:
                raise TimedOut(f"no response at {self.output} in {seconds:g} s", "`lmi deploy status` shows the queue.")
            self._sleep(min(pause, left))
            pause = min(1.5 * pause, _LONGEST)

    def _fetch(self, uri: str | None) -> tuple[bytes, str] | None:
        if uri is None:
            return None
        bucket, key = split_s3(uri)
        try:
            response = self._s3.get_object(Bucket=bucket, Key=key)
            return response["Body"].read(), response.get("ContentType", "")
        except FROM_AWS as error:
            code = error.response["Error"].get("Code") if isinstance(error, ClientError) else None
            if code in _ABSENT or (code in _DENIED and self._is_absent(bucket, key)):
                return None
            request_failed = s3_failure(error, "Read the response again.")
            if code in _DENIED:
                request_failed.advice = _FORBIDDEN
            raise request_failed from error

    def _is_absent(self, bucket: str, key: str) -> bool:
        """Return whether a listing shows that the object is missing. S3 may report that as 403 instead of 404."""
        try:
            listed = self._s3.list_objects_v2(Bucket=bucket, Prefix=key, MaxKeys=1)
        except FROM_AWS:
            return False
        return all(item["Key"] != key for item in listed.get("Contents", ()))


def split_s3(uri: str) -> tuple[str, str]:
    """Split the s3:// URI of an object into bucket and key.

    Raises:
        NotSent: the URI does not have the form s3://BUCKET/KEY.
    """
    scheme, _, path = uri.partition("://")
    bucket, _, key = path.partition("/")
    if scheme != "s3" or not bucket or not key:
        raise NotSent(f"{uri} is not of the form s3://BUCKET/KEY")
    return bucket, key
