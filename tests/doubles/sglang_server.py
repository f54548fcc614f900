"""A double of SGLang's HTTP server, as its source is written (sglang 0.5.23, and 0.4.6 to 0.5.13 for older versions).

Its model repeats the prompt. Where it samples, it draws from the prompt's ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from tests.doubles.listener import on_thread

VOCABULARY = 460
EOS = 2
NEVER = 1e6  # seconds
HANG = b"hang"
"""In a script: send nothing more, and wait until the client leaves."""

CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "max_new_tokens": 128, "stop": None, "stop_token_ids": None, "temperature": 1.0, "top_p": 1.0, "top_k": -1,
        "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0,
        "n": 1, "json_schema": None, "regex": None, "ebnf": None, "structural_tag": None, "ignore_eos": False,
        "skip_special_tokens": True, "spaces_between_special_tokens": True, "no_stop_trim": False,
        "stream_interval": None, "logit_bias": None, "custom_params": None,
    }
)  # fmt: skip
"""Of sampling_params/sampling_params.py; None stands for the default."""

_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_OLDEST_SEEDS = (0, 5, 6)
_OLDEST_JOINED = (0, 5, 10)
_NEWEST_REPEATING = (0, 5, 4)
"""Its post-releases 1 and 2 too: the first event's ids begin with the prompt's last ones (detokenizer_manager.py)."""
_REPEATED = 5
_OLDEST_TAGS = (0, 5, 4)
_OLDEST_NONE = (0, 5, 11)
_OLDEST_CODES = (0, 5, 13)
_COMPARED = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "min_new_tokens",
)  # fmt: skip


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    """Return an event; SGLang's orjson writes null for what is not finite."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def score(id: int) -> float:
    """The log-probability of an id, whatever comes before it."""
    return -((id % 7) + 1) / 8


def best(id: int, count: int) -> list[tuple[int, float]]:
    """The most likely ids in place of `id`: it is the second."""
    likelier = (id + 1) % VOCABULARY, score(id) / 2
    others = [((id + more) % VOCABULARY, score(id) * more) for more in range(2, count)]
    return [likelier, (id, score(id)), *others][:count]


class Refusal(Exception):
    """What the server raises as ValueError: an error event of a stream."""


