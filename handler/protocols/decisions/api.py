"""The types of responses to decisions, and the errors of System One."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any, Literal, TypedDict

from handler.core.errors import ServingError
from handler.core.values import new_digits
from handler.protocols.decisions.formulas import Reading
from handler.protocols.kernel.errors import Headers
from handler.protocols.kernel.path import InvalidField
from handler.protocols.kernel.schema import Count
from handler.protocols.openai.api import OpenAiError, OpenAiErrors

Probability = Annotated[float, ("minimum", 0), ("maximum", 1)]


class LabelDiagnostics(TypedDict):
    """How well the model followed the instruction to reply with a label, as in vLLM.

    `label_mass` is the probability that the next token is any label. `argmax_is_label` says whether the most likely
    next token is a label.
    """

    label_mass: Probability
    argmax_is_label: bool


def label_diagnostics(reading: Reading) -> LabelDiagnostics:
    return {"label_mass": reading.label_mass, "argmax_is_label": reading.argmax_is_label}


# -- System One --------------------------------------------------------------------------------------------------------


class NoulResult(TypedDict):
    type: Literal["noul"]
    noul: Probability


class ChoiceResult(TypedDict):
    """`probabilities` maps each option to its probability."""

    type: Literal["choice"]
    choice: str
    probabilities: dict[str, float]
    confidence: Probability


class ScoreResult(TypedDict):
    """`legend` and `probabilities` map each level's number to the level and its probability."""

    type: Literal["score"]
    score: float
    legend: dict[str, Any]
    probabilities: dict[str, float]
    confidence: Probability


SystemOneResult = NoulResult | ChoiceResult | ScoreResult


class SystemOneUsage(TypedDict):
    """`input_tokens` counts the prompts of all questions. No tokens are generated."""

    input_tokens: Count
    output_tokens: Count


class SystemOneResponse(TypedDict):
    """The results by question, in the order of the questions; `id`, `object`, `created`, `diagnostics` as in vLLM."""

    id: str
    object: Literal["structured_decision"]
    created: Count
    model: str
    answers: dict[str, Any]
    usage: SystemOneUsage
    diagnostics: dict[str, Any]


class ErrorDetail(TypedDict):
    loc: list[str | int]
    msg: str
    type: str


class SystemOneInvalid(TypedDict):
    detail: list[ErrorDetail]


SystemOneError = SystemOneInvalid | OpenAiError

REQUEST_ID = "x-typesafe-request-id"


class SystemOneErrors(OpenAiErrors):
    """The error format of System One: FastAPI's for an invalid field, with status 422, and otherwise OpenAI's."""

    statuses = MappingProxyType({**OpenAiErrors.statuses, InvalidField: 422})

    def headers(self, error: ServingError) -> Headers:
        return ((REQUEST_ID, f"decision-{new_digits()}"),)

    def body(self, error: ServingError) -> Any:
        if not isinstance(error, InvalidField):
            return super().body(error)
        detail: ErrorDetail = {"loc": ["body", *error.keys], "msg": error.reason, "type": error.type}
        value: SystemOneInvalid = {"detail": [detail]}
        return value


SYSTEMONE_ERRORS = SystemOneErrors()


# -- OpenAI's decisions ------------------------------------------------------------------------------------------------


class PredicateDecision(TypedDict):
    type: Literal["predicate"]
    name: str | None
    probability: Probability


class ChoiceProbability(TypedDict):
    value: str | bool
    probability: Probability


class ChoiceDecision(TypedDict):
    type: Literal["choice"]
    name: str | None
    choice: str | bool
    confidence: Probability
    probabilities: list[ChoiceProbability]


class LevelProbability(TypedDict):
    value: Count
    label: str
    probability: Probability


class ScoreDecision(TypedDict):
    type: Literal["score"]
    name: str | None
    score: float
    confidence: Probability
    probabilities: list[LevelProbability]


OpenAiDecision = PredicateDecision | ChoiceDecision | ScoreDecision


class DecisionInputDetails(TypedDict):
    cached_tokens: Count
    cache_write_tokens: Count


class DecisionOutputDetails(TypedDict):
    reasoning_tokens: Count


class DecisionUsage(TypedDict):
    """`input_tokens` counts the prompts of all questions. No tokens are generated."""

    input_tokens: Count
    input_tokens_details: DecisionInputDetails
    output_tokens: Count
    output_tokens_details: DecisionOutputDetails
    total_tokens: Count


class OpenAiDecisions(TypedDict):
    """The results in the order of the questions. OpenAI's API does not have `diagnostics`."""

    model: str
    answers: list[OpenAiDecision]
    usage: DecisionUsage
    diagnostics: list[LabelDiagnostics]
