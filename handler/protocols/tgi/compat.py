"""TGI_COMPAT: LMI's requests, answered in TGI's format, which the strict client text_generation 0.7 parses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from handler.core.errors import ServingError
from handler.core.framing import SSE, Framing
from handler.core.values import Request
from handler.protocols.kernel.reply import SequenceOutput
from handler.protocols.lmi.errors import LmiErrors
from handler.protocols.lmi.request import Lmi
from handler.protocols.tgi.response import TgiFormat, seed_of


class TgiCompatErrors(LmiErrors):
    def framed(self, framing: Framing) -> TgiCompatErrors:
        """Under an error's status TGI's clients read nothing but a JSON object, for streams too."""
        return self

    def body(self, error: ServingError) -> Any:
        return {"error": error.message, "error_type": error.kind, "code": self.status(error)}

    tail = body


class TgiCompat(TgiFormat, Lmi):
    """One array, or server-sent events.

    Details are on by default, as in LMI's own compatibility mode. Stop strings stay in the text, as in TGI.
    """

    name = "tgi_compat"
    errors = TgiCompatErrors()
    stream_framing = SSE
    defaults: Mapping[str, Any] = MappingProxyType({"include_stop": True})
    details_default = True

    def details(
        self, request: Request, best: SequenceOutput, others: Sequence[SequenceOutput], num_prompt_tokens: int
    ) -> dict[str, Any]:
        value = super().details(request, best, others, num_prompt_tokens)
        return {"seed": seed_of(request, best.index), "prefill": [], **value}

    def other(self, request: Request, other: SequenceOutput) -> dict[str, Any]:
        return {"seed": seed_of(request, other.index), "prefill": [], **super().other(request, other)}

    def document(self, text: str, details: dict[str, Any] | None, outputs: dict[str, Any] | None = None) -> Any:
        return [super().document(text, details, outputs)]
