"""The stages that work on a body and encode its requests. `STAGES` lists them in their order."""

from __future__ import annotations

import asyncio
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from handler.core.errors import InvalidPayload
from handler.core.fair_queue import OwnerCounts
from handler.core.media import MEDIA, Medium, media_of
from handler.core.text import Prompt
from handler.core.values import Request, Task
from handler.engines.structured_output.validator import StructuredOutputValidator
from handler.plugins.formatter_thread import ThreadedReply
from handler.protocols.kernel.body import value_size
from handler.protocols.kernel.dialect import Dialect
from handler.protocols.kernel.stored import NOTHING
from handler.serving.compression import inflate
from handler.serving.encoder import check_structured_output, is_long
from handler.serving.large_bodies import LARGE
from handler.serving.quota import BODY_MEMORY, Share
from handler.serving.request.gate import BatchGate
from handler.serving.request.life import CLOSED, FINISHED, JOIN, Life
from handler.serving.request.plan import Encoding, Intake, Plan, Resource, Stage, Time, Wait
from handler.serving.stored_responses import OwnersKeeper, ResponseStore

if TYPE_CHECKING:
    from handler.serving.admission import Admission

T = TypeVar("T")

PARSE_INLINE = 1 << 16
"""Bytes up to which a body is parsed on the event loop. Larger bodies are parsed on a thread."""

_MEASURE_INLINE = 1 << 10  # lists and objects; the memory of a small body with more of them is only estimated
_ESTIMATED = 1 << 15  # bytes of memory; larger values are measured after they have been decoded

MOST_TOKENIZING = 8
"""Maximum number of concurrent requests that only tokenize. Requests for inference use the same threads."""


