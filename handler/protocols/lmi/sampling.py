"""Whether a prompt of LMI's is sampled, and which of its parameters greedy decoding ignores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from handler.core.values import SAMPLED
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.parameters import ParsedParameters
from handler.protocols.kernel.validation import DEFAULTS

_INFERRED_SINCE = (0, 32)

_IDLE = {
    **{field: {DEFAULTS[field]} for field in SAMPLED},
    "temperature": {0},  # 1, the default, asks for sampling
    "top_k": {0, 1},
    "top_p": {0, 1},
}
"""Values by field that ask for nothing else than the most likely token, or for nothing at all."""

_IDLE_IF_SAID = {**_IDLE, "temperature": {0, 1}, "top_k": {0, 1, 50}}
"""The same beside `do_sample` false, where LMI's and transformers' defaults do not ask for sampling either."""

_NOTICE = (
    "requests have sampling parameters without do_sample, and so are decoded greedily, as in LMI before 0.32: "
    "option.lmi_version=0.32 or later samples where there is a temperature. The header x-lmi-ignored-parameters "
    "names them (documents: migrating/README)"
)


def inferred(parameters: Mapping[str, Any], context: ServerContext) -> Mapping[str, Any]:
    """Return the default of `do_sample` in the rolling batch: since 0.32 a temperature samples, nothing else does.

    It does not with TensorRT-LLM, as in LMI, nor with beams.
    """
    if context.config.lmi_version < _INFERRED_SINCE or context.engine == "trtllm":
        return {}
    if parameters.get("num_beams") not in (None, 1):
        return {}
    return {"do_sample": parameters.get("temperature") not in (None, 0)}


def ignored(parsed: ParsedParameters) -> list[str]:
    """List the client's names of the sampling parameters that have no effect, as decoding is greedy."""
    if parsed.sampling.do_sample:
        return []
    given, idle = parsed.names.items(), _IDLE_IF_SAID if "do_sample" in parsed.names else _IDLE
    return [name for field, name in given if field in SAMPLED and getattr(parsed.sampling, field) not in idle[field]]


def give_notice(names: Sequence[str], parameters: Mapping[str, Any], context: ServerContext) -> None:
    """Have the log say once that a later release of LMI would sample where parameters are ignored.

    Args:
        names: those that `ignored` lists.
        parameters: the client's, in the rolling batch.
    """
    if names and parameters.get("do_sample") is None and context.config.lmi_version < _INFERRED_SINCE:
        context.notices.once(_NOTICE)
