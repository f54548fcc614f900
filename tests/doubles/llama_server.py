"""A double of llama.cpp's llama-server, as unkind as the original.

Sources: llama.cpp b11434, tools/server: server-schema.cpp (fields), server-context.cpp (slots, errors), server-task.cpp
(events), server-http.cpp (keys, loading). The model often writes characters of several tokens, whose ids a stream omits
as the original's does, and sometimes broken ones.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import math
import os
import random
import re
import signal
import socket
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import PIL.Image

from tests.doubles.listener import on_thread

EOG = frozenset({3, 4})
IMAGE = 1 << 20
"""The ids of the tokens of images begin here."""
CONTEXT = 2048
HANG = b"hang"
"""In a script: send nothing more, and wait until the client leaves."""
_LOWEST = -3.4028234663852886e38
_NUMBERS = {  # fields, and their hard limits
    "n_predict": (-1, 2**31), "n_indent": (0, 2**31), "repeat_last_n": (0, 2**31), "min_keep": (0, 2**31),
    "n_cmpl": (1, 4), "reasoning_budget_tokens": (-1, 2**31), "n_probs": None, "top_k": None, "top_p": None,
    "min_p": None, "typical_p": None, "temperature": None, "repeat_penalty": None, "presence_penalty": None,
    "frequency_penalty": None, "seed": None, "mirostat": None,
}  # fmt: skip


def image_tokens(data: bytes) -> list[int]:
    """The tokens of an image, whose number depends on its width. They stand for its pixels too."""
    try:
        image = PIL.Image.open(io.BytesIO(data))
        pixels = image.convert("RGB").tobytes()
    except OSError:
        raise Refusal("Failed to load image or audio file") from None
    return [IMAGE + zlib.crc32(pixels) % IMAGE] * (3 + image.width // 16)


class Refusal(Exception):
    """An error of a request."""

    def __init__(self, message: str, kind: str = "invalid_request_error", code: int = 400) -> None:
        super().__init__(message)
        self.error: dict[str, Any] = {"code": code, "message": message, "type": kind}


Scales = tuple[float, ...]


@dataclass
class Slot:
    """A slot; `tokens` are in its KV cache, also after its request.

    Attributes:
        lora: scales of the last request.
        computed_by: scales with which the tokens were computed.
        number: how many requests the server had begun before this one.
        num_prompt, num_decoded: how many tokens of the prompt and of the answer were computed.
    """

    id: int
    tokens: list[int] = field(default_factory=list)
    lora: Scales = ()
    computed_by: Scales = ()
    number: int = -1
    num_prompt: int = 0
    num_decoded: int = 0
    is_processing: bool = False
    error: Refusal | None = None


class LlamaServer:
    """A server on loopback.

    Attributes:
        pieces: the bytes of each token.
        context: tokens of a slot.
        pool: tokens of all slots together, where they share one cache; beyond it, all running requests fail.
        key: API key, if it has one.
        is_loading: it answers 503, but to no key.
        pace: seconds that a token takes.
            prompt_pace: seconds that 512 tokens of a long prompt take.
            path: its file.
            received: bodies of /completion.
        scripts: each answers one /completion byte for byte.
        lacks: routes that it lacks, and fields that its /props lacks, as an older server.
        tells_slots: whether it has /slots, as without --no-slots.
        left: how many clients have left before the end of an answer.
        ruled: whether it enforces grammars.
        encode: its tokenizer.
        begin: ids that it adds to the beginning of a text.
        marker: stands for an image in a prompt; "": it has no projector.
        eog: ids that end an answer.
        pooling: how it pools with --embeddings or, if "rank", with --reranking; "": it only completes texts.
        batch: tokens of a text to pool.
        dimensions: numbers of an embedding.
        drafts: whether it drafts tokens, whose log-probabilities it does not report.
        grammar, stops: what its flags --grammar and --reverse-prompt set.
        adapters: paths of its LoRA adapters, with the scales of its start; its memory of prompts ignores them.
    """

    def __init__(self, pieces: Sequence[bytes], num_slots: int = 4) -> None:
        self.pieces = pieces
        self.eog = EOG
        self.model = Model(pieces)
        self.slots = [Slot(id) for id in range(num_slots)]
        self.context = CONTEXT
        self.pool = num_slots * CONTEXT
        self.key = ""
        self.is_loading = False
        self.pace = 0.0
        self.prompt_pace = 0.0
        self.name = "tiny.gguf"
        self.path = "/models/tiny.gguf"
        self.owner = "llamacpp"
        self.received: list[dict[str, Any]] = []
        self.asked: Counter[str] = Counter()
        self.scripts: list[Sequence[bytes]] = []
        self.lacks: frozenset[str] = frozenset()
        self.tells_slots = True
        self.left = threading.Semaphore(0)
        self.ruled = True
        self.drafts = False
        self.grammar, self.stops = "", list[str]()
        self.pooling, self.batch, self.dimensions = "", 512, 4
        self.encode: Callable[[str], list[int]] = lambda text: []
        self.begin: list[int] = []
        self.marker = ""
        self.adapters: list[tuple[str, float]] = []
        self._memory: list[tuple[list[int], Scales]] = []  # earlier prompts
        self._num_begun = 0
        self.port = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._freed = asyncio.Condition()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def num_busy(self) -> int:
        return sum(slot.is_processing for slot in self.slots)

    def restart(self, name: str) -> None:
        """Close all connections, and serve a model of this name."""
        self.name = name
        for writer in [*self._writers]:
            writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)

    # -- HTTP ------------------------------------------------------------------------------------------------------

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        gone = (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError)
        with contextlib.ExitStack() as leaving:
            leaving.enter_context(contextlib.suppress(*gone))
            leaving.callback(writer.close)
            leaving.callback(self._writers.discard, writer)
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.strip().split("\r\n")
                headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = first.split(" ")
                try:
                    await self._answer(method, path, headers, body, reader, writer)
                except Refusal as error:
                    await _write(writer, error.error["code"], {"error": error.error})

    async def _answer(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.asked[path] += 1
        if self.is_loading:
            raise Refusal("Loading model", "unavailable_error", 503)
        is_public = path in ("/health", "/v1/health", "/models", "/v1/models", "/")
        if self.key and not is_public and headers.get("authorization") != f"Bearer {self.key}":
            raise Refusal("Invalid API Key", "authentication_error", 401)
        if path in self.lacks:
            raise Refusal("File Not Found", "not_found_error", 404)
        match method, path:
            case "GET", "/health":
                return await _write(writer, 200, {"status": "ok"})
            case "GET", "/models" | "/v1/models":
                return await _write(writer, 200, self._models())
            case "GET", "/props":
                return await _write(writer, 200, self._props())
            case "GET", "/slots":
                if not self.tells_slots:
                    words = "This server does not support slots endpoint. Start it with `--slots`"
                    raise Refusal(words, "not_supported_error", 501)
                return await _write(writer, 200, [self._described(slot) for slot in self.slots])
            case "POST", "/tokenize":
                asked = json.loads(body)
                return await _write(writer, 200, {"tokens": self._tokens(asked["content"], asked["add_special"])})
            case "POST", "/detokenize":
                return await _write(writer, 200, {"content": self._text(json.loads(body)["tokens"])})
            case "GET", "/lora-adapters":
                more = {"task_name": "", "prompt_prefix": ""}
                entries = [{"id": id, "path": path, "scale": scale} for id, (path, scale) in enumerate(self.adapters)]
                return await _write(writer, 200, [entry | more for entry in entries])
            case "POST", "/completion" | "/completions":
                return await self._complete(json.loads(body), reader, writer)
            case "POST", "/embedding" | "/embeddings":
                return await self._embed(json.loads(body), reader, writer)
            case "POST", "/rerank" | "/reranking" | "/v1/rerank" | "/v1/reranking":
                return await self._rerank(json.loads(body), reader, writer)
        raise Refusal("File Not Found", "not_found_error", 404)

    def _described(self, slot: Slot) -> Any:
        known = {"id": slot.id, "n_ctx": self.context, "speculative": False, "is_processing": slot.is_processing}
        if slot.number < 0:
            return known
        next_token = {"has_next_token": slot.is_processing, "n_remain": -1, "n_decoded": slot.num_decoded}
        prompt = {"n_prompt_tokens": len(slot.tokens), "n_prompt_tokens_processed": slot.num_prompt}
        return {**known, "id_task": slot.number, **prompt, "next_token": [next_token]}

    def _models(self) -> Any:
        meta = {"n_vocab": len(self.pieces), "n_ctx": self.context, "n_ctx_train": self.context}
        model = {"id": self.name, "aliases": [], "object": "model", "owned_by": self.owner, "meta": meta}
        return {"models": [{"name": self.name}], "object": "list", "data": [model]}

    def _props(self) -> Any:
        props = {
            "default_generation_settings": {"params": {}, "n_ctx": self.context},
            "total_slots": len(self.slots),
            "model_alias": self.name,
            "model_path": self.path,
            "modalities": {"vision": bool(self.marker), "video": False, "audio": False},
            "media_marker": self.marker or "<__media_unused__>",
            "bos_token": self.pieces[self.begin[0]].decode() if self.begin else "",
        }
        return {name: value for name, value in props.items() if name not in self.lacks}

    # -- images ----------------------------------------------------------------------------------------------------

    def _tokens(self, content: Any, add_special: bool) -> list[int]:
        """The ids of a text, or of texts and ids."""
        parts = content if isinstance(content, list) else [content]
        ids = [id for part in parts for id in (self.encode(part) if isinstance(part, str) else [part])]
        return [*self.begin, *ids] if add_special else ids

    def _text(self, ids: Sequence[int]) -> str:
        """The text of ids. An id outside the vocabulary is an error of the server, as in the original."""
        if not all(0 <= id < len(self.pieces) for id in ids):
            size = len(self.pieces)
            words = f"vector::_M_range_check: __n (which is {max(ids)}) >= this->size() (which is {size})"
            raise Refusal(words, "server_error", 500)
        return b"".join(self.pieces[id] for id in ids).decode(errors="replace")

    def _with_images(self, prompt_string: str, multimodal_data: Sequence[str]) -> list[int]:
        if not self.marker:
            raise Refusal("Multimodal data provided, but model does not support multimodal requests.")
        files = [image_tokens(base64.b64decode(data)) for data in multimodal_data]
        texts = prompt_string.split(self.marker)
        if len(texts) != len(files) + 1:
            raise Refusal("Failed to tokenize prompt")
        ids = [*self.begin, *self.encode(texts[0])]
        for file, text in zip(files, texts[1:], strict=True):
            ids += [*file, *self.encode(text)]
        return ids

    # -- completions -----------------------------------------------------------------------------------------------

    async def _complete(self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if body.get("response_fields") == ["generation_settings/grammar"]:  # a question, and no work
            await _write(writer, 200, {"generation_settings/grammar": self.grammar})
            return
        self.received.append(body)
        if self.scripts:
            return await self._play(self.scripts.pop(0), reader, writer)
        if isinstance(body["prompt"], dict):
            body = {**body, "prompt": self._with_images(**body["prompt"])}
        self._check(body)
        leaving = asyncio.ensure_future(reader.read(1))
        work = asyncio.ensure_future(self._generate(body, writer))
        try:
            await asyncio.wait([leaving, work], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self.left.release()
                raise ConnectionError
            await work
        finally:
            work.cancel()
            leaving.cancel()
            await asyncio.wait([work, leaving])

    async def _play(self, script: Sequence[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in script:
            if part is HANG:
                await reader.read()
                self.left.release()
                break
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)
        raise ConnectionError

    def _check(self, body: dict[str, Any]) -> None:
        """Check the fields as the schema does, and the grammar and the prompt as the slot does."""
        for name, limits in _NUMBERS.items():
            value = body.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise Refusal(f"Field '{name}': [json.exception.type_error.302] type must be number, but is not")
            if limits is not None and not limits[0] <= value < limits[1]:
                raise Refusal(f"Field '{name}': Value must be between {limits[0]} <= value, but got {value}")
        if body.get("repeat_penalty", 1.0) <= 0:
            raise Refusal("Failed to initialize samplers: penalty_repeat must be finite and greater than 0")
        prompt = body["prompt"]
        if not prompt:
            raise Refusal('"prompt" must not be empty')
        if not all(0 <= id < len(self.pieces) or id >= IMAGE for id in prompt):
            raise Refusal("Prompt contains invalid tokens")
        if len(prompt) >= self.context:
            words = f"request ({len(prompt)} tokens) exceeds the available context size ({self.context} tokens)"
            raise Refusal(f"{words}, try increasing it", "exceed_context_size_error")
        texts(body)

    # -- pooling ---------------------------------------------------------------------------------------------------

    async def _embed(self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.pooling:
            words = "This server does not support embeddings. Start it with `--embeddings`"
            raise Refusal(words, "not_supported_error", 501)
        if "content" not in body:
            raise Refusal('"input" or "content" must be provided')
        ids = body["content"]
        self.received.append(body)
        if self.scripts and any(ids):
            return await self._play(self.scripts.pop(0), reader, writer)
        self._check_pooled(len(ids))
        if not all(0 <= id < len(self.pieces) for id in ids):
            raise Refusal("Prompt contains invalid tokens")
        assert self.pooling != "rank", "the original reads past the end of the score"
        await asyncio.sleep(self.pace)
        found = [vector([id], self.dimensions) for id in ids] if self.pooling == "none" else [self._vector(body)]
        await _write(writer, 200, [{"index": 0, "embedding": found}])

    def _vector(self, body: dict[str, Any]) -> list[float]:
        found = vector(body["content"], self.dimensions)
        norms = {-1: 1.0, 0: max(map(abs, found)) / 32760, 2: math.hypot(*found)}
        return [value / norms[body.get("embd_normalize", 2)] for value in found]

    def _check_pooled(self, count: int) -> None:
        if count > self.batch and self.pooling != "last":
            words = f"input ({count} tokens) is too large to process. increase the physical batch size (current batch"
            raise Refusal(f"{words} size: {self.batch})", "server_error", 500)
        if self.pooling == "last" and count >= self.context:  # it can be divided, as a prompt
            words = f"request ({count} tokens) exceeds the available context size ({self.context} tokens)"
            raise Refusal(f"{words}, try increasing it", "exceed_context_size_error")
        if count > self.context:
            words = f"input ({count} tokens) is larger than the max context size ({self.context} tokens). skipping"
            raise Refusal(words, "exceed_context_size_error")

    async def _rerank(self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.pooling != "rank":
            words = "This server does not support reranking. Start it with `--reranking`"
            raise Refusal(words, "not_supported_error", 501)
        if not isinstance(body.get("query"), str):
            raise Refusal('"query" must be provided')
        if not body.get("documents"):
            raise Refusal('"documents" must be a non-empty string array')
        self.received.append(body)
        if self.scripts and body["query"]:
            return await self._play(self.scripts.pop(0), reader, writer)
        prompts = [[2, *_words(body["query"]), 3, 3, *_words(text), 3] for text in body["documents"]]
        for prompt in prompts:
            self._check_pooled(len(prompt))
        await asyncio.sleep(self.pace)
        results = [{"index": index, "relevance_score": vector(ids, 1)[0]} for index, ids in enumerate(prompts)]
        results.sort(key=lambda result: -result["relevance_score"])
        num_tokens = sum(map(len, prompts))
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        await _write(writer, 200, {"model": self.name, "object": "list", "usage": usage, "results": results})

    # -- slots -----------------------------------------------------------------------------------------------------

    async def _slot(self, prompt: Sequence[int]) -> Slot:
        """Wait for a free slot: the one with the longest common prefix."""
        async with self._freed:
            await self._freed.wait_for(lambda: self.num_busy < len(self.slots))
            slot = max(
                (slot for slot in self.slots if not slot.is_processing), key=lambda slot: _common(slot.tokens, prompt)
            )
            slot.is_processing, slot.error, slot.number = True, None, self._num_begun
            self._num_begun += 1
            return slot

    def launch(self, slot: Slot, body: dict[str, Any]) -> bool:
        """Prepare a slot for a request. Return whether its cached tokens were computed with other adapters."""
        if not self.adapters:
            slot.lora = ()
            return False
        prompt = body["prompt"]
        if slot.tokens and _common(slot.tokens, prompt) < len(slot.tokens) / 2:
            self._memory.append((slot.tokens, slot.computed_by))
            best = max(self._memory, key=lambda known: _common(known[0], prompt))
            if _common(best[0], prompt) > _common(slot.tokens, prompt):
                slot.tokens, slot.computed_by = best
        scales = tuple(scale for _, scale in self.adapters)
        if asked := {entry["id"]: entry["scale"] for entry in body.get("lora") or ()}:
            scales = tuple(float(asked.get(id, 0)) for id in range(len(self.adapters)))
            if scales != slot.lora:
                slot.tokens = []
        slot.lora = scales
        is_reused = bool(body.get("cache_prompt", True) and _common(slot.tokens, prompt))
        is_mixed = is_reused and slot.computed_by != scales
        slot.computed_by = scales
        return is_mixed

    def waits(self, slot: Slot) -> bool:
        """Whether a request waits for another one with other adapters, which began earlier."""
        others = [other for other in self.slots if other.is_processing and other.number < slot.number]
        return any(other.lora != slot.lora for other in others)

    async def _generate(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        slot = await self._slot(body["prompt"])
        try:
            run = _Run(self, slot, body)
            begun = False
            async for event in run.events():
                if not body.get("stream"):
                    continue
                if not begun:
                    writer.write(_HEAD)
                    begun = True
                await _chunk(writer, event)
            if not body.get("stream"):
                await _write(writer, 200, run.last)
            elif begun:
                writer.write(b"0\r\n\r\n")
                await writer.drain()
        except Refusal as error:
            if not (body.get("stream") and begun):
                raise
            await _chunk(writer, {"error": error.error})
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        finally:
            slot.is_processing = False
            slot.num_prompt = slot.num_decoded = 0
            async with self._freed:
                self._freed.notify_all()

    def fail_all(self, message: str) -> None:
        """End all running requests with an error, as after a failed `llama_decode`."""
        for slot in self.slots:
            slot.error = Refusal(message, "server_error", 500)
            slot.tokens = []


class _Run:
    """A request in its slot."""

    def __init__(self, server: LlamaServer, slot: Slot, body: dict[str, Any]) -> None:
        self.server, self.slot, self.body = server, slot, body
        is_mixed = server.launch(slot, body)
        applied = [(path, scale) for (path, _), scale in zip(server.adapters, slot.lora, strict=True) if scale]
        self._salt = repr(applied) + "mixed" * is_mixed if is_mixed or applied else ""
        self.num_cached = _common(slot.tokens, body["prompt"]) if body.get("cache_prompt", True) else 0
        self.num_cached = min(self.num_cached, len(body["prompt"]) - 1)
        self.last: dict[str, Any] = {}
        self._seed = random.Random(body["seed"] if body.get("seed", -1) not in (-1, 0xFFFFFFFF) else None)
        self._texts = texts(body) if server.ruled else None
        self._text = b""
        self._num_sent = 0
        self._ids: list[int] = []
        self._scores: list[dict[str, Any]] = []
        slot.tokens = list(body["prompt"])

    async def events(self) -> Any:
        server, body = self.server, self.body
        most = body.get("n_predict", -1)
        if body.get("stream") and body.get("return_progress"):
            for _ in range(0, len(body["prompt"]), 512):
                await asyncio.sleep(server.prompt_pace)
                yield {**self._partial(-1, {}), "prompt_progress": {"total": len(body["prompt"])}}
        while True:
            await asyncio.sleep(server.pace)
            while server.waits(self.slot):
                await asyncio.sleep(0.001)
            if sum(len(slot.tokens) for slot in server.slots if slot.is_processing) >= server.pool:
                server.fail_all("Context size has been exceeded.")
            if self.slot.error is not None:
                raise self.slot.error
            id, score = self._sample()
            self._ids.append(id)
            self.slot.num_prompt, self.slot.num_decoded = len(body["prompt"]), len(self._ids)
            self._text += b"" if id in EOG else server.pieces[id]
            # It drafts neither the first nor the last token (`get_n_draft_max`).
            if server.drafts and score and len(self._ids) > 1 and not 0 <= most <= len(self._ids):
                score = {**score, "logprob": 0.0, "top_logprobs": []}
            if not cut_off(self._text):
                self._scores.append(score)
                yield self._partial(id, score)
            reason = self._reason(id, most)
            if reason:
                self.last = self._final(reason)
                yield {**self.last, "tokens": [], "content": ""} if body.get("stream") else self.last
                return
            self.slot.tokens.append(id)

    def _reason(self, id: int, most: int) -> str:
        if id in EOG:
            return "eos"
        if any(word.encode() in self._text for word in self.body.get("stop") or self.server.stops):
            return "word"
        is_full = len(self.slot.tokens) + 1 >= self.server.context
        return "limit" if is_full or 0 <= most <= len(self._ids) else ""

    def _partial(self, id: int, score: dict[str, Any]) -> dict[str, Any]:
        content, self._num_sent = self._text[self._num_sent :], len(self._text)
        event = {
            "index": 0,
            "content": content.decode(errors="replace"),
            "tokens": [id],
            "stop": False,
            "id_slot": self.slot.id,
            "tokens_predicted": len(self._ids),
            "tokens_evaluated": len(self.body["prompt"]),
        }
        if self.body.get("n_probs") and score.get("top_logprobs"):
            event["completion_probabilities"] = [score]
        return event

    def _final(self, reason: str) -> dict[str, Any]:
        event = {
            "index": 0,
            "content": self._text.decode(errors="replace"),
            "tokens": self._ids if self.body.get("return_tokens") else [],
            "stop": True,
            "model": self.server.name,
            "tokens_predicted": len(self._ids),
            "tokens_evaluated": len(self.body["prompt"]),
            "prompt": "x" * len(self.body["prompt"]),
            "truncated": len(self.slot.tokens) + 1 >= self.server.context,
            "stop_type": reason,
            "stopping_word": "",
            "timings": {"cache_n": self.num_cached, "prompt_n": len(self.body["prompt"]) - self.num_cached},
        }
        if self.body.get("n_probs") and not self.body.get("stream"):
            event["completion_probabilities"] = self._scores
        names = self.body.get("response_fields")
        return {name: event[name] for name in names if name in event} if names else event

    # -- sampling --------------------------------------------------------------------------------------------------

    def _sample(self) -> tuple[int, dict[str, Any]]:
        ids = [*self.body["prompt"], *self._ids]
        raw = self.server.model.logits(ids, self._salt)
        biased = raw.copy()
        for id, bias in self.body.get("logit_bias", ()):
            if 0 <= id < len(raw):
                biased[id] = -math.inf if bias is False else biased[id] + bias
        if self.body.get("ignore_eos"):
            biased[[*EOG]] = -math.inf
        if self._texts is not None:
            biased[[id for id in range(len(raw)) if not self._fits(id)]] = -math.inf
        order, weights = chain(biased, ids, self.body)
        chosen = int(order[0]) if len(order) == 1 else self._seed.choices(order.tolist(), weights.tolist())[0]
        return chosen, self._score(chosen, raw)

    def _fits(self, id: int) -> bool:
        assert self._texts is not None
        if id in EOG:
            return self._text in self._texts
        after = self._text + self.server.pieces[id]
        return bool(self.server.pieces[id]) and any(text.startswith(after) for text in self._texts)

    def _score(self, id: int, raw: Any) -> dict[str, Any]:
        count = self.body.get("n_probs", 0)
        if not count:
            return {}
        values = raw - numpy.log(numpy.exp(raw).sum())

        def one(id: int) -> dict[str, Any]:
            piece = self.server.pieces[id]
            return {"id": id, "token": piece.decode(errors="ignore"), "bytes": [*piece], "logprob": float(values[id])}

        return {**one(id), "top_logprobs": [one(int(id)) for id in numpy.argsort(-raw, kind="stable")[:count]]}


def vector(ids: Sequence[int], dimensions: int) -> list[float]:
    """An embedding of a text, or a score."""
    draw = numpy.random.default_rng(zlib.crc32(repr([*ids]).encode()))
    return [float(value) for value in draw.normal(0, 2, dimensions)]


def _words(text: str) -> list[int]:
    return [4 + zlib.crc32(word.encode()) % 50 for word in text.split()]


def chain(logits: Any, ids: Sequence[int], body: dict[str, Any]) -> tuple[Any, Any]:
    """Apply the samplers of a request in its order. Return the candidates, and weights that need not add up to 1."""
    order, values = numpy.arange(len(logits)), logits
    for name in body.get("samplers", ("penalties", "top_k", "typ_p", "top_p", "min_p", "temperature")):
        match name:
            case "penalties":
                values = _penalized(values, ids, body)
            case "temperature":
                temperature = body.get("temperature", 0.8)
                if temperature <= 0:
                    order, values = order[[values.argmax()]], values[[values.argmax()]]
                else:
                    values = values / temperature
            case "top_k" if body.get("top_k", 40) > 0:
                best = numpy.argsort(-values, kind="stable")[: body.get("top_k", 40)]
                order, values = order[best], values[best]
            case "top_p" if body.get("top_p", 0.95) < 1:
                best = numpy.argsort(-values, kind="stable")
                order, values = order[best], values[best]
                sums = numpy.exp(values - values[0]).cumsum()
                count = int(numpy.searchsorted(sums, body.get("top_p", 0.95) * sums[-1])) + 1
                order, values = order[:count], values[:count]
            case "min_p" if body.get("min_p", 0.05) > 0:
                keep = values >= values.max() + math.log(body.get("min_p", 0.05))
                order, values = order[keep], values[keep]
    return order, numpy.exp(values - values.max())


def _penalized(values: Any, ids: Sequence[int], body: dict[str, Any]) -> Any:
    """Apply the penalties, of which all count the prompt."""
    most, penalty = body.get("repeat_last_n", 64), body.get("repeat_penalty", 1.0)
    values, ids = values.copy(), [id for id in ids if id < IMAGE]
    for id, count in Counter(ids[-most:] if most else ()).items():
        values[id] = values[id] * penalty if values[id] <= 0 else values[id] / penalty
        values[id] -= count * body.get("frequency_penalty", 0.0) + body.get("presence_penalty", 0.0)
    return values


class Model:
    """Computes the logits of the next token from the last ones."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._continues = 8 * numpy.array([b"\x80" <= piece[:1] < b"\xc0" for piece in pieces])
        self._begins = 4 * numpy.array([piece[-1:] >= b"\xc0" for piece in pieces])
        self._known: dict[tuple[str, tuple[int, ...]], Any] = {}

    def logits(self, ids: Sequence[int], salt: str = "") -> Any:
        """Return the logits of the model, or of the model with the adapters that `salt` describes."""
        last = (*(id for id in ids if id >= IMAGE), *ids[-4:])
        if (salt, last) not in self._known:
            self._known[salt, last] = self._logits(last, salt)
        return self._known[salt, last]

    def _logits(self, last: tuple[int, ...], salt: str) -> Any:
        draw = numpy.random.default_rng(zlib.crc32(f"{last}{salt}".encode()))
        values = draw.uniform(0, 6, len(self._pieces))
        if cut_off(b"".join(self._pieces[id] for id in last if id < IMAGE)):
            values += self._continues * (draw.random() < 0.95)  # seldom leaves a character incomplete
        else:
            values += self._begins * (draw.random() < 0.2)
        values[[*EOG]] = draw.uniform(0, 8, len(EOG)) - 1
        return values


