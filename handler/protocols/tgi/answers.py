"""The types of TGI's and MindIE's answers. Each field of the wire is declared here, for the API's document too."""

from __future__ import annotations

from typing import Annotated, TypedDict

from handler.protocols.kernel.schema.types import Count, NotRequired
from handler.protocols.lmi.answers import FinishReason
from handler.protocols.tensors.outputs import TensorValues


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


class TgiOutput(_TgiDetails):
    """One sequence's."""

    prefill: list[TgiPromptToken]
    tokens: list[TgiToken]


class TgiTops(TypedDict, total=False):
    """The alternatives to each token, on request."""

    top_tokens: list[list[TgiToken]]


class TgiSequence(TgiOutput, TgiTops):
    """One of `best_of_sequences`."""

    generated_text: str


class TgiOthers(TypedDict, total=False):
    best_of_sequences: list[TgiSequence]


class TgiDetails(TgiOutput, TgiTops, TgiOthers):
    """Details of a whole answer."""


class TgiCompatDetails(TgiDetails):
    """TGI_COMPAT has `inputs`, as LMI."""

    inputs: str


class TgiStreamDetails(_TgiDetails):
    input_length: Count
    prefill: NotRequired[list[TgiPromptToken]]


class TgiInputs(TypedDict, total=False):
    """A prompt of at most 64 KiB."""

    inputs: str


class TgiCompatStreamDetails(TgiStreamDetails, TgiTops, TgiInputs):
    """TGI_COMPAT has LMI's names too."""


class TgiAnswer(TypedDict):
    generated_text: str
    details: NotRequired[TgiDetails | TgiCompatDetails]
    outputs: NotRequired[TensorValues]


TgiList = Annotated[list[TgiAnswer], ("minItems", 1), ("maxItems", 1)]


class TgiBeside(TypedDict, total=False):
    """What an event has beside its token, on request."""

    top_tokens: list[TgiToken]
    outputs: TensorValues


class TgiEvent(TgiBeside):
    index: Annotated[int, ("minimum", 1)]
    token: TgiToken
    generated_text: str | None
    details: TgiStreamDetails | TgiCompatStreamDetails | None


# -- other routes ------------------------------------------------------------------------------------------------


class TgiInfo(TypedDict):
    model_id: str
    model_sha: str | None
    model_pipeline_tag: str
    max_concurrent_requests: Count
    max_best_of: Count
    max_stop_sequences: Count
    max_input_tokens: Count | None
    max_total_tokens: Count | None
    validation_workers: Count
    max_client_batch_size: Count
    router: str
    version: str
    sha: str | None
    docker_label: str | None
    default_sampling_params: dict[str, float]


class TgiPiece(TypedDict):
    """A token, with its place in the text's bytes."""

    id: Count
    text: str
    start: Count
    stop: Count


class TgiChatPieces(TypedDict):
    tokenize_response: list[TgiPiece]
    templated_text: str


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
