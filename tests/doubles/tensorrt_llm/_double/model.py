"""A language model of no size: the last three ids say how likely each next one is. And sampling from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy

_RARE = -30.0
_END_ONE_IN = 29  # about so many tokens come before an end


class Model:
    """
    Args:
        directory: config.json says how many ids there are, and which of them ends an answer.
    """

    def __init__(self, directory: Path, tokenizer: Any) -> None:
        config = json.loads((directory / "config.json").read_text())
        self.vocabulary = int(config["vocab_size"])
        generation = directory / "generation_config.json"
        self.generation_config: dict[str, Any] = json.loads(generation.read_text()) if generation.is_file() else {}
        self.context = int(config.get("max_position_embeddings", 2048))
        eos = config.get("eos_token_id")
        self._eos = [eos] if isinstance(eos, int) else list(eos or [])
        texts = tokenizer.batch_decode([[id] for id in range(len(tokenizer))], skip_special_tokens=True)
        self._likely = numpy.full(self.vocabulary, _RARE, dtype=numpy.float32)
        for id, text in enumerate(texts[: self.vocabulary]):
            if text and "\ufffd" not in text:
                self._likely[id] = 0.0

    def logits(self, ids: Sequence[int], world: Any = 0) -> Any:
        """Scores of each id after these, float32 [vocabulary]; `world` is an adapter's id, with images beside it."""
        digest = hashlib.blake2b(repr((world, list(ids[-3:]))).encode(), digest_size=16).digest()
        random = numpy.random.Generator(numpy.random.PCG64(int.from_bytes(digest, "little")))
        found = (random.standard_normal(self.vocabulary) * 3).astype(numpy.float32) + self._likely
        for id in self._eos:
            found[id] = 20.0 if digest[0] % _END_ONE_IN == 0 else -3.0
        return found


def log_softmax(logits: Any) -> Any:
    with numpy.errstate(all="ignore"):
        shifted = logits - logits.max(axis=-1, keepdims=True)
        return shifted - numpy.log(numpy.exp(shifted).sum(axis=-1, keepdims=True))


def penalized(logits: Any, prompt: Sequence[int], ids: Sequence[int], params: Any) -> Any:
    """Repetition counts over prompt and answer, presence and frequency over the answer."""
    if params.repetition_penalty not in (None, 1.0):
        seen = sorted({*prompt, *ids})
        chosen = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = numpy.where(chosen > 0, chosen / penalty, chosen * penalty)
    for id in set(ids):
        logits[id] -= (params.presence_penalty or 0.0) + ids.count(id) * (params.frequency_penalty or 0.0)
    size = params.no_repeat_ngram_size
    if size:
        whole = [*prompt, *ids]
        before = whole[len(whole) - size + 1 :] if size > 1 else []
        for at in range(len(whole) - size + 1):
            if whole[at : at + size - 1] == before:
                logits[whole[at + size - 1]] = -numpy.inf
    return logits


def forbidden(logits: Any, ids: Sequence[int], words: Sequence[Sequence[int]]) -> Any:
    for word in words:
        if len(word) == 1 or list(ids[-(len(word) - 1) :]) == list(word[:-1]):
            logits[word[-1]] = -numpy.inf
    return logits


def chosen(logits: Any, params: Any, random: Any) -> int:
    """The next id.

    Raises:
        RuntimeError: what a GPU would end with, and the engine with it.
    """
    if params._greedy:
        if not numpy.isfinite(logits.max()):
            raise RuntimeError("CUDA error: device-side assert triggered")
        return int(logits.argmax())
    if params.top_k and params.top_k > len(logits):
        raise RuntimeError("selected index k out of range")
    temperature = numpy.float32(1.0 if params.temperature is None else params.temperature)
    with numpy.errstate(all="ignore"):
        scores = logits / temperature
        order = numpy.argsort(-scores, kind="stable")
        if params.top_k:
            order = order[: params.top_k]
        likely = numpy.exp(log_softmax(scores[order]).astype(numpy.float64))
    if not numpy.isfinite(likely).all():
        raise RuntimeError("CUDA error: device-side assert triggered")
    if params.top_p is not None and 0 < params.top_p < 1:
        keep = int((numpy.cumsum(likely) < params.top_p).sum()) + 1
        order, likely = order[:keep], likely[:keep]
    if params.min_p:
        enough = likely >= params.min_p * likely[0]
        order, likely = order[enough], likely[enough]
    return int(order[random.choice(len(order), p=likely / likely.sum())])
