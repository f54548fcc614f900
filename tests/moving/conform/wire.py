"""The scripted server's requests and answers: the APIs of all profiles, at their smallest."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from typing import Any

CONTEXT = 100_000
"""Characters of the longest prompt, and tokens of the longest answer."""

Value = dict[str, Any]


class Refused(Exception):
    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Reply:
    """What goes out. With `events` it is a stream: a piece for each, PACE apart, then `tail`.

    Attributes:
        made: whether the engine computes it.
    """

    value: Any = None
    status: int = 200
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    events: list[Any] | None = None
    tail: bytes = b""
    made: int = 0

    def encode(self, event: Any) -> bytes:
        if isinstance(event, bytes):
            return event
        text = json.dumps(event, ensure_ascii=False)
        if self.content_type == "text/event-stream":
            name = f"event: {event['type']}\n" if "type" in event else ""
            return f"{name}data: {text}\n\n".encode()
        return f"{text}\n".encode()

    @property
    def body(self) -> bytes:
        return self.value if isinstance(self.value, bytes) else json.dumps(self.value, ensure_ascii=False).encode()


@dataclass
class Asked:
    """A request for text, read."""

    words: list[str]
    prompt: str
    tokens: int
    stream: bool
    options: Value
    stopped: str = ""

    @property
    def pieces(self) -> list[str]:
        """The tokens' texts; a stop word ends them."""
        found = []
        for index in range(self.tokens):
            word = self.words[index % len(self.words)]
            found.append(f" {word}")
            if word == self.stop:
                self.stopped = word
                break
        return found

    @property
    def stop(self) -> str | None:
        given = next((self.options[name] for name in ("stop", "stop_sequences") if name in self.options), None)
        return given[0] if isinstance(given, list) else given


