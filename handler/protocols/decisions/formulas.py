"""The numbers of a decision, which are computed from the log-probabilities of the labels.

The confidence follows TypeSafe's published formulas, which SGLang (srt/entrypoints/systemone) and llama.cpp
(tools/server/server-decision.cpp) share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from handler.core.errors import GenerationFailed

_LOWEST = -1e4  # replaces the log-probability of a token that the model cannot generate
_TOLERANCE = 1e-6  # nats by which computed log-probabilities of the same token may differ


class Reading(NamedTuple):
    """The probabilities of the options of a question.

    Attributes:
        probabilities: the probability of each option; their sum is 1.
        label_mass: the probability that the model's next token is any label. A small number means that the model did
            not understand that it should reply with a label.
        argmax_is_label: whether the most likely next token is a label.
    """

    probabilities: tuple[float, ...]
    label_mass: float
    argmax_is_label: bool

    @property
    def best(self) -> int:
        """The index of the most likely option; the first one of several."""
        return self.probabilities.index(max(self.probabilities))

    @property
    def choice_confidence(self) -> float:
        """How far the most likely option is above an equal distribution, from 0 to 1."""
        number = len(self.probabilities)
        if number == 1:
            return 1.0
        return clamp((number * max(self.probabilities) - 1) / (number - 1))

    @property
    def score(self) -> float:
        """The expected index of the level."""
        number = len(self.probabilities)
        mean = math.fsum(index * probability for index, probability in enumerate(self.probabilities))
        return min(max(mean, 0.0), number - 1.0)

    @property
    def score_confidence(self) -> float:
        """How close the levels are to the most likely one, relative to an equal distribution, from 0 to 1."""
        number, best = len(self.probabilities), self.best
        if number == 1:
            return 1.0
        spread = math.fsum(abs(index - (number - 1) / 2) for index in range(number)) / number
        distance = math.fsum(probability * abs(index - best) for index, probability in enumerate(self.probabilities))
        return clamp(1 - distance / spread)


def read(logprobs: Sequence[float]) -> Reading:
    """Compute the probabilities of options.

    Args:
        logprobs: the log-probability of each label, and after them the highest log-probability of any token.

    Raises:
        GenerationFailed: the model has computed NaN, as models do in fp16 if their values are too large for it.
    """
    if any(map(math.isnan, logprobs)):
        raise GenerationFailed("the log-probabilities of the labels are not numbers (NaN)")
    *labels, highest = (max(_LOWEST, logprob) for logprob in logprobs)
    top = max(labels)
    weights = [math.exp(logprob - top) for logprob in labels]
    total = math.fsum(weights)
    return Reading(
        tuple(clamp(weight / total) for weight in weights),
        clamp(math.fsum(map(math.exp, labels))),
        top >= highest - _TOLERANCE,
    )


def clamp(value: float) -> float:
    """Return a number between 0 and 1, because clients refuse numbers such as 1.0000000002."""
    return min(max(value, 0.0), 1.0)