def cut_off(text: bytes) -> bool:
    """Whether the original waits for the rest of the last character (`validate_utf8`)."""
    for count in range(1, min(4, len(text)) + 1):
        byte = text[-count]
        size = 2 if byte & 0xE0 == 0xC0 else 3 if byte & 0xF0 == 0xE0 else 4 if byte & 0xF8 == 0xF0 else 0
        if size > count:
            return True
    return False


def texts(body: dict[str, Any]) -> list[bytes] | None:
    """The texts that a request's grammar allows, as far as the double reads grammars; None: all."""
    if "json_schema" in body and "grammar" not in body:
        return [json.dumps(example(body["json_schema"]), ensure_ascii=False, separators=(",", ":")).encode()]
    if not (text := body.get("grammar", "")):
        return None
    literal = r'"((?:[^"\\]|\\.)*)"'
    rest = re.sub(literal + r"|\[(.)-(.)\]", "", text.removeprefix("root ::= "))
    if not text.startswith("root ::= ") or rest.strip(" ()|+"):
        raise Refusal("Failed to initialize samplers: failed to parse grammar")
    found = [json.loads(re.sub(r"\\U0000(....)", r"\\u\1", f'"{one[1]}"')) for one in re.finditer(literal, text)]
    for one in re.finditer(r"\[(.)-(.)\]", text):
        found += map(chr, range(ord(one[1]), ord(one[2]) + 1))
    return [one.encode() for one in found]


