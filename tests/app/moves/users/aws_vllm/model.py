"""A question and answer service in front of the model, as a user of AWS's vLLM image writes it."""

import json

import httpx
import model_hosting_container_standards.sagemaker as sagemaker_standards
from fastapi import HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from model_hosting_container_standards.logging_config import logger


@sagemaker_standards.custom_ping_handler
async def healthy(request: Request) -> Response:
    return Response(status_code=200, content="all good")


@sagemaker_standards.custom_invocation_handler
async def answer(request: Request):
    try:
        body = await request.json()
    except json.JSONDecodeError as error:
        raise HTTPException(status_code=400, detail=f"JSON decode error: {error}") from error
    if "question" not in body:
        return JSONResponse({"error": "question is missing"}, status_code=422)
    messages = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": body["question"]}]
    chat = {"messages": messages, "max_tokens": body.get("max_tokens", 8), "temperature": 0}
    url = f"{request.base_url}v1/chat/completions"
    logger.info("asking the model")
    if body.get("stream"):
        return StreamingResponse(streamed(url, {**chat, "stream": True}), media_type="text/event-stream")
    async with httpx.AsyncClient(timeout=60) as client:
        found = (await client.post(url, json=chat)).json()
    choice = found["choices"][0]
    return {"answer": choice["message"]["content"], "why": choice["finish_reason"], "usage": found["usage"]}


async def streamed(url, chat):
    async with httpx.AsyncClient(timeout=60) as client, client.stream("POST", url, json=chat) as found:
        async for line in found.aiter_lines():
            if line.startswith("data: {"):
                delta = json.loads(line[len("data: ") :])["choices"][0]["delta"]
                if delta.get("content"):
                    yield f"data: {json.dumps({'text': delta['content']})}\n\n"
    yield "data: [DONE]\n\n"
