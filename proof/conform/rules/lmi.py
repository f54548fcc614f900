"""Rules of LMI's schemas at /invocations: the schema of the rolling batch (0.28), and of the async handlers (0.38)."""

from __future__ import annotations

from typing import Any

from proof.conform import sources
from proof.conform.exchange import Response
from proof.conform.rule import (
    LMI,
    expect,
    expect_details,
    expect_fields,
    expect_logprob,
    expect_refused,
    expect_response,
    expect_status,
    expect_type,
    rule,
    stop_word,
    succeeded,
)
from proof.conform.server import PROMPT, Server

_0_28, _0_38 = ("lmi-0.28",), ("lmi-0.38",)
_DEFAULT = 30
"""Maximum number of new tokens for a request without max_new_tokens."""


async def _lines(server: Server, **parameters: Any) -> tuple[Response, list[dict[str, Any]]]:
    response = await succeeded(server.generate(stream=True, more={"parameters": parameters}))
    expect(response.events, "JSON lines", response)
    return response, response.events


@rule("lmi.whole", "A non-streaming response is an object with only generated_text.", sources.LMI_SCHEMA, LMI)
async def whole(server: Server) -> None:
    response = await succeeded(server.generate())
    expect(set(response.object) == {"generated_text"}, '{"generated_text": "…"}', response)
    expect(isinstance(response.object["generated_text"], str), "a string as generated_text", response)


@rule("lmi.details", "details has finish_reason, generated_tokens, inputs and tokens.", sources.LMI_SCHEMA, _0_28)
async def details_0_28(server: Server) -> None:
    response, details = await expect_details(server)
    expect_fields(response, details, "finish_reason", "generated_tokens", "inputs", "tokens")
    expect(details["inputs"] == PROMPT, "the prompt as inputs", response)


@rule(
    "lmi.async-details",
    "details has finish_reason, generated_tokens, seed, prefill and tokens.",
    sources.LMI_ASYNC,
    _0_38,
)
async def details_0_38(server: Server) -> None:
    response, details = await expect_details(server)
    expect_fields(response, details, "finish_reason", "generated_tokens", "seed", "prefill", "tokens")
    expect(details["prefill"] == [], "an empty prefill", response)


@rule("lmi.tokens", "A token in details has id, text and its log-probability.", sources.LMI_SCHEMA, LMI)
async def tokens(server: Server) -> None:
    response, details = await expect_details(server)
    logprob = "log_prob" if server.profile == "lmi-0.28" else "logprob"
    for token in details.get("tokens") or [{}]:
        expect_fields(response, token, "id", "text", logprob)
        expect(type(token["id"]) is int and isinstance(token["text"], str), "id: a number, text: a string", response)
        expect_logprob(response, token[logprob])


@rule("lmi.generated-tokens", "generated_tokens is the number of tokens.", sources.LMI_SCHEMA, LMI)
async def generated_tokens(server: Server) -> None:
    response, details = await expect_details(server)
    count = len(details.get("tokens") or [])
    expect(details.get("generated_tokens") == count, f"generated_tokens {count}", response)
    expect(count <= 8, "at most 8 tokens, the request's max_new_tokens", response)


@rule("lmi.finish-reason", "Output cut off by max_new_tokens has the finish_reason length.", sources.LMI_SCHEMA, LMI)
async def finish_reason(server: Server) -> None:
    if server.profile == "lmi-0.28":
        response, details = await expect_details(server, ignore_eos_token=True)
    else:  # responses that are not streamed may have null
        response, lines = await _lines(server, details=True, ignore_eos_token=True)
        details = lines[-1].get("details") or {}
    expect(details.get("finish_reason") == "length", "the finish_reason length", response)


@rule("lmi.default-length", f"Without max_new_tokens, output has at most {_DEFAULT} tokens.", sources.LMI_SCHEMA, LMI)
async def default_length(server: Server) -> None:
    parameters = {"do_sample": False, "details": True, "ignore_eos_token": True}
    response = expect_response(await server.post("/invocations", {"inputs": PROMPT, "parameters": parameters}))
    details = response.object.get("details") or {}
    expect(details.get("generated_tokens") == _DEFAULT, f"{_DEFAULT} generated_tokens", response)


@rule("lmi.full-text", "return_full_text puts the prompt before the text.", sources.LMI_SCHEMA, LMI)
async def full_text(server: Server) -> None:
    response = await succeeded(server.generate(more={"parameters": {"return_full_text": True}}))
    text = str(response.object.get("generated_text"))
    expect(text.startswith(PROMPT) and len(text) > len(PROMPT), "the prompt, then the text", response)


@rule("lmi.line", "A line of a stream is a token with its log-probability.", sources.LMI_SCHEMA, _0_28)
async def line_0_28(server: Server) -> None:
    response, lines = await _lines(server)
    for line in lines[:-1]:
        expect_fields(response, line.get("token"), "id", "text", "log_prob")
        expect(set(line) == {"token"}, "lines with only `token`, except for the last one", response)


@rule(
    "lmi.async-line",
    "A line has index, token, generated_text and details; the last two are null before the last line.",
    sources.LMI_ASYNC,
    _0_38,
)
async def line_0_38(server: Server) -> None:
    response, lines = await _lines(server)
    fields = {"index", "token", "generated_text", "details"}
    for line in lines[:-1]:
        expect(set(line) == fields, f"lines with {', '.join(sorted(fields))}", response)
        expect_fields(response, line["token"], "id", "text", "logprob")
        values = [line["generated_text"], line["details"]]
        expect(values == [None, None], "null for generated_text and details", response)


