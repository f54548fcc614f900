"""The engine for transcription with Whisper on vLLM.

Each piece of the audio is a separate request to vLLM. Several pieces run at once, but their tokens are returned in
order.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from handler.core.media import SAMPLE_RATE
from handler.core.values import Extras, Finish, Heard, Sampling
from handler.engines.base import EngineConfig, EngineRequest, NoAdapters, Output, Step, failed
from handler.engines.huggingface.files import eos_ids
from handler.engines.huggingface.whisper import NO_ADAPTERS, WINDOW, clip_of, cut, whisper_ids
from handler.engines.vllm.core import CoreEngine, Pending, engine_info
from handler.engines.vllm.sampling import FORBIDDEN

_AHEAD = 4  # pieces of a request's audio in vLLM at a time


@dataclass
class _Piece:
    """A piece that was submitted to vLLM, with the tokens that have not been returned yet."""

    pending: Pending
    extras: Extras | None  # returned with the first output, then None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    ended: bool = False


@dataclass
class _Clip:
    """A request's audio that is being transcribed.

    Attributes:
        ids: ids of the prompt, which is the same for each piece.
        language: language code, or "" if the language is not known yet or the model is English-only.
        places: start and end, in samples, of each piece that has not been submitted to vLLM yet.
        pieces: pieces that were submitted to vLLM, in order.
    """

    key: int
    ids: list[int]
    language: str
    sampling: Sampling
    samples: Any
    digest: str
    places: deque[tuple[int, int]]
    pieces: deque[_Piece] = field(default_factory=deque)


class VllmWhisper(NoAdapters, CoreEngine):
    """An engine that transcribes audio. It detects the language unless the request specifies it.

    See `engines.base.Engine`.
    """

    no_adapters = NO_ADAPTERS

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        from vllm.renderers.inputs.preprocess import parse_enc_dec_prompt
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        self._parse, self._params = parse_enc_dec_prompt, SamplingParams
        self._kind = RequestOutputKind.DELTA
        self._ids = whisper_ids(config.model_path)
        self._eos = eos_ids(config)
        self._suppressed = dict.fromkeys(self._ids.suppressed, FORBIDDEN)
        self._languages = {id: name for name, id in self._ids.languages.items()}
        self._keys = itertools.count()
        self._clips: dict[int, _Clip] = {}
        self._asked: dict[int, _Clip] = {}  # by the key of each request to vLLM, for a language or a piece
        self._pieces: dict[int, _Piece] = {}
        info = engine_info(self._engine)
        self._most = min(info.max_total_tokens, self._ids.most)
        windows = -(-config.options.max_audio_seconds // WINDOW)
        self.info = replace(info, max_total_tokens=self._most * windows)
        self._warm_up()

    def _warm_up(self) -> None:
        """Transcribe a second of silence."""
        import numpy

        ids = [self._ids.start, self._ids.no_timestamps]
        clip = _Clip(0, ids, "", Sampling(), numpy.zeros(SAMPLE_RATE, numpy.float32), "", deque([(0, SAMPLE_RATE)]))
        self._begin(clip)
        while self._clips:
            for output in self.step().others:
                if output.error is not None:
                    raise RuntimeError(f"the first request failed: {output.error}")

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        samples, medium = clip_of(request)
        ids = list(request.ids)
        if self._ids.no_timestamps not in ids:
            ids.append(self._ids.of_time(0.0))  # without a first timestamp, vLLM's Whisper may generate none
        language = self._ids.language_of(ids)
        clip = _Clip(request.key, ids, language, request.sampling, samples, medium.digest, deque(cut(samples)))
        self._begin(clip)

    def _begin(self, clip: _Clip) -> None:
        self._clips[clip.key] = clip
        try:
            if self._languages and not clip.language:
                allowed = {"max_tokens": 1, "temperature": 0.0, "allowed_token_ids": [*self._languages]}
                self._submit(clip, Pending(next(self._keys)), [self._ids.start], clip.places[0], allowed)
            else:
                self._continue(clip)
        except BaseException:
            self.cancel(clip.key)
            raise

    def _continue(self, clip: _Clip) -> None:
        """Submit the next pieces to vLLM, up to `_AHEAD` at a time."""
        while clip.places and len(clip.pieces) < _AHEAD:
            span = clip.places.popleft()
            start, end = (samples / SAMPLE_RATE for samples in span)
            piece = _Piece(Pending(next(self._keys)), Extras(heard=Heard(start, end, clip.language or "en")))
            self._submit(clip, piece.pending, clip.ids, span, self._arguments(clip))
            self._pieces[piece.pending.key] = piece
            clip.pieces.append(piece)

    def _arguments(self, clip: _Clip) -> dict[str, Any]:
        sampling = clip.sampling
        return {
            "max_tokens": max(self._most - len(clip.ids), 1),
            "temperature": sampling.temperature if sampling.do_sample else 0.0,
            "logprobs": 0 if sampling.logprobs else None,
            "logit_bias": self._suppressed or None,
        }

    def _submit(
        self, clip: _Clip, pending: Pending, ids: Sequence[int], span: tuple[int, int], arguments: dict[str, Any]
    ) -> None:
        start, end = span
        heard = {
            "prompt": "",
            "multi_modal_data": {"audio": (clip.samples[start:end], SAMPLE_RATE)},
            # The key in vLLM's caches, so that the requests for a piece's language and transcript share encoded audio.
            "multi_modal_uuids": {"audio": [f"{clip.digest}/{start}/{end}"]} if clip.digest else None,
        }
        prompts = self._parse({"encoder_prompt": heard, "decoder_prompt": {"prompt_token_ids": list(ids)}})
        (prompt,) = self._engine.renderer.render_cmpl([prompts])
        prompt["decoder_prompt"]["prompt_token_ids"] = list(ids)  # undoes vLLM's start token before the prompt
        params = self._params(detokenize=False, output_kind=self._kind, **arguments)
        self._submit_as(pending, prompt, params)
        self._asked[pending.key] = clip

    def cancel(self, key: int) -> None:
        if self._clips.pop(key, None) is None:
            return
        numbers = [number for number, clip in self._asked.items() if clip.key == key]
        for number in numbers:
            del self._asked[number]
            self._pieces.pop(number, None)
        self._abort([id for id, pending in self._results.pending.items() if pending.key in numbers])

    # -- results -------------------------------------------------------------------------------------------------

    def step(self) -> Step:
        outputs: list[Output] = []
        step, _ = self._results.read(self._outputs())
        plain = zip(step.keys, step.ids, step.logprobs, strict=True)
        all_outputs = [Output(key, [id], [logprob]) for key, id, logprob in plain] + step.others
        changed = {clip.key: clip for output in all_outputs if (clip := self._take(output, outputs)) is not None}
        for clip in changed.values():
            self._tell(clip, outputs)
        return Step.of(outputs)

    def _take(self, output: Output, outputs: list[Output]) -> _Clip | None:
        """Process an output from vLLM. Return its clip, or None if the clip was cancelled or failed."""
        clip, piece = self._asked.get(output.key), self._pieces.get(output.key)
        if clip is None:  # cancelled by an earlier output
            return None
        if output.finish is not None:
            self._asked.pop(output.key)
            self._pieces.pop(output.key, None)
        if output.error is not None or output.finish is Finish.ERROR:
            self._fail(clip, output.error or "vLLM ended the request", outputs)
            return None
        if piece is not None:
            piece.ids += (id for id in output.ids if id not in self._eos)
            piece.logprobs += (
                logprob for id, logprob in zip(output.ids, output.logprobs, strict=True) if id not in self._eos
            )
            piece.ended = output.finish is not None
            return clip
        (id,) = output.ids
        clip.language = self._languages[id]
        clip.ids = self._ids.in_language(clip.ids, clip.language)
        return clip

    def _tell(self, clip: _Clip, outputs: list[Output]) -> None:
        """Add the clip's new tokens to `outputs`. Tokens of a piece must wait until all earlier pieces have ended."""
        if clip.key not in self._clips:
            return
        while clip.pieces:
            piece = clip.pieces[0]
            if piece.ids or piece.ended:
                outputs.append(Output(clip.key, piece.ids, piece.logprobs, extras=piece.extras))
                piece.ids, piece.logprobs, piece.extras = [], [], None
            if not piece.ended:
                break
            clip.pieces.popleft()
        try:
            self._continue(clip)
        except Exception as error:  # vLLM refuses the next piece
            self._fail(clip, str(error), outputs)
            return
        if not clip.pieces:
            del self._clips[clip.key]
            outputs.append(Output(clip.key, finish=Finish.EOS))

    def _fail(self, clip: _Clip, error: str, outputs: list[Output]) -> None:
        self.cancel(clip.key)
        outputs.append(failed(clip.key, error))