class Received(NamedTuple):
    """A request."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


class State:
    """A request in the scheduler.

    Attributes:
        events: what the tokenizer manager has for the client.
        abort: set by an abort; the request then still takes one step.
        shift: what its adapter adds to each id.
    """

    def __init__(self, body: dict[str, Any], parameters: dict[str, Any]) -> None:
        self.body, self.parameters = body, parameters
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.abort = asyncio.Event()
        self.ids: list[int] = []
        self.shift = 0


class SglangServer:
    """A server on loopback.

    Attributes:
        version: its version, which decides its routes, parameters and fields.
        incremental: whether it was started with --incremental-streaming-output (--stream-output before 0.5.10).
        deterministic: whether with --enable-deterministic-inference.
        preferred: its --preferred-sampling-params.
        key, admin_key: its --api-key and --admin-api-key.
        max_running, max_queued: its --max-running-requests and --max-queued-requests.
        stream_interval: its --stream-interval.
        reasons: whether its grammars wait for the end of a thought, id 4, as with --reasoning-parser before 0.5.
        grammar: whether it has a grammar back end.
        backend: its --grammar-backend.
        tokenizes: whether it was started without --skip-tokenizer-init.
        speculative: its --speculative-algorithm, or None. It then ignores `min_p`, which needs `certain` to be false.
        context, pool: tokens of its context, and of its KV cache.
        truncates: whether it was started with --allow-auto-truncate.
        name: its --served-model-name.
        adapters: what each loaded LoRA adapter adds to the ids of a response, least recently used first.
        roots: the paths of the adapters, by name; by default `/models/NAME`. Also of those that were unloaded.
        files: the adapters on its disk: what each adds, by path.
        lora: whether it was started with --enable-lora.
        max_loaded: its --max-loaded-loras.
        dp_size, workers: its --dp-size and --tokenizer-worker-num.
        num_loads: how often it has loaded an adapter from its disk.
        model_info: the whole body of /model_info, unless it is `...`.
        info: more fields of /model_info and /server_info.
        pace: seconds between two tokens.
        disconnect_seconds: after which a closed connection ends its request.
        dimensions: of its embeddings with --is-embedding; 0 without it.
        normalizes: whether its model's pooler normalizes embeddings.
        certain: whether its model is certain of each token, so that sampling changes nothing.
        loaded: whether its tokens may overtake what it writes. Versions before 0.5.10 then lose some.
        hangs: whether it answers no further request.
        scripts: each answers one /generate byte by byte, after the head of a chunked answer.
        received: requests of /generate.
        aborted: ids that /abort_request named.
        num_asked: how often /server_info was answered.
        running: ids of the requests that hold a slot.
        most_running: the most that did so at once.
        left: how many clients have left a script that hangs.
    """

    def __init__(self) -> None:
        self.version = "0.5.23"
        self.incremental = False
        self.deterministic = False
        self.preferred: dict[str, Any] = {}
        self.key = self.admin_key = ""
        self.max_running, self.max_queued = 48, 1000
        self.stream_interval = 1
        self.reasons, self.grammar, self.tokenizes = False, True, True
        self.speculative: str | None = None
        self.backend = "xgrammar"
        self.model_info: Any = ...
        self.info: dict[str, Any] = {}
        self.context = 64
        self.pool = 1 << 20
        self.truncates = False
        self.name = "served"
        self.adapters = {"german": 100}
        self.roots: dict[str, str] = {}
        self.files: dict[str, int] = {}
        self.lora, self.max_loaded = True, 1000
        self.dp_size = self.workers = 1
        self.num_loads = 0
        self.dimensions, self.normalizes = 0, True
        self.pace = 0.0
        self.disconnect_seconds = 2.0
        self.certain = self.hangs = self.loaded = False
        self.scripts: list[Sequence[bytes]] = []
        self.received: list[Received] = []
        self.aborted: list[str] = []
        self.num_asked = 0
        self.cached = 0
        self.running: dict[str, State] = {}
        self.most_running = 0
        self.left = threading.Semaphore(0)
        self.url = ""
        self._waiting: list[str] = []
        self._states: dict[str, State] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def number(self) -> tuple[int, ...]:
        return tuple(map(int, self.version.split("+")[0].split(".")))

    # -- HTTP ------------------------------------------------------------------------------------------------------

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection."""
        gone = (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError)
        with contextlib.suppress(*gone), contextlib.closing(writer):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.strip().split("\r\n")
                headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = first.split(" ")
                received = Received(method, path, headers, json.loads(body) if body else None)
                if not await self._route(received, reader, writer):
                    return

    async def _route(self, received: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer a request. Return whether its connection is kept."""
        path, since_new_routes = received.path, self.number >= (0, 5, 6)
        if self.hangs:
            await reader.read()
            return False
        if not self._admits(received):
            return self._write(writer, 401, {"error": "Unauthorized"})
        if path == "/v1/models":
            card = {"id": self.name, "object": "model", "owned_by": "sglang", "max_model_len": self.context}
            adapter = {**card, "parent": self.name, "max_model_len": None}
            listed = self.adapters if self.lora and since_new_routes else ()
            adapters = [{**adapter, "id": name, "root": self._root(name)} for name in listed]
            return self._write(writer, 200, {"object": "list", "data": [card, *adapters]})
        if path == "/get_model_info" or (path == "/model_info" and since_new_routes):
            return self._write(writer, 200, self._model_info() if self.model_info is ... else self.model_info)
        if path == "/get_server_info" or (path == "/server_info" and since_new_routes):
            self.num_asked += 1
            return self._write(writer, 200, self._server_info())
        if path == "/abort_request":
            self.aborted.append(received.body["rid"])
            self._abort(received.body["rid"])
            return self._write(writer, 200, None)
        if path in ("/load_lora_adapter", "/unload_lora_adapter"):
            return await self._change_adapters(path, received.body, writer)
        if path == "/encode":
            self.received.append(received)
            return await self._encode(received.body, writer)
        if path == "/generate":
            return await self._generate(received, reader, writer)
        return self._write(writer, 404, {"detail": "Not Found"})

    def _admits(self, received: Received) -> bool:
        """Of utils/auth.py."""
        key = self.key
        if received.path.startswith("/health"):
            return True
        if received.path in ("/abort_request", "/load_lora_adapter", "/unload_lora_adapter"):
            key = self.admin_key or key
        return not key or received.headers.get("authorization") == f"Bearer {key}"

    def _write(self, writer: asyncio.StreamWriter, code: int, body: Any) -> bool:
        data = b"" if body is None else json.dumps(body).encode()
        head = f"HTTP/1.1 {code} Status\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        return True

    def _model_info(self) -> dict[str, Any]:
        preferred = json.dumps(self.preferred) if self.number < (0, 5, 6) else self.preferred
        info = {"model_path": "/models/tiny", "tokenizer_path": "/models/tiny", "is_generation": not self.dimensions}
        return {**info, "preferred_sampling_params": preferred or None, **self.info}

    def _server_info(self) -> dict[str, Any]:
        name = "incremental_streaming_output" if self.number >= _OLDEST_JOINED else "stream_output"
        info = {"version": self.version, name: self.incremental, "internal_states": [{"max_total_num_tokens": 4096}]}
        if self.number >= _OLDEST_SEEDS:
            info["enable_deterministic_inference"] = self.deterministic
        info |= {"enable_lora": self.lora or None, "dp_size": self.dp_size, "tokenizer_worker_num": self.workers}
        info |= {"skip_tokenizer_init": not self.tokenizes, "speculative_algorithm": self.speculative}
        info["grammar_backend"] = self.backend
        return {**info, "disaggregation_mode": "null", "max_req_input_len": self.most - 5, **self.info}

    @property
    def most(self) -> int:
        """Of managers/tp_worker.py: max_req_len."""
        return min(self.context, self.pool) - 1

    # -- adapters --------------------------------------------------------------------------------------------------

    def _root(self, name: str) -> str:
        return self.roots.setdefault(name, f"/models/{name}")

    def _resolve(self, name: str | None) -> None:
        """Of _resolve_lora_path, which loads an adapter again that was loaded before."""
        if not name:
            return
        if not self.lora:
            raise Refusal(
                f"LoRA adapter '{name}' was requested, but LoRA is not enabled. Please launch the server with"
            )
        if name not in self.adapters:
            if self.number < (0, 5, 6):
                raise Refusal(f"The following requested LoRA adapters are not loaded: {name}\nLoaded adapters: ...")
            if name not in self.roots:
                raise Refusal(f"Got LoRA adapter that has never been loaded: {name}\nAll loaded adapters: ...")
            if words := self._load(name, self.roots[name]):
                raise Refusal(f"Failed to implicitly load LoRA adapter {name}: {words}")
        self.adapters[name] = self.adapters.pop(name)

    async def _change_adapters(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        """Of load_lora_adapter and unload_lora_adapter, which waits until no request uses the adapter."""
        name, words = body["lora_name"], ""
        if not self.lora:
            words = "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
        elif self.dp_size > 1:  # an assertion fails
            return self._write(writer, 500, None)
        elif path == "/load_lora_adapter":
            words = self._load(name, body["lora_path"])
        elif name not in self.adapters:
            words = f"LoRA with name {name} does not exist. Loaded LoRAs: ..."
        else:
            del self.adapters[name]
            while any(state.body.get("lora_path") == name for state in self._states.values()):
                await asyncio.sleep(0.001)
        loaded = {name: self._root(name) for name in self.adapters} if self.lora else None
        answer = {"success": not words, "error_message": words, "loaded_adapters": loaded}
        return self._write(writer, 400 if words else 200, answer)

    def _load(self, name: str, path: str) -> str:
        """Load an adapter, and forget the least recently used one if there are too many. Return what is wrong."""
        if name in self.adapters:
            return f"Failed to load LoRA adapter {name} because it is already loaded"
        if path not in self.files:  # it looks on the hub
            return f"Repo id must be in the form 'repo_name' or 'namespace/repo_name': '{path}'."
        self.num_loads += 1
        self.adapters[name], self.roots[name] = self.files[path], path
        while len(self.adapters) > self.max_loaded:
            del self.adapters[next(iter(self.adapters))]
        return ""

    # -- /encode ---------------------------------------------------------------------------------------------------

    async def _encode(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        """Of encode_request: errors of the tokenizer manager have the status 400."""
        if self.scripts:
            writer.write(b"".join(self.scripts.pop(0)))
            return False
        ids = body.get("input_ids")
        if not isinstance(ids, list) or not all(type(id) is int for id in ids):
            return self._write(writer, 422, {"detail": "input_ids"})
        if not self.dimensions:
            words = "This model does not appear to be an embedding model by default. Please add `--is-embedding`"
            return self._write(writer, 400, {"error": {"message": words}})
        if len(ids) >= self.context and not self.truncates:
            words = f"The input ({len(ids)} tokens) is longer than the model's context length ({self.context} tokens)."
            return self._write(writer, 400, {"error": {"message": words}})
        await asyncio.sleep(self.pace)
        ids = ids[: self.most - 5]
        meta = {"id": body.get("rid") or "x", "finish_reason": {"type": "length"}, "prompt_tokens": len(ids)}
        return self._write(writer, 200, {"embedding": self.embedding(ids), "meta_info": meta})

    def embedding(self, ids: Sequence[int]) -> list[float]:
        """The embedding of a text."""
        values = [float(sum(ids[at % len(ids) :]) + at + 1) for at in range(self.dimensions)]
        length = sum(value * value for value in values) ** 0.5 if self.normalizes else 1.0
        return [value / length for value in values]

    # -- /generate -------------------------------------------------------------------------------------------------

    async def _generate(self, received: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        self.received.append(received)
        body = received.body
        ids = body.get("input_ids")
        if not isinstance(ids, list) or not all(type(id) is int for id in ids) or not body.get("stream"):
            return self._write(writer, 400, {"error": "input_ids: expected a list of integers"})
        writer.write(CHUNKED)
        if self.scripts:
            return await self._play(self.scripts.pop(0), reader, writer)
        gone = asyncio.ensure_future(_closed(reader))
        try:
            state = self._admit(body)
        except Refusal as error:
            words: dict[str, Any] = {"message": str(error)}
            if self.number >= _OLDEST_CODES:
                words |= {"type": "invalid_request_error", "code": 400, "retryable": False}
            gone.cancel()
            await asyncio.wait({gone})
            writer.write(chunk(event({"error": words})) + chunk(DONE) + b"0\r\n\r\n")
            return True
        except (KeyError, TypeError):  # which nothing in the server expects: the answer breaks off
            writer.transport.abort()
            gone.cancel()
            return False
        while True:
            waiting = asyncio.ensure_future(state.events.get())
            await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                waiting.cancel()
                asyncio.get_running_loop().call_later(self.disconnect_seconds, self._abort, body["rid"])
                return False
            outputs = [waiting.result()]
            while not state.events.empty() and (self.loaded or self.number >= _OLDEST_JOINED):
                outputs.append(state.events.get_nowait())
            output = self._joined(outputs)
            if output["meta_info"]["finish_reason"] is not None:
                gone.cancel()  # before the client can send its next request
                await asyncio.wait({gone})
                writer.write(chunk(event(output)) + chunk(DONE) + b"0\r\n\r\n")
                await writer.drain()
                return True
            writer.write(chunk(event(output)))
            await writer.drain()

    async def _play(self, script: Sequence[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        for part in script:
            if part is HANG:
                await reader.read()
                self.left.release()
                return False
            writer.write(chunk(part) if part else b"")
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.write(b"0\r\n\r\n")
        return True

    def _joined(self, outputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Of _coalesce_streaming_chunks; before 0.5.10 all but the last were lost."""
        last = outputs[-1]
        if len(outputs) == 1 or not self._is_incremental or self.number < _OLDEST_JOINED:
            return last
        meta = dict(last["meta_info"])
        for name in ("output_token_logprobs", "output_top_logprobs"):
            if name in meta:
                meta[name] = [entry for output in outputs for entry in output["meta_info"].get(name, [])]
        return {**last, "output_ids": [id for output in outputs for id in output["output_ids"]], "meta_info": meta}

    @property
    def _is_incremental(self) -> bool:
        return self.incremental or self.number < (0, 5, 6)

    def _admit(self, body: dict[str, Any]) -> State:
        """Check a request, and start it."""
        known = {*DEFAULTS} | ({"sampling_seed"} if self.number >= _OLDEST_SEEDS else set())
        given = {**self.preferred, **body["sampling_params"]}
        if unknown := given.keys() - known:
            raise TypeError(f"SamplingParams.__init__() got an unexpected keyword argument {min(unknown)!r}")
        rid = body.get("rid") or f"{random.getrandbits(128):032x}"
        if rid in self._states:
            raise Refusal(f"Duplicate request ID detected: {rid}")
        if self.number < _OLDEST_NONE and (missing := [name for name in _COMPARED if given.get(name, 0) is None]):
            raise TypeError(f"'<=' not supported between instances of 'float' and 'NoneType': {missing}")
        parameters = {
            name: DEFAULTS.get(name) if value is None else value for name, value in {**DEFAULTS, **given}.items()
        }
        _verify(parameters)
        if self.number < _OLDEST_TAGS and parameters["structural_tag"]:
            json.loads(parameters["structural_tag"])["structures"]  # a KeyError ends the scheduler
        if not self.tokenizes and parameters["min_new_tokens"]:
            if self.number < (0, 5, 20):  # the scheduler dies
                raise TypeError("'NoneType' object has no attribute 'additional_stop_token_ids'")
            count = parameters["min_new_tokens"]
            raise Refusal(f"min_new_tokens={count} is unavailable when skip_tokenizer_init=True (requires tokenizer")
        if len(body["input_ids"]) >= self.context and not self.truncates:
            count = len(body["input_ids"])
            raise Refusal(
                f"The input ({count} tokens) is longer than the model's context length ({self.context} tokens)."
            )
        self._resolve(body.get("lora_path"))
        if any(not 0 <= id < VOCABULARY for id in body.get("token_ids_logprob") or ()):
            raise Refusal("token_ids_logprob contains out-of-vocabulary token id")
        state = self._states[rid] = State({**body, "rid": rid}, parameters)
        state.shift = self.adapters.get(body.get("lora_path") or "", 0)
        task = asyncio.ensure_future(self._run(rid, state))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return state

    def _abort(self, rid: str) -> None:
        """Of abort_request: the scheduler ends all requests whose ids begin with this one."""
        if not rid or rid not in self._states:
            return
        for id, state in self._states.items():
            if id.startswith(rid):
                state.abort.set()

    # -- the scheduler ---------------------------------------------------------------------------------------------

    async def _run(self, rid: str, state: State) -> None:
        try:
            if any(state.parameters[name] for name in _GRAMMARS) and not (self.grammar and self.tokenizes):
                return self._end(state, "Grammar-based generation is not supported with --grammar-backend none", 400)
            if len(state.body["input_ids"]) >= self.most - 5:
                if not self.truncates:
                    return self._end(state, "Input length exceeds the maximum allowed length", 400)
                state.body["input_ids"] = state.body["input_ids"][: self.most - 5]
            if len(self.running) >= self.max_running:
                if len(self._waiting) >= self.max_queued:
                    return self._end(state, "The request queue is full.", 503)
                self._waiting.append(rid)
                while self._waiting[0] != rid or len(self.running) >= self.max_running:
                    if state.abort.is_set():
                        self._waiting.remove(rid)
                        return self._end(state, "Abort in waiting queue", None)
                    await asyncio.sleep(0.001)
                self._waiting.remove(rid)
            self.running[rid] = state
            self.most_running = max(self.most_running, len(self.running))
            await self._decode(state)
        finally:
            self.running.pop(rid, None)
            self._states.pop(rid, None)

    def _end(self, state: State, message: str, code: int | None) -> None:
        reason: dict[str, Any] = {"type": "abort", "message": message}
        if code is not None:
            reason |= {"status_code": code}
        self._output(state, 0, reason)

    async def _decode(self, state: State) -> None:
        parameters, sent = state.parameters, 0
        for id, finish in self._tokens(state):
            await asyncio.sleep(self.pace)
            if state.abort.is_set():
                reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
                return self._output(state, max(len(state.ids) - 1, 0), reason)
            state.ids.append(id)
            interval = parameters["stream_interval"] or self.stream_interval
            if finish or sent == 0 or len(state.ids) - sent >= interval:
                self._output(state, sent, finish)
                sent = len(state.ids)

    def _tokens(self, state: State) -> Iterator[tuple[int, dict[str, Any] | None]]:
        parameters, prompt = state.parameters, state.body["input_ids"]
        if state.shift:
            prompt = [id + state.shift for id in prompt]
        ends = {*(parameters["stop_token_ids"] or ()), EOS}
        bias = {int(id): value for id, value in (parameters["logit_bias"] or {}).items()}
        forbidden = {id for id, value in bias.items() if value < -100}
        if rule := self._rule(state):
            prompt = [*map(ord, rule)]
        seed = parameters.get("sampling_seed")
        draw = random.Random((42 if seed is None else seed) if self.deterministic else None)
        greedy = self.certain or parameters["temperature"] < 1e-6 or parameters["top_k"] == 1
        most = min(parameters["max_new_tokens"], self.most - 1 - len(state.body["input_ids"]))
        for index in range(max(most, 1)):
            id = prompt[index % len(prompt)] if greedy else draw.choice(prompt)
            if id in forbidden or (id in ends and index < parameters["min_new_tokens"]):
                id = 8
            if id in ends and not parameters["ignore_eos"]:  # it then looks for no stop tokens at all
                yield id, {"type": "stop", "matched": id}
                return
            if rule and index + 1 == len(rule):
                yield id, {"type": "stop", "matched": id}
                return
            is_last = index + 1 >= most
            yield id, {"type": "length", "length": most} if is_last else None
            if is_last:
                return

    def _rule(self, state: State) -> str:
        """Return the text that a request's grammar allows: the first of its choices."""
        found = next((state.parameters[name] for name in _GRAMMARS if state.parameters[name]), "")
        if not found or (self.reasons and 4 not in state.body["input_ids"]):
            return ""
        return str(found).split("|")[0]

    def _output(self, state: State, sent: int, finish: dict[str, Any] | None) -> None:
        """Of _handle_batch_output."""
        incremental, ids, body = self._is_incremental, state.ids, state.body
        meta: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(body["input_ids"]),
            "weight_version": "default",
            "completion_tokens": len(ids),
            "cached_tokens": self.cached,
        }
        if body.get("return_logprob"):
            slices = incremental and self.number >= _OLDEST_JOINED
            meta |= self._logprobs(body, ids[sent:] if slices else ids)
        output_ids = ids[sent:] if incremental else [*ids]
        if not sent and self.tokenizes and self.number <= _NEWEST_REPEATING:
            output_ids = [*body["input_ids"][-_REPEATED:], *output_ids]
        output = {"text": "x" * len(ids), "output_ids": output_ids, "meta_info": meta}
        if not self.tokenizes:
            del output["text"]
        elif self.number < (0, 5):
            del output["output_ids"]
        state.events.put_nowait(output)

    def _logprobs(self, body: dict[str, Any], ids: Sequence[int]) -> dict[str, Any]:
        prompt, tops = body["input_ids"], body["top_logprobs_num"]
        scored = body["logprob_start_len"] == 0
        found: dict[str, Any] = {
            "input_token_logprobs": [[None if not at else score(id), id, None] for at, id in enumerate(prompt)]
            if scored
            else [],
            "output_token_logprobs": [[score(id), id, None] for id in ids],
        }
        if tops:
            found["input_top_logprobs"] = [None, *(_row(id, tops) for id in prompt[1:])] if scored else []
            found["output_top_logprobs"] = [_row(id, tops) for id in ids]
        if labels := body.get("token_ids_logprob"):
            found["output_token_ids_logprobs"] = [_labels(labels) for _ in ids]
        return found


