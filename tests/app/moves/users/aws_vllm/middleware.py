"""What every request of the service goes through."""

import json

from fastapi import Request, Response
from model_hosting_container_standards.common.fastapi.middleware import custom_middleware


@custom_middleware("throttle")
async def count(request: Request, call_next) -> Response:
    response = await call_next(request)
    response.headers["x-service"] = "questions"
    return response


async def briefly(request: Request) -> Request:
    """Chats of clients that set no limit get one."""
    if request.method == "POST":
        body = json.loads(await request.body())
        if "messages" in body and "max_tokens" not in body:
            body["max_tokens"] = 6
            request._body = json.dumps(body).encode()
    return request


async def signed(response: Response) -> Response:
    response.headers["x-answered-by"] = "the service"
    return response