def example(schema: Any) -> Any:
    """An instance of a schema."""
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type"):
        case "object":
            return {name: example(value) for name, value in schema.get("properties", {}).items()}
        case "array":
            return []
        case "string":
            return "a"
    return 1


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


_HEAD = (
    b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    b"Keep-Alive: timeout=5, max=100\r\n\r\n"
)


async def _write(writer: asyncio.StreamWriter, code: int, body: Any) -> None:
    data = json.dumps(body).encode()
    kind = "Content-Type: application/json; charset=utf-8"
    writer.write(f"HTTP/1.1 {code} Status\r\n{kind}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()


async def _chunk(writer: asyncio.StreamWriter, event: Any) -> None:
    data = b"data: " + json.dumps(event).encode() + b"\n\n"
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))
    await writer.drain()


@contextlib.contextmanager
def listening(pieces: Sequence[bytes], num_slots: int = 4) -> Iterator[LlamaServer]:
    """A server on loopback, on a thread."""
    server = LlamaServer(pieces, num_slots)
    with on_thread(server.serve) as server.port:
        yield server


# -- as a program ------------------------------------------------------------------------------------------------------


_BYTES = [*range(33, 127), *range(161, 173), *range(174, 256), *range(33), *range(127, 161), 173]
_PIECES = [*(bytes([byte]) for byte in _BYTES), b"<eos>", b"ab"]  # those of `byte_gguf`, in the order of its ids
_LOADING = 0.2  # seconds in which it answers 503
_FLAGS = {"-m": str, "--host": str, "--port": int, "-t": int, "-ngl": str, "--seed": int}


