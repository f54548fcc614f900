"""Errors in the form of SageMaker Runtime: status, `x-amzn-ErrorType`, JSON body."""

from __future__ import annotations

import uuid

from aiohttp import web

TIMED_OUT = "Your invocation timed out while waiting for a response from container primary"
_MESSAGE_LIMIT = 2048  # characters: the API's shape Message


class ApiError(Exception):
    """An error answer.

    Args:
        status: HTTP status.
        code: the error's name, from which boto3 derives the exception's class.
        members: further members of the JSON body.
    """

    def __init__(self, status: int, code: str, message: str, **members: str | int) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.members = members

    def response(self) -> web.Response:
        headers = {"x-amzn-ErrorType": self.code}
        return web.json_response({"Message": str(self), **self.members}, status=self.status, headers=headers)


async def name_request(request: web.Request, answer: web.StreamResponse) -> None:
    """Give an answer the id by which AWS's clients and support speak of its request."""
    answer.headers.setdefault("x-amzn-RequestId", str(uuid.uuid4()))


def validation_error(message: str, status: int = 400) -> ApiError:
    return ApiError(status, "ValidationError", message)


def model_error(original: int, message: str, log_stream: str) -> ApiError:
    """Return the error for a container's answer other than 2xx.

    Args:
        original: its status; 0: it gave no complete answer, and message is SageMaker's own.
        log_stream: ARN of the container's log.
    """
    side, code = (
        ("client", "CLIENT_ERROR_FROM_MODEL")
        if 0 < original < 500
        else ("server", "SERVER_ERROR_FROM_MODEL" if original else "INTERNAL_FAILURE_FROM_MODEL")
    )
    message = message[:_MESSAGE_LIMIT]
    return ApiError(
        424,
        "ModelError",
        f'Received {side} error ({original}) from primary with message "{message}".',
        ErrorCode=code,
        OriginalStatusCode=original,
        OriginalMessage=message,
        LogStreamArn=log_stream,
    )