class _Work:
    """The work of a stage."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._preprocessor = admission.preprocessor


class Decompression(_Work):
    """Decompresses bodies that have a Content-Encoding, on a thread.

    The size of the compressed body does not tell how long this takes. Therefore the first part runs as for a small
    body, and the rest, if there is one, as for a large body: it waits for others and leaves a thread to them.
    """

    def body(self, intake: Intake) -> Wait:
        return self._inflate(intake) if intake.head.encoding else None

    async def _inflate(self, intake: Intake) -> None:
        size, owner = len(intake.body), intake.head.owner
        limit = self._preprocessor.context.config.max_request_size
        parts = inflate(intake.body, intake.head.encoding, limit, " (max_request_size)")
        inflated: list[bytes] = []
        begin = functools.partial(self._take, intake, parts, inflated, LARGE)
        if await self._admission.submit(begin, size, owner, apart=False):
            finish = functools.partial(self._take, intake, parts, inflated, sys.maxsize)
            await self._admission.submit(finish, max(size, LARGE), owner, apart=False)

    def _take(self, intake: Intake, parts: Iterator[bytes], inflated: list[bytes], enough: int) -> bool:
        """Append parts to `inflated` until they have `enough` bytes. At the end of the body, join them.

        Returns:
            Whether the end of the body has not been reached.
        """
        size = 0
        for part in parts:
            intake.task.memory.take(BODY_MEMORY * len(part))
            inflated.append(part)
            size += len(part)
            if size >= enough:
                return True
        intake.body = b"".join(inflated)
        return False


class Decoding(_Work):
    """Decodes bodies inline or on a thread."""

    def body(self, intake: Intake) -> Wait:
        if len(intake.body) < PARSE_INLINE:
            self._decode(intake)
            return None
        return self._admission.run(len(intake.body), functools.partial(self._decode, intake), intake.head.owner)

    def _decode(self, intake: Intake) -> None:
        body, head = intake.body, intake.head
        estimate = self._preprocessor.decoded_size(body, head)
        intake.task.memory.set(len(body) + estimate)
        intake.decoded = decoded = self._preprocessor.decode(body, head)
        if estimate > _ESTIMATED:
            most = _MEASURE_INLINE if len(body) < PARSE_INLINE else sys.maxsize
            estimate = min(estimate, decoded.size or value_size(decoded.value, most))
        intake.size = estimate


class FormattedDecoding(Decoding):
    """Decodes bodies on the thread of the formatters if one of them reads the body."""

    def body(self, intake: Intake) -> Wait:
        if title := self._preprocessor.input_formatter(intake.head):
            return self._admission.on_loop(self._admission.formatters.submit(title, self._decode, intake))
        return super().body(intake)


class Formatting(_Work):
    """Has the thread of the formatters write a response that one of them formats."""

    def body(self, intake: Intake) -> Wait:
        assert intake.parsed is not None, "the body has been parsed"
        if intake.parsed.formats.title:
            thread, deliver = self._admission.formatters, intake.task.feed_and_flush
            reply = ThreadedReply(intake.parsed.reply, intake.parsed.formats.title, thread, deliver)
            intake.task.hold(reply.close)
            intake.parsed = intake.parsed._replace(reply=reply)
        return None


class Recall(_Work):
    """Loads the stored responses that a body refers to, and checks that there is room to store its own response. The
    request takes its turn in its conversation, if it has one.
    """

    def __init__(self, admission: Admission, store: ResponseStore) -> None:
        super().__init__(admission)
        self._store = store

    def body(self, intake: Intake) -> Wait:
        dialect = intake.head.dialect
        if dialect is None or type(dialect).wanted is Dialect.wanted:
            return None
        return self._recall(intake, dialect)

    async def _recall(self, intake: Intake, dialect: Dialect) -> None:
        store, owner, memory, size = self._store, intake.head.owner, intake.task.memory, len(intake.body)
        assert intake.decoded is not None, "the body has been decoded"
        find = functools.partial(dialect.wanted, intake.decoded.value)
        references = await self._admission.process(size, find, owner)
        if references is None:
            return
        if references.keeps:
            if size > store.most_bytes:
                raise InvalidPayload(
                    f"the request has {size} bytes; at most {store.most_bytes} are stored (option.responses_max_bytes)"
                )
            store.check_calls(owner)
            if store.may_be_full:
                await self._admission.on_loop(store.check_room(owner, size))
        intake.recalled, turn = NOTHING, None
        if references.previous or references.items or references.conversation:
            take = functools.partial(_take_body, memory)
            if references.appends:
                turn = store.new_turn()
                until = CLOSED if references.detaches else FINISHED
                intake.task.hold(functools.partial(store.end_turn, owner, turn), until)
            intake.recalled = await self._admission.on_loop(store.recall(owner, references, take, turn))
            intake.size += intake.recalled.size
            if references.appends and size + intake.recalled.size > store.most_bytes:
                raise InvalidPayload(
                    f"the conversation and the request have {size + intake.recalled.size} bytes; at most "
                    f"{store.most_bytes} are stored (option.responses_max_bytes)"
                )
        intake.keeper = OwnersKeeper(store, owner, turn)
        intake.task.hold(intake.keeper.end)


def _take_body(memory: Share, num_bytes: int) -> None:
    memory.take(BODY_MEMORY * num_bytes)


class Parsing(_Work):
    """Parses decoded bodies with their dialect, inline or on a thread."""

    def body(self, intake: Intake) -> Wait:
        size = intake.num_bytes
        if size < PARSE_INLINE:
            self._parse(intake)
            return None
        return self._admission.run(size, functools.partial(self._parse, intake), intake.head.owner)

    def _parse(self, intake: Intake) -> None:
        assert intake.decoded is not None, "the body has been decoded"
        intake.parsed = self._preprocessor.parse(intake.decoded, intake.head, intake.recalled, intake.keeper)


class MediaLoading(_Work):
    """Loads the images, audio and video of requests. If the request ends, the downloads are cancelled."""

    def encode(self, encoding: Encoding) -> Wait:
        return self._load(encoding) if encoding.request.media else None

    async def _load(self, encoding: Encoding) -> None:
        sources = encoding.request.media
        shared = (media_of(sources, *earlier) for earlier in encoding.loaded)
        media: Sequence[Medium] | None = next((media for media in shared if media is not None), None)
        if media is None:
            loaded = await self._admission.on_loop(self._admission.media.load(sources, encoding.owner))
            encoding.hold(loaded.reservation.close)
            media = loaded.media
            encoding.loaded.append((sources, media))
        encoding.media = media


class Tokenizing(_Work):
    """Tokenizes prompts: inline, on a thread, or on a thread for long prompts."""

    def __init__(self, admission: Admission) -> None:
        super().__init__(admission)
        words = f"too many requests are being tokenized: {MOST_TOKENIZING}"
        self._tokenizing = OwnerCounts(MOST_TOKENIZING, words)

    def encode(self, encoding: Encoding) -> Wait:
        if encoding.num_bytes < self._admission.tokenize_inline and not encoding.media:
            encoding.request, encoding.prompt = self._preprocessor.encoder.encode(encoding.request, encoding.media)
            return None
        return self._encode(encoding)

    async def _encode(self, encoding: Encoding) -> None:
        """Encode a request on a thread, which keeps nothing else of it alive once its client has gone."""
        encoding.request, encoding.prompt = await self._on_thread(self._preprocessor.encoder.encode, encoding)

    async def tokenize(self, encoding: Encoding) -> None:
        """Tokenize a prompt of any length for a request that needs no engine."""
        with self._tokenizing.hold(encoding.owner):  # media are not counted: they have their own limits
            take = functools.partial(self._take, encoding.take)
            if encoding.num_bytes < self._admission.tokenize_inline and not encoding.media:
                take(encoding.request, encoding.media)
            else:
                await self._on_thread(take, encoding)

    def _on_thread(self, use: Callable[[Request, Sequence[Medium]], T], encoding: Encoding) -> asyncio.Future[T]:
        size = encoding.num_bytes + sum(len(medium.data) for medium in encoding.media)  # the media are copied
        call = functools.partial(use, encoding.request, encoding.media)
        return self._admission.submit(call, size, encoding.owner, apart=is_long(encoding.request))

    def _take(self, take: Callable[[Prompt], object], request: Request, media: Sequence[Medium]) -> None:
        take(self._preprocessor.encoder.tokenize(request, media))


class Trial(_Work):
    """Tries in a process of its own whether the engine can apply the structured output of a request."""

    def __init__(self, admission: Admission, validator: StructuredOutputValidator) -> None:
        super().__init__(admission)
        self._validator = validator

    def encode(self, encoding: Encoding) -> Wait:
        output = encoding.request.sampling.structured_output
        if output is None:
            return None
        return self._check(encoding.request, self._validator.check(output, encoding.owner))

    async def _check(self, request: Request, trial: Future[str]) -> None:
        check_structured_output(request, await self._admission.on_loop(trial))


class Gating:
    """Waits at the gate for the dynamic batch of a request."""

    def __init__(self, gate: BatchGate) -> None:
        self._gate = gate

    def queue(self, life: Life, requests: Sequence[Request], owner: str) -> Wait:
        life.on(JOIN)
        turn = self._gate.join(owner, line=requests[0].background is not None)
        life.hold(functools.partial(self._gate.leave, turn))
        return self._gate.wait(turn, patient=requests[0].time_limit == math.inf)


# -- the order of the stages, and which of them a server needs -----------------------------------------------------


def _on_thread(name: str, **hooks: Any) -> Stage:
    """Return a stage that takes a thread's turn for larger bodies and prompts."""
    return Stage(name, Time.THREAD, holds=frozenset({Resource.TURN}), **hooks)


