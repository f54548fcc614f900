"""OpenVINO GenAI's WhisperPipeline on a CPU: one clip after another, on a thread; the pipeline gives text alone."""

from __future__ import annotations

import importlib.metadata
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from handler.core.media import SAMPLE_RATE, Medium
from handler.core.values import Adapter, Finish, Sampling
from handler.engines.base import Capabilities, EngineConfig, EngineInfo, EngineRequest, Output, Step, failed
from handler.engines.openvino.whisper.tokenizer import WhisperIds, whisper_ids

_WINDOW = 30  # seconds that Whisper hears at a time
_WAIT = 0.5  # seconds of a step in which no clip ends


TRANSCRIBING = Capabilities(
    frozenset({"max_new_tokens", "do_sample", "temperature"}), no_adapters="it transcribes", no_media={"audio": ""}
)


class _Clip(NamedTuple):
    key: int
    ids: Sequence[int]
    sampling: Sampling
    medium: Medium


class OpenVinoWhisper:
    """See `engines.base.Engine`. A clip's tokens all come in one step, when its transcript is whole.

    Args:
        properties: the CPU plugin's.
    """

    def __init__(self, config: EngineConfig, properties: Mapping[str, str]) -> None:
        import openvino_genai

        assert config.model is not None
        self._genai = openvino_genai
        self._ids: WhisperIds = whisper_ids(config.model)
        self._pipeline: Any = openvino_genai.WhisperPipeline(str(config.model), "CPU", **properties)
        self._tokenizer = self._pipeline.get_tokenizer()
        self._tasks = {id: name for name, id in self._ids.tasks.items()}
        self._languages = {id: name for name, id in self._ids.languages.items()}
        self._waiting: queue.SimpleQueue[_Clip | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Output] = queue.SimpleQueue()
        self._wanted: set[int] = set()
        windows = -(-config.options.max_audio_seconds // _WINDOW)
        context = 2 * (self._ids.most_previous + 1)
        self.info = EngineInfo(
            name="openvino",
            version=importlib.metadata.version("openvino-genai"),
            device="CPU",
            dtype=config.options.dtype,
            max_total_tokens=context * windows,
        )
        self._transcribe([self._ids.start], Sampling(max_new_tokens=2), [0.0] * SAMPLE_RATE, None)  # compiles kernels
        threading.Thread(target=self._run, name="whisper", daemon=True).start()

    def add(self, request: EngineRequest) -> None:
        prompt = request.read_media()
        if prompt is None or len(prompt.media) != 1:
            raise ValueError("a transcription has one audio clip")
        self._wanted.add(request.key)
        self._waiting.put(_Clip(request.key, request.ids, request.sampling, prompt.media[0]))

    def cancel(self, key: int) -> None:
        self._wanted.discard(key)

    def step(self) -> Step:
        outputs: list[Output] = []
        try:
            outputs.append(self._done.get(timeout=_WAIT))
            while True:
                outputs.append(self._done.get_nowait())
        except queue.Empty:
            pass
        outputs = [output for output in outputs if output.key in self._wanted]
        for output in outputs:
            self._wanted.discard(output.key)
        return Step([], [], [], outputs)

    def load_adapter(self, adapter: Adapter) -> None:
        raise ValueError("a Whisper has no LoRA adapters here")

    def drop_adapter(self, adapter: Adapter) -> None:
        pass

    def close(self) -> None:
        self._wanted.clear()
        self._waiting.put(None)

    def _run(self) -> None:
        while (clip := self._waiting.get()) is not None:
            if clip.key in self._wanted:
                self._done.put(self._output(clip))

    def _output(self, clip: _Clip) -> Output:
        import numpy

        try:
            samples = numpy.frombuffer(clip.medium.data, numpy.float32)
            ids = self._transcribe(clip.ids, clip.sampling, samples, clip.key)
        except Exception as error:  # GenAI's, of any kind
            return failed(clip.key, error)
        return Output(clip.key, ids, [None] * len(ids), Finish.STOP)

    def _transcribe(self, ids: Sequence[int], sampling: Sampling, samples: Any, key: int | None) -> list[int]:
        """Return the transcript's ids. Of a long clip GenAI gives the text alone, whose ids they then are."""
        config = self._pipeline.get_generation_config()
        start = list(ids).index(self._ids.start)
        if start:
            config.initial_prompt = self._tokenizer.decode(list(ids[1:start]), skip_special_tokens=False).strip()
        for id in ids[start + 1 :]:
            if id in self._languages:
                config.language = f"<|{self._languages[id]}|>"
            elif id in self._tasks:
                config.task = self._tasks[id]
        if sampling.do_sample:
            config.do_sample, config.temperature = True, sampling.temperature
        if key is None:
            config.max_new_tokens = sampling.max_new_tokens  # others get all that a window may have
        if len(samples) > _WINDOW * SAMPLE_RATE:  # GenAI calls no streamer then
            text = self._pipeline.generate(samples, config).texts[0]
            return [*self._tokenizer.encode(text, add_special_tokens=False).input_ids.data[0].tolist()]
        streamer = _streamer(self._genai, lambda: key is None or key in self._wanted)
        self._pipeline.generate(samples, config, streamer)
        return [id for id in streamer.ids if id != config.eos_token_id]


def _streamer(genai: Any, goes_on: Callable[[], bool]) -> Any:
    """Make what collects a transcript's `ids`, and ends it when nobody waits for it any more."""

    class Streamer(genai.StreamerBase):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.ids: list[int] = []

        def write(self, found: int | Sequence[int]) -> Any:
            self.ids += [found] if isinstance(found, int) else found
            return genai.StreamingStatus.RUNNING if goes_on() else genai.StreamingStatus.CANCEL

        def end(self) -> None:
            pass

    return Streamer()