def read(dialect: str, body: bytes, *, whole_path: bool) -> Asked:
    try:
        value = json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise Refused(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Refused("must be an object")
    options = {**value, **(value["parameters"] if isinstance(value.get("parameters"), dict) else {})}
    if dialect == "triton" and any(isinstance(given, dict) for name, given in value.items() if name != "parameters"):
        raise Refused("a parameter has an invalid type")
    prompt = _prompt(value)
    if not isinstance(prompt, str) or not prompt:
        raise Refused("the prompt must be a non-empty string")
    prompt.encode("utf-16", "surrogatepass")
    if any(0xD800 <= ord(char) < 0xE000 for char in prompt):
        raise Refused("the prompt has a lone surrogate")
    if len(prompt) > CONTEXT:
        raise Refused("the prompt is too long")
    if options.get("model") not in (None, "", "model", "tgi"):
        raise Refused("no such model", 404)
    names = ("max_new_tokens", "max_completion_tokens", "max_tokens")
    tokens = next((options[name] for name in names if name in options), 30)
    if type(tokens) is not int or not 0 < tokens <= CONTEXT:
        raise Refused(f"a limit of {tokens!r} tokens is out of range")
    temperature = options.get("temperature", 0)
    if not isinstance(temperature, (int, float)) or temperature < 0:
        raise Refused("temperature is out of range")
    if dialect == "anthropic" and "max_tokens" not in options and "temperature" in options:
        raise Refused("max_tokens is required")
    stream = bool(options.get("stream")) and not whole_path
    return Asked(prompt.split(), prompt, tokens, stream, options)


def _prompt(value: Value) -> Any:
    prompt = next((value[name] for name in ("inputs", "prompt", "text_input") if name in value), None)
    match value.get("messages"):
        case [*_, {"content": str(text)}] | [*_, {"content": [{"text": str(text)}]}]:
            return text
    return prompt


def refusal(dialect: str | None, message: str, status: int, profile: str, stream: bool) -> Reply:
    match dialect:
        case "lmi":
            return Reply({"error": message, "code": status or 424}, status or 424)
        case "tgi":
            body = {"error": message, "error_type": "validation"}
            if stream and "temperature" in message:
                return Reply(events=[body], content_type="text/event-stream")
            return Reply(body, status or 422)
        case "anthropic":
            told = {"type": "invalid_request_error", "message": message}
            return Reply({"type": "error", "error": told}, status or 400)
        case "triton":
            return Reply({"error": message}, status or 400)
    error: Value = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return Reply({"error": error}, status or 400)


def write(dialect: str, asked: Asked, profile: str, path: str) -> Reply:
    pieces = asked.pieces
    if dialect == "lmi" and "inputs" not in asked.options:
        form = "chat" if "messages" in asked.options else "completion"
        reply = _openai(form, asked, pieces)
        if asked.stream:
            reply.content_type, reply.tail = "application/jsonlines", b"\n"
    elif dialect == "lmi":
        reply = _lmi(asked, pieces, profile)
    elif dialect == "tgi" and "inputs" not in asked.options:
        reply = _openai("chat" if "messages" in asked.options else "completion", asked, pieces)
    elif dialect == "tgi":
        reply = _tgi(asked, pieces, array=path in ("/", "/invocations"))
    elif dialect == "triton":
        reply = _triton(asked, pieces, path.split("/")[3])
    elif dialect == "anthropic":
        reply = _anthropic(asked, pieces)
    else:
        reply = _openai(dialect, asked, pieces)
    reply.made = len(pieces)
    return reply


def _lmi(asked: Asked, pieces: list[str], profile: str) -> Reply:
    rolling = profile != "lmi-0.38"
    name = "log_prob" if rolling else "logprob"
    tokens = [{"id": index, "text": piece, name: -0.5} for index, piece in enumerate(pieces)]
    reason = "stop_sequence" if asked.stopped else "length"
    text = (asked.prompt if asked.options.get("return_full_text") else "") + "".join(pieces)
    count: Value = {"finish_reason": reason, "generated_tokens": len(pieces)}
    if not asked.stream:
        more: Value = {"inputs": asked.prompt} if rolling else {"seed": None, "prefill": []}
        details = {"details": {**count, **more, "tokens": tokens}} if asked.options.get("details") else {}
        return Reply({"generated_text": text, **details})
    last = {**count, **({"inputs": asked.prompt} if rolling else {"seed": None, "input_length": 8})}
    wanted = last if asked.options.get("details") else None
    if rolling:
        events = [{"token": token} for token in tokens]
        events[-1] |= {"generated_text": text, **({"details": wanted} if wanted else {})}  # type: ignore[dict-item]
    else:
        events = [{"index": 0, "token": token, "generated_text": None, "details": None} for token in tokens]  # type: ignore[dict-item]
        events[-1] |= {"generated_text": text, "details": wanted}  # type: ignore[dict-item]
    sse = asked.options.get("output_formatter") == "sse"
    content_type = "text/event-stream" if sse else "application/jsonlines"
    return Reply(events=events, content_type=content_type, tail=b"" if rolling else b"\n\n")


def _tgi(asked: Asked, pieces: list[str], *, array: bool) -> Reply:
    tokens = [{"id": index, "text": piece, "logprob": -0.5, "special": False} for index, piece in enumerate(pieces)]
    text = (asked.prompt if asked.options.get("return_full_text", array) else "") + "".join(pieces)
    reason = "stop_sequence" if asked.stopped else "length"
    seed = asked.options.get("seed") if asked.options.get("do_sample") else None
    count = {"finish_reason": reason, "generated_tokens": len(pieces), "seed": seed}
    if not asked.stream:
        details = {"details": {**count, "prefill": [], "tokens": tokens}} if asked.options.get("details") else {}
        value = {"generated_text": text, **details}
        names = ("x-compute-characters", "x-generated-tokens", "x-total-time")
        return Reply([value] if array else value, headers=dict.fromkeys(names, "1"))
    events: list[Any] = [
        {"index": index, "token": token, "generated_text": None, "details": None}
        for index, token in enumerate(tokens, 1)
    ]
    events[-1]["generated_text"] = text
    events[-1]["details"] = {**count, "input_length": 8} if asked.options.get("details") else None
    return Reply(events=events, content_type="text/event-stream")


_NUMBERS = itertools.count(10)


def _openai(form: str, asked: Asked, pieces: list[str]) -> Reply:
    reason = "stop" if asked.stopped else "length"
    if asked.stopped:
        pieces = pieces[:-1]
    text = (asked.prompt if asked.options.get("echo") else "") + "".join(pieces)
    usage = {"prompt_tokens": 8, "completion_tokens": len(pieces), "total_tokens": 8 + len(pieces)}
    head: Value = {"id": f"id-{next(_NUMBERS)}", "created": 0, "model": "model"}
    chat = form == "chat"
    head["object"] = "chat.completion" if chat else "text_completion"
    if not asked.stream:
        content = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        return Reply({**head, "choices": [{"index": 0, **content, "finish_reason": reason}], "usage": usage})
    if chat:
        head["object"] = "chat.completion.chunk"
    deltas: list[Value] = [{"delta": {"content": piece}} if chat else {"text": piece} for piece in pieces]
    if chat:
        deltas.insert(0, {"delta": {"role": "assistant", "content": ""}})
    events = [{**head, "choices": [{"index": 0, **delta, "finish_reason": None}]} for delta in deltas]
    events[-1]["choices"][0]["finish_reason"] = reason
    if (asked.options.get("stream_options") or {}).get("include_usage"):
        events.append({**head, "choices": [], "usage": usage})
    return Reply(events=events, content_type="text/event-stream", tail=b"data: [DONE]\n\n")


def _anthropic(asked: Asked, pieces: list[str]) -> Reply:
    if asked.stopped:
        pieces = pieces[:-1]
    reason = {"stop_reason": "stop_sequence" if asked.stopped else "max_tokens", "stop_sequence": asked.stopped or None}
    usage = {"input_tokens": 8, "output_tokens": len(pieces)}
    head: Value = {"id": f"msg_{next(_NUMBERS)}", "type": "message", "role": "assistant", "model": "model"}
    if not asked.stream:
        return Reply({**head, "content": [{"type": "text", "text": "".join(pieces)}], **reason, "usage": usage})
    delta = "content_block_delta"
    events: list[Any] = [
        {"type": "message_start", "message": {**head, "content": [], **dict.fromkeys(reason), "usage": usage}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *({"type": delta, "index": 0, "delta": {"type": "text_delta", "text": text}} for text in pieces),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": reason, "usage": {"output_tokens": len(pieces)}},
        {"type": "message_stop"},
    ]  # fmt: skip
    return Reply(events=events, content_type="text/event-stream")


HEADER = "inference-header-content-length"
INPUTS = {"text_input": "BYTES", "max_tokens": "INT32"}


def infer(request: Request) -> Reply:
    """Answer tensors, of which the prompt may be binary data, with the prompt."""
    size = int(request.headers.get(HEADER, len(request.body)))
    if size > len(request.body):
        return Reply({"error": "inference header size out of range"}, 400)
    value = json.loads(request.body[:size])
    for tensor in value["inputs"]:
        if tensor["datatype"] != INPUTS.get(tensor["name"]):
            return Reply({"error": f"unexpected inference input {tensor['name']}"}, 400)
    (text, *_) = value["inputs"][0].get("data", [request.body[size + 4 :].decode()])
    output: Value = {"name": "text_output", "datatype": "BYTES", "shape": [1, 1], "data": [text]}
    reason = {"name": "finish_reason", "datatype": "BYTES", "shape": [1, 1], "data": ["length"]}
    outputs = [output] if "outputs" in value else [output, reason]
    id = {"id": value["id"]} if "id" in value else {}
    answer = {**id, "model_name": "model", "model_version": "1", "outputs": outputs}
    if not value.get("outputs", [{}])[0].get("parameters"):
        return Reply(answer)
    data = len(output.pop("data")[0].encode()).to_bytes(4, "little") + text.encode()
    output["parameters"] = {"binary_data_size": len(data)}
    head = json.dumps(answer).encode()
    return Reply(head + data, content_type="application/octet-stream", headers={HEADER: str(len(head))})


def _triton(asked: Asked, pieces: list[str], model: str) -> Reply:
    if model != "model":
        raise Refused("unknown model", 404)
    head: Value = {"model_name": "model", "model_version": "1"}
    head |= {"id": asked.options["id"]} if "id" in asked.options else {}
    if not asked.stream:
        return Reply({**head, "text_output": asked.prompt + "".join(pieces)})
    return Reply(events=[{**head, "text_output": piece} for piece in pieces], content_type="text/event-stream")
