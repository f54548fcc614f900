"""Reads the log-probabilities of labels from vLLM, with one or more short requests for each request with labels."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from handler.core.values import Extras, Finish
from handler.engines.base import EngineRequest, Output
from handler.engines.vllm.core import Pending

MAX_IDS = 128
"""Maximum number of ids whose log-probabilities vLLM returns for a request (MAX_LOGPROB_TOKEN_IDS in
vllm/sampling_params.py)."""


class LabelPart(NamedTuple):
    """A request to vLLM for some of the labels.

    Attributes:
        ids: token ids of the prompt.
        label_ids: labels whose log-probabilities vLLM returns for the next token, in place of alternatives.
        label_id: the label at the end of `ids`, if the part scores a prompt instead, or None.
    """

    ids: Sequence[int]
    label_ids: Sequence[int] = ()
    label_id: int | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of SamplingParams. Greedy decoding chooses the most likely token."""
        arguments: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
        if self.label_ids:
            return {**arguments, "logprob_token_ids": list(self.label_ids)}
        if self.label_id is not None:
            return {**arguments, "logprobs": 0, "prompt_logprobs": 0}
        return {**arguments, "logprobs": 0}

    def pending(self, key: int) -> Pending:
        return Pending(key, num_tops=len(self.label_ids), prompt_logprobs=None if self.label_id is None else [None])


class LabelRequest:
    """A request with labels: the parts that vLLM has not run yet, and the log-probabilities so far.

    Args:
        selects_ids: whether vLLM can return the log-probabilities of selected ids. Otherwise each label is scored
            as the last token of a prompt, which takes one pass for each label.
    """

    def __init__(self, request: EngineRequest, media: Any, *, selects_ids: bool) -> None:
        self.request, self.media = request, media
        self._logprobs: dict[int, float] = {}
        self._highest = 0.0
        ids, label_ids = request.ids, request.pooling.label_ids
        if selects_ids:
            starts = range(0, len(label_ids), MAX_IDS)
            self._parts = deque(LabelPart(ids, label_ids[start : start + MAX_IDS]) for start in starts)
        else:
            self._parts = deque(LabelPart([*ids, id], label_id=id) for id in label_ids)
            self._parts.append(LabelPart(ids))
        self.part = self._parts.popleft()

    def take(self, output: Output) -> Output | None:
        """Read the output of the current part. Return the output of the request, or None if another part follows."""
        if output.finish is Finish.ERROR:
            return output
        if not self._read(output):
            return Output(output.key, finish=Finish.ERROR, error="the engine returned no log-probability")
        if self._parts:
            self.part = self._parts.popleft()
            return None
        logprobs = [*(self._logprobs[id] for id in self.request.pooling.label_ids), self._highest]
        return Output(output.key, finish=Finish.STOP, extras=Extras(vector=logprobs))

    def _read(self, output: Output) -> bool:
        """Store the log-probabilities of the current part. Return whether the output has all of them."""
        part = self.part
        if part.label_id is not None:
            logprob = output.prompt_logprobs[-1] if output.prompt_logprobs else None
            if logprob is not None:
                self._logprobs[part.label_id] = logprob
            return logprob is not None
        if output.tops:
            self._logprobs.update(output.tops[0])
        highest = output.logprobs[0] if output.logprobs else None
        if highest is not None:
            self._highest = highest
        return highest is not None and self._logprobs.keys() >= {*part.label_ids}
