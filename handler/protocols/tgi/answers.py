"""The types of TGI's and MindIE's answers. Each field of the wire is declared here, for the API's document too."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

from handler.protocols.kernel.json_schema import Count, NotRequired
from handler.protocols.lmi.answers import FinishReason


class TgiPromptToken(TypedDict):
    id: int
    text: str
    logprob: float | None


class TgiToken(TgiPromptToken):
    special: bool


class _TgiDetails(TypedDict):
    finish_reason: FinishReason
    generated_tokens: Count
    seed: Count | None


class TgiSequence(_TgiDetails):
    """One of `best_of_sequences`."""

    prefill: list[TgiPromptToken]
    tokens: list[TgiToken]
    generated_text: str
    top_tokens: NotRequired[list[list[TgiToken]]]


class TgiDetails(_TgiDetails):
    """Details of an answer. A stream has `input_length` and no tokens; TGI_COMPAT has `inputs`, as LMI."""

    prefill: NotRequired[list[TgiPromptToken]]
    tokens: NotRequired[list[TgiToken]]
    top_tokens: NotRequired[list[list[TgiToken]]]
    best_of_sequences: NotRequired[list[TgiSequence]]
    input_length: NotRequired[Count]
    inputs: NotRequired[str]


class TgiAnswer(TypedDict):
    generated_text: str
    details: NotRequired[TgiDetails]
    outputs: NotRequired[dict[str, Any]]


TgiList = Annotated[list[TgiAnswer], ("minItems", 1), ("maxItems", 1)]


class TgiEvent(TypedDict):
    index: Annotated[int, ("minimum", 1)]
    token: TgiToken
    generated_text: str | None
    details: TgiDetails | None
    top_tokens: NotRequired[list[TgiToken]]
    outputs: NotRequired[dict[str, Any]]


class TgiError(TypedDict):
    """An error; TGI_COMPAT adds `code`."""

    error: str
    error_type: str
    code: NotRequired[Count]


# -- MindIE ------------------------------------------------------------------------------------------------------


class MindieToken(TypedDict):
    id: int
    logprob: None
    special: None
    text: str


class MindieDetails(_TgiDetails):
    prompt_tokens: Count
    prefill: NotRequired[list[MindieToken]]
    tokens: NotRequired[list[MindieToken]]


class MindieAnswer(TypedDict):
    generated_text: str
    details: NotRequired[MindieDetails]


class MindieEvent(TypedDict):
    token: MindieToken
    generated_text: str | None
    details: MindieDetails | None


class MindieError(TypedDict):
    error: str
