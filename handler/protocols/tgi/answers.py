"""The types of TGI's and MindIE's answers. Each field of the wire is declared here, for the API's document too."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

from handler.protocols.base import Count
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


class _TgiSequence(_TgiDetails):
    prefill: list[TgiPromptToken]
    tokens: list[TgiToken]
    generated_text: str


class TgiSequence(_TgiSequence, total=False):
    """One of `best_of_sequences`."""

    top_tokens: list[list[TgiToken]]


class TgiDetails(_TgiDetails, total=False):
    """A stream has `input_length` in the place of the tokens; TGI_COMPAT has `inputs`, as LMI."""

    prefill: list[TgiPromptToken]
    tokens: list[TgiToken]
    top_tokens: list[list[TgiToken]]
    best_of_sequences: list[TgiSequence]
    input_length: Count
    inputs: str


class _TgiAnswer(TypedDict):
    generated_text: str


class TgiAnswer(_TgiAnswer, total=False):
    details: TgiDetails
    outputs: dict[str, Any]


TgiList = Annotated[list[TgiAnswer], ("minItems", 1), ("maxItems", 1)]


class _TgiEvent(TypedDict):
    index: Annotated[int, ("minimum", 1)]
    token: TgiToken
    generated_text: str | None
    details: TgiDetails | None


class TgiEvent(_TgiEvent, total=False):
    top_tokens: list[TgiToken]
    outputs: dict[str, Any]


class _TgiError(TypedDict):
    error: str
    error_type: str


class TgiError(_TgiError, total=False):
    """TGI_COMPAT has `code` too."""

    code: Count


# -- MindIE ------------------------------------------------------------------------------------------------------


class MindieToken(TypedDict):
    id: int
    logprob: None
    special: None
    text: str


class _MindieDetails(_TgiDetails):
    prompt_tokens: Count


class MindieDetails(_MindieDetails, total=False):
    prefill: list[MindieToken]
    tokens: list[MindieToken]


class _MindieAnswer(TypedDict):
    generated_text: str


class MindieAnswer(_MindieAnswer, total=False):
    details: MindieDetails


class MindieEvent(TypedDict):
    token: MindieToken
    generated_text: str | None
    details: MindieDetails | None


class MindieError(TypedDict):
    error: str
