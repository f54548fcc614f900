"""Wait for the answer of asynchronous inference in S3."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from botocore.exceptions import ClientError

from deploy.client.errors import FROM_AWS, ModelFailed, NotSent, TimedOut, failure
from deploy.client.serializers import Deserializer, deserialize_body

MAX_INLINE_BYTES = 128_000
_ABSENT = ("404", "NoSuchKey", "NotFound")
_DENIED = ("403", "AccessDenied")
_FIRST, _LONGEST = 0.5, 10.0  # seconds between two polls


class AsyncAnswer:
    """An answer that will be in S3.

    Args:
        response: InvokeEndpointAsync's answer.
        s3: boto3's client.

    Attributes:
        id: the inference's id.
        output: where the answer will be.
        failure: where a failure would be; None: the endpoint has no place for failures.
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
        """Return whether there is an answer or a failure."""
        return self._fetch(self.output) is not None or self._fetch(self.failure) is not None

    def wait(self, seconds: float = 3600) -> Any:
        """Wait for the answer, and return it deserialized.

        Args:
            seconds: by default an hour, SageMaker's maximum (InvocationTimeoutSeconds).

        Raises:
            ModelFailed: SageMaker wrote a failure, which is the message.
            TimedOut: there is neither answer nor failure.
            RequestFailed: S3 cannot be read.
        """
        until, pause = self._clock() + seconds, _FIRST
        while True:
            if (answer := self._fetch(self.output)) is not None:
                body, content_type = answer
                return deserialize_body(self._deserializer, body, content_type)
            if (failed := self._fetch(self.failure)) is not None:
                raise ModelFailed(f"the model failed: {failed[0].decode('utf-8', 'replace').strip()}")
            if (left := until - self._clock()) <= 0:
                raise TimedOut(f"no answer at {self.output} in {seconds:g} s", "`lmi deploy status` shows the queue.")
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
            request_failed = failure(error)
            request_failed.advice = (
                "It needs s3:GetObject, and s3:ListBucket on the bucket: without them, a "
                "missing object looks forbidden."
            )
            raise request_failed from error

    def _is_absent(self, bucket: str, key: str) -> bool:
        """Return whether a listing shows that the object is absent: without permission to list, an absent object gives
        403.
        """
        try:
            listed = self._s3.list_objects_v2(Bucket=bucket, Prefix=key, MaxKeys=1)
        except FROM_AWS:
            return False
        return all(item["Key"] != key for item in listed.get("Contents", ()))


def split_s3(uri: str) -> tuple[str, str]:
    """Split an s3:// URI of an object into bucket and key.

    Raises:
        NotSent: it is not such a URI.
    """
    scheme, _, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")
    if scheme != "s3" or not bucket or not key:
        raise NotSent(f"{uri} is not s3://BUCKET/KEY")
    return bucket, key
