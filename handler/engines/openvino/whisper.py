"""The engine for transcription with OpenVINO GenAI's WhisperPipeline on a CPU.

A thread transcribes one piece of audio at a time. Concurrent requests take turns.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from handler.core.media import SAMPLE_RATE
from handler.core.values import Extras, Finish, Heard, Sampling
from handler.engines.base import EngineConfig, EngineInfo, EngineRequest, NoAdapters, Output, Step, failed
from handler.engines.huggingface.whisper import NO_ADAPTERS, WINDOW, WhisperIds, clip_of, cut, whisper_ids
from handler.engines.openvino.ir_files import ids_of

_WAIT = 0.5  # seconds that a step waits for the first token


@dataclass
class _Clip:
    """The audio of a request, with the start and end of each piece that has not been transcribed yet."""

    key: int
    ids: Sequence[int]
    sampling: Sampling
    samples: Any
    pieces: deque[tuple[int, int]]


class OpenVinoWhisper(NoAdapters):
    """An engine that returns tokens one by one or, with timestamps, piece by piece. See `engines.base.Engine`.

    Args:
        properties: properties of OpenVINO's CPU plugin.
    """

    no_adapters = NO_ADAPTERS

    def __init__(self, config: EngineConfig, properties: Mapping[str, str]) -> None:
        import openvino_genai

        self._genai = openvino_genai
        self._ids: WhisperIds = whisper_ids(config.model_path)
        self._pipeline: Any = openvino_genai.WhisperPipeline(str(config.model), "CPU", **properties)
        self._tokenizer = self._pipeline.get_tokenizer()
        self._tasks = {id: name for name, id in self._ids.tasks.items()}
        self._waiting: queue.SimpleQueue[_Clip | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Output] = queue.SimpleQueue()
        self._wanted: set[int] = set()
        self.info = EngineInfo(
            name="openvino",
            version=importlib.metadata.version("openvino-genai"),
            device="CPU",
            dtype=config.options.dtype,
            max_total_tokens=self._ids.most * -(-config.options.max_audio_seconds // WINDOW),
        )
        silence = [0.0] * SAMPLE_RATE
        self._pipeline.generate(silence, self._generation([self._ids.start], Sampling(), 2))  # compiles kernels
        threading.Thread(target=self._run, name="whisper", daemon=True).start()

    def add(self, request: EngineRequest) -> None:
        samples, _ = clip_of(request)
        self._wanted.add(request.key)
        self._waiting.put(_Clip(request.key, request.ids, request.sampling, samples, deque(cut(samples))))

    def cancel(self, key: int) -> None:
        self._wanted.discard(key)

    def step(self) -> Step:
        delivered: list[Output] = []
        patience = _WAIT  # for the first output only
        with contextlib.suppress(queue.Empty):
            while True:
                output = self._done.get(timeout=patience)
                patience = 0.0
                if output.key in self._wanted:
                    delivered.append(output)
                    if output.finish is not None:
                        self._wanted.discard(output.key)
        return Step.of(delivered)

    def close(self) -> None:
        self._wanted.clear()
        self._waiting.put(None)

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (clip := self._waiting.get()) is not None:
            if clip.key not in self._wanted:
                continue
            try:
                self._next_piece(clip)
            except Exception as error:  # GenAI may raise any type
                self._done.put(failed(clip.key, error))
                continue
            if clip.pieces:
                self._waiting.put(clip)  # behind the other clips
            else:
                self._done.put(Output(clip.key, finish=Finish.EOS))

    def _next_piece(self, clip: _Clip) -> None:
        start, end = clip.pieces.popleft()
        config = self._generation(clip.ids, clip.sampling)
        config.return_timestamps = timed = self._ids.no_timestamps not in clip.ids
        streamer = _streamer(
            self._genai, lambda ids: self._stream(clip.key, ids, config.eos_token_id, is_sent=not timed)
        )
        result = self._pipeline.generate(clip.samples[start:end], config, streamer)
        requested = self._ids.language_of(clip.ids)
        language = requested or str(result.language or "")
        if timed:
            self._done.put(
                self._timed(clip.key, result.chunks or (), Heard(start / SAMPLE_RATE, end / SAMPLE_RATE, language))
            )
        if not requested and language in self._ids.languages:  # the first piece determines the language of all pieces
            clip.ids = self._ids.in_language(clip.ids, language)

    def _stream(self, key: int, ids: Sequence[int], eos: int, *, is_sent: bool) -> bool:
        """Queue tokens for `step`, and return whether the request is still active."""
        ids = [id for id in ids if id != eos]
        if is_sent and ids:
            self._done.put(Output(key, ids, [None] * len(ids)))
        return key in self._wanted

    def _timed(self, key: int, chunks: Sequence[Any], heard: Heard) -> Output:
        """Return a piece's text and timestamp tokens. The text is encoded again, because GenAI returns no ids."""
        ids: list[int] = []
        for chunk in chunks:
            ids.append(self._ids.of_time(chunk.start_ts))
            ids += ids_of(self._tokenizer, chunk.text)
            if chunk.end_ts >= 0:
                ids.append(self._ids.of_time(chunk.end_ts))
        return Output(key, ids, [None] * len(ids), extras=Extras(heard=heard))

    def _generation(self, ids: Sequence[int], sampling: Sampling, most: int | None = None) -> Any:
        """Return GenAI's configuration for a prompt. `most` limits the number of new tokens unless it is None."""
        config = self._pipeline.get_generation_config()
        start = list(ids).index(self._ids.start)
        if start:
            config.initial_prompt = self._tokenizer.decode(list(ids[1:start]), skip_special_tokens=False).strip()
        if language := self._ids.language_of(ids):
            config.language = f"<|{language}|>"
        for id in ids[start + 1 :]:
            if id in self._tasks:
                config.task = self._tasks[id]
        if sampling.do_sample:
            config.do_sample, config.temperature = True, sampling.temperature
        if most is not None:
            config.max_new_tokens = most
        return config


def _streamer(genai: Any, take: Callable[[Sequence[int]], bool]) -> Any:
    """Return a streamer that passes a transcript's ids to `take`, until `take` returns False."""

    class Streamer(genai.StreamerBase):  # type: ignore[misc]
        def write(self, ids: int | Sequence[int]) -> Any:
            goes_on = take([ids] if isinstance(ids, int) else ids)
            return genai.StreamingStatus.RUNNING if goes_on else genai.StreamingStatus.CANCEL

        def end(self) -> None:
            pass

    return Streamer()