def main() -> None:
    """Be `llama-server FLAGS` until SIGTERM or SIGINT.

    A flag or a way to pool that it lacks, an unknown architecture and a port that is taken end it as they end the
    original.
    """
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert not {"HF_TOKEN", "OPENAI_API_KEY", "LMI_API_KEY", "AWS_SECRET_ACCESS_KEY"} & {*os.environ}
    known = {"LLAMA_API_KEY", "LLAMA_ARG_CTX_SIZE", "LLAMA_ARG_N_PARALLEL", "LLAMA_ARG_KV_UNIFIED"}
    assert known <= {*os.environ}
    if os.environ.get("LLAMA_ARG_POOLING", "mean") not in ("none", "mean", "cls", "last", "rank"):
        raise SystemExit('error while handling environment variable "LLAMA_ARG_POOLING": invalid value')
    given, words = dict[str, Any](), iter(sys.argv[1:])
    for flag in words:
        if flag not in _FLAGS:
            raise SystemExit(f"error: invalid argument: {flag}")
        given[flag] = _FLAGS[flag](next(words))
    asyncio.run(_run(Path(given["-m"]), given["--host"], given["--port"]))


async def _run(file: Path, host: str, port: int) -> None:
    ended = asyncio.Event()
    server = LlamaServer(_PIECES, int(os.environ["LLAMA_ARG_N_PARALLEL"]))
    server.eog = frozenset({_PIECES.index(b"<eos>")})
    server.key, server.name, server.is_loading = os.environ["LLAMA_API_KEY"], file.name, True
    server.pool = int(os.environ["LLAMA_ARG_CTX_SIZE"])
    shared = os.environ["LLAMA_ARG_KV_UNIFIED"] == "1"
    server.context = min(CONTEXT, server.pool if shared else server.pool // len(server.slots))
    server.pace = 0.01
    print("W srv  llama_server: a warning with the key " + server.key, file=sys.stderr)
    print("W srv  llama_server: " + "long " * 10_000, file=sys.stderr)
    try:
        listener = await asyncio.start_server(server.serve, host, port)
    except OSError:
        where = f"hostname: {host}, port: {port}"
        print(f"E srv         start: couldn't bind HTTP server socket, {where}", file=sys.stderr)
        raise SystemExit("E srv  llama_server: exiting due to HTTP server error") from None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await asyncio.sleep(_LOADING)
    if b"mystery" in file.read_bytes()[:1000]:
        words = "error loading model: unknown model architecture: 'mystery'"
        print(f"E llama_model_load: {words}", file=sys.stderr)
        raise SystemExit("E srv  llama_server: exiting due to model loading error")
    server.is_loading = False
    await ended.wait()
    listener.close()
    os._exit(0)  # it does not wait for its connections