def _capture(admission: Admission) -> Stage | None:
    """Record the body. `CapturedTask` records the response."""
    if admission.preprocessor.context.config.capture_requests is None:
        return None
    return Stage("capture", Time.LOOP, body=lambda intake: intake.task.note_decoded(intake))


def _receiving(admission: Admission) -> Stage | None:
    """Receive the body. A host whose loop runs in steps has the body with the head."""
    return None if admission.is_stepped else Stage("body", Time.CLIENT)


def _handle(admission: Admission) -> Stage | None:
    """Call `handle` of model.py. The parts of its response wait for the client beside the call, not in it."""
    if admission.handle is None:
        return None
    return Stage("handle", Time.THREAD, holds=frozenset({Resource.CALL}), call=admission.handle.answer)


def _decompression(admission: Admission) -> Stage:
    headers, hook = frozenset({"content-encoding"}), Decompression(admission).body
    return _on_thread("decompress", headers=headers, body=hook)


def _decoding(admission: Admission) -> Stage:
    kind = FormattedDecoding if admission.preprocessor.has_formatters else Decoding
    return _on_thread("decode", body=kind(admission).body)


def _recall(admission: Admission) -> Stage | None:
    store = admission.preprocessor.store
    if store is None:
        return None
    return _on_thread("stored responses", body=Recall(admission, store).body)


def _parsing(admission: Admission) -> Stage:
    return _on_thread("parse", body=Parsing(admission).body)


def _formatters(admission: Admission) -> Stage | None:
    if not admission.preprocessor.has_formatters:
        return None
    return Stage("formatters", Time.LOOP, body=Formatting(admission).body)


def _media(admission: Admission) -> Stage | None:
    context = admission.preprocessor.context
    if context.task is not Task.TRANSCRIPTION and all(context.no_media.get(kind, "none") for kind in MEDIA):
        return None
    load = MediaLoading(admission).encode
    return _on_thread("media", encode=load, tokenize=load)


def _tokenizing(admission: Admission) -> Stage:
    tokenizing = Tokenizing(admission)
    return _on_thread("tokenize", encode=tokenizing.encode, tokenize=tokenizing.tokenize)


def _trial(admission: Admission) -> Stage | None:
    validator = admission.preprocessor.encoder.validator
    if validator is None:
        return None
    return _on_thread("trial of structured output", encode=Trial(admission, validator).encode)


def _gate(admission: Admission) -> Stage | None:
    if admission.gate is None:
        return None
    return Stage("gate", Time.LOOP, keeps=frozenset({Resource.GATE}), queue=Gating(admission.gate).queue)


def _submission(admission: Admission) -> Stage:
    return Stage("submit", Time.LOOP, keeps=frozenset({Resource.SEQUENCE}))


def _writing(admission: Admission) -> Stage:
    """Send the response. The host buffers what the client has not read, within the memory quota and time limits."""
    return Stage("writer", Time.CLIENT, follows=True)


STAGES: Sequence[Callable[[Admission], Stage | None]] = (
    _receiving, _handle, _decompression, _decoding, _capture, _recall, _parsing, _formatters, _media, _tokenizing,
    _trial, _gate, _submission, _writing,
)  # fmt: skip
"""Functions that return the stages after the head in their order, or None for a stage that the server does not need."""


def plan_of(admission: Admission) -> Plan:
    """Return the plan of a server.

    Raises:
        ValueError: a stage breaks the rule of `Plan`.
    """
    stages = [*admission.preprocessor.plan.stages]
    for stage_of in STAGES:
        if (stage := stage_of(admission)) is not None:
            stages.append(stage)
    return Plan(stages)
