"""TGI_COMPAT: LMI's requests, answered in TGI's format, which the strict client text_generation 0.7 parses."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from handler.core.errors import ServingError
from handler.core.framing import SSE, Framing, dumps
from handler.core.values import Request
from handler.protocols.kernel.reply import SequenceOutput
from handler.protocols.lmi.errors import LmiErrors
from handler.protocols.lmi.reply import StreamEnd, WholeOutput
from handler.protocols.lmi.request import Lmi
from handler.protocols.tensors.outputs import TensorValues
from handler.protocols.tgi.answers import (
    TgiAnswer,
    TgiCompatDetails,
    TgiCompatStreamDetails,
    TgiInputs,
    TgiOthers,
    TgiSequence,
    TgiTops,
)
from handler.protocols.tgi.errors import TgiError
from handler.protocols.tgi.response import TgiFormat, seed_of


class TgiCompatErrors(LmiErrors):
    def framed(self, framing: Framing) -> TgiCompatErrors:
        """Under an error's status TGI's clients read nothing but a JSON object, for streams too."""
        return self

    def body(self, error: ServingError) -> Any:
        value: TgiError = {"error": error.message, "error_type": error.kind, "code": self.status(error)}
        return value

    tail = body


_MAX_INPUTS = 1 << 16
"""Bytes of JSON: aiohttp, with which TGI's asynchronous clients read, refuses lines above 128 KiB in older versions."""


class TgiCompatFormat(TgiFormat):
    """One array, or server-sent events. Stop strings stay in the text, as in TGI."""

    special_in_text = True

    def document(self, text: str, output: WholeOutput | None, outputs: TensorValues | None = None) -> list[TgiAnswer]:
        answer: TgiAnswer = {"generated_text": text}
        if output is not None:
            answer["details"] = self._details(output)
        if outputs is not None:
            answer["outputs"] = outputs
        return [answer]

    def _stream_details(self, end: StreamEnd) -> TgiCompatStreamDetails:
        """Return LMI's details. A prompt is left out whose line some of TGI's clients would not read."""
        tops: TgiTops = {"top_tokens": [self.tokens(top) for top in end.tops]} if end.tops else {}
        prompt = end.request.prompt
        inputs: TgiInputs = {"inputs": prompt} if len(dumps(prompt)) <= _MAX_INPUTS else {}
        return {**super()._stream_details(end), **inputs, **tops}

    def _details(self, output: WholeOutput) -> TgiCompatDetails:
        request, best, others, _ = output
        more: TgiOthers = {"best_of_sequences": [self._other(request, other) for other in others]} if others else {}
        return {
            "seed": seed_of(request, best.index),
            "prefill": self.prefill(best.prefill) if request.sampling.prompt_logprobs else [],
            "finish_reason": best.finish.value,
            "generated_tokens": len(best.tokens),
            "inputs": request.prompt,
            "tokens": self.tokens(best.tokens),
            **self._tops(request, best),
            **more,
        }

    def _other(self, request: Request, other: SequenceOutput) -> TgiSequence:
        return {
            "seed": seed_of(request, other.index),
            "prefill": [],
            "finish_reason": other.finish.value,
            "generated_tokens": len(other.tokens),
            "tokens": self.tokens(other.tokens),
            **self._tops(request, other),
            "generated_text": other.text,
        }


class TgiCompat(Lmi):
    """LMI's flow. Details are on by default, as in LMI's own compatibility mode."""

    name = "tgi_compat"
    errors = TgiCompatErrors()
    format = TgiCompatFormat()
    stream_framing = SSE
    defaults: Mapping[str, Any] = MappingProxyType({"include_stop": True})
    details_default = True