@rule("lmi.last-line", "The last line of a stream has the whole generated_text.", sources.LMI_SCHEMA, LMI)
async def last_line(server: Server) -> None:
    response, lines = await _lines(server)
    text = "".join(str((line.get("token") or {}).get("text", "")) for line in lines)
    expect(lines[-1].get("generated_text") == text, f"generated_text {text!r}", response)


@rule("lmi.last-details", "If details are requested, the last line has them, without tokens.", sources.LMI_SCHEMA, LMI)
async def last_details(server: Server) -> None:
    response, lines = await _lines(server, details=True)
    prompt = "inputs" if server.profile == "lmi-0.28" else "input_length"
    expect_fields(response, lines[-1].get("details"), "finish_reason", "generated_tokens", prompt)


@rule(
    "lmi.blank-lines",
    "A stream ends with two empty lines, without its token count or [DONE].",
    sources.LMI_ASYNC,
    _0_38,
)
async def blank_lines(server: Server) -> None:
    response, _ = await _lines(server)
    expect(response.body.endswith(b"}\n\n\n"), "two empty lines at the end", response)


@rule("lmi.sse", "With output_formatter sse, a stream consists of server-sent events.", sources.LMI_SCHEMA, _0_28)
async def sse(server: Server) -> None:
    response, _ = await _lines(server, output_formatter="sse")
    expect_type(response, "text/event-stream")
    expect(response.body.startswith(b"data: {"), "`data: ` followed by JSON", response)


@rule("lmi.error", "An error has status 424 and a body with error and code.", sources.LMI_SCHEMA, LMI)
async def error(server: Server) -> None:
    response = await server.post("/invocations", b'{"inputs": ')
    expect_status(response, 424)
    body = response.object
    expect(isinstance(body.get("error"), str) and body.get("code") == 424, '{"error": "…", "code": 424}', response)


@rule("lmi.inputs-list", "A list of prompts as inputs is refused.", sources.LMI_SCHEMA, _0_28)
async def inputs_list(server: Server) -> None:
    expect_refused(await server.generate(more={"inputs": [PROMPT, PROMPT]}))


@rule("lmi.stop", "A response ends at a stop sequence (stop_sequences; in 0.38, stop).", sources.LMI_SCHEMA, LMI)
async def stop(server: Server) -> None:
    text, word = await stop_word(server)
    name = "stop_sequences" if server.profile == "lmi-0.28" else "stop"
    response = await succeeded(server.generate(tokens=16, more={"parameters": {name: [word]}}))
    written, following = str(response.object.get("generated_text")), text.split()[3]
    expect(following not in written.partition(word)[2] and len(written) < len(text), f"text up to {word!r}", response)


@rule("lmi.chat", "messages at /invocations get a chat completion with choices and usage.", sources.LMI_CHAT, LMI)
async def chat(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4, "temperature": 0}
    response = expect_response(await server.post("/invocations", body))
    match response.value:
        case {
            "object": "chat.completion",
            "choices": [{"message": {"role": "assistant"}}],
            "usage": {"completion_tokens": int()},
        }:
            return
    expect(False, "a chat.completion with choices and usage", response)


@rule("lmi.chat-lines", "A chat's stream at /invocations is JSON lines, without [DONE].", sources.LMI_CHAT, LMI)
async def chat_lines(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4, "temperature": 0, "stream": True}
    response = expect_response(await server.post("/invocations", body))
    expect_type(response, "application/jsonlines")
    expect(b"[DONE]" not in response.body and response.events, "JSON lines without [DONE]", response)
    kinds = {line.get("object") for line in response.events}
    expect(kinds == {"chat.completion.chunk"}, "chat.completion.chunk as the object of all lines", response)


@rule("lmi.completion", "prompt at /invocations gets a text completion, as in vLLM.", sources.LMI_SERVICE, _0_38)
async def completion(server: Server) -> None:
    response = expect_response(await server.post("/invocations", {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}))
    expect(response.object.get("object") == "text_completion", "a text_completion", response)


@rule("lmi.model-name", "A request for an unknown model is refused.", sources.LMI_SERVICE, _0_38)
async def model_name(server: Server) -> None:
    response = await server.generate(more={"model": "conform-has-no-such-model"})
    expect(response.status >= 400, "a status of 400 or more", response)


@rule("lmi.request-id", "A response has the header x-request-id, with an id of its own.", sources.DJL_HTTP, LMI)
async def request_id(server: Server) -> None:
    seen = {""}
    for _ in range(2):
        response = await succeeded(server.generate())
        id = response.headers.get("x-request-id", "")
        expect(id not in seen, "the header x-request-id, with another id than before", response)
        seen.add(id)


@rule("lmi.unknown-path", "An unknown path gets 404 with code, type and message.", sources.DJL_HTTP, LMI)
async def unknown_path(server: Server) -> None:
    response = await server.post("/conform-no-such-path", {"inputs": PROMPT})
    expect_status(response, 404)
    expect_fields(response, response.object, "code", "type", "message")