def _labels(ids: Sequence[int]) -> list[list[Any]]:
    """The log-probabilities of labels, which for an id divisible by 10 is not finite."""
    return [[None if id % 10 == 0 else score(id) - 1, id, None] for id in ids]


async def _closed(reader: asyncio.StreamReader) -> None:
    """Wait until the client closes its connection."""
    with contextlib.suppress(ConnectionError):
        await reader.read(1)


def _row(id: int, count: int) -> list[list[Any]]:
    return [[logprob, top, None] for top, logprob in best(id, count)]


def _verify(parameters: Mapping[str, Any]) -> None:
    """Of SamplingParams.verify."""
    for name, low, high in (("frequency_penalty", -2, 2), ("presence_penalty", -2, 2), ("min_p", 0, 1)):
        if not low <= parameters[name] <= high:
            raise Refusal(f"{name} must be in [{low}, {high}], got {parameters[name]}.")
    if not parameters["temperature"] >= 0:
        raise Refusal(f"temperature must be a non-negative finite number, got {parameters['temperature']}.")
    if not 0 < parameters["top_p"] <= 1:
        raise Refusal(f"top_p must be in (0, 1], got {parameters['top_p']}.")
    if not 0 < parameters["repetition_penalty"] <= 2:
        raise Refusal(
            f"repetition_penalty must be in (0, 2] (1.0 = no penalty), got {parameters['repetition_penalty']}."
        )
    if parameters["top_k"] < 1 and parameters["top_k"] != -1:
        raise Refusal(f"top_k must be -1 (disable) or at least 1, got {parameters['top_k']}.")
    if not parameters["min_new_tokens"] <= parameters["max_new_tokens"]:
        raise Refusal("min_new_tokens must be in [0, max_new_tokens]")
    for id in parameters["logit_bias"] or ():
        if not 0 <= int(id) < VOCABULARY:
            raise Refusal(f"logit_bias must has keys in [0, {VOCABULARY - 1}], got {id}.")
    if not -(2**63) <= parameters.get("sampling_seed", 0) < 2**63:
        raise Refusal("sampling_seed must be in [-2**63, 2**63 - 1]")
    if sum(parameters[name] is not None for name in _GRAMMARS) > 1:
        raise Refusal("Only one of json_schema, regex, ebnf, or structural_tag can be set.")


@contextlib.contextmanager
def listening(*scripts: Sequence[bytes], **settings: Any) -> Iterator[SglangServer]:
    """A server on loopback, on a thread. Settings are attributes of it."""
    server = SglangServer()
    server.scripts = [*scripts]
    for name, value in settings.items():
        assert hasattr(server, name)
        setattr(server, name, value)
    with on_thread(server.answer, backlog=1024) as port:
        server.url = f"http://localhost:{port}/v1"
        yield server
