"""LMI's rolling-batch requests (docs.djl.ai, "LMI handlers Inference API Schema"); its fields: docs/wire/lmi.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from handler.core.errors import InvalidParameter, InvalidPayload, ServingError
from handler.core.framing import FRAMINGS, JSON, JSONLINES, Framing
from handler.core.values import LMI_NAMES, Adapter, FieldNames, Request, Sampling, keep_last
from handler.protocols.kernel.base import Dialect, ParsedRequest, Reply
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.parameters import ParsedParameters, read_all
from handler.protocols.kernel.readers.adapters import merge_adapters, read_adapters
from handler.protocols.kernel.validation import show
from handler.protocols.lmi.body import (
    read_field,
    read_object,
    read_parameters_field,
    relaxed,
    unknown_names,
    wants_stream,
    without_beaten,
)
from handler.protocols.lmi.errors import LmiErrors
from handler.protocols.lmi.reply import DocumentReply, ResponseFormat, StreamReply
from handler.protocols.lmi.response import LmiFormat
from handler.protocols.lmi.sampling import give_notice, ignored, inferred
from handler.protocols.openai.completions_response import completion_of
from handler.protocols.openai.response import Head, identity
from handler.protocols.tensors.inputs import TABLE
from handler.protocols.tensors.outputs import OutputTensors, select_tensors

NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})


_NO_LISTS_SINCE = (0, 30)
"""Until then LMI reads a list of one prompt as that prompt, and mixes up clients by a longer one."""


_BEATEN = {"stop": "stop_sequences", "logprobs": "top_n_tokens"}
_BEATEN_OF_TRTLLM = {"stop_sequences": "stop"}
"""Names of one parameter, each with that which it loses to in LMI (djl_python/rolling_batch)."""


class ParsedPrompt(NamedTuple):
    """One prompt with its parameters.

    Attributes:
        streaming: GptManager's; None when absent.
        ignored: names of sampling parameters that have no effect, as decoding is greedy.
        beaten: names of parameters that another of theirs replaces.
    """

    request: Request
    outputs: OutputTensors | None
    streaming: bool | None
    ignored: list[str]
    beaten: list[str]


class Lmi(Dialect):
    """The dialect of LMI's rolling batch: one object, or a line a token with the details in the last one.

    Subclasses have another format (`tgi/compat.py`), not another flow.
    """

    name = "lmi"
    errors = LmiErrors()
    format: ResponseFormat = LmiFormat()
    stream_framing = JSONLINES
    defaults: Mapping[str, Any] = {}  # Sampling fields
    details_default = False

    def parse(self, body: Any, context: ServerContext) -> ParsedRequest:
        body = read_object(body)
        parameters = read_parameters_field(body)
        prompt = body.get("inputs")
        if context.config.lmi_version < _NO_LISTS_SINCE and _is_one_text(prompt):
            (prompt,) = prompt
        if isinstance(prompt, list):
            raise InvalidPayload(
                "'inputs' must be one string under rolling batch; send one request a prompt, "
                "or use dynamic batching (option.rolling_batch=disable)"
            )
        if prompt is not None and (not isinstance(prompt, str) or not prompt):
            raise InvalidPayload("'inputs' must be a non-empty string")
        (adapter,) = read_adapters(body, 1, context)
        request, outputs, streaming, greedy, beaten = self.parse_prompt(
            prompt, parameters, context, adapter, defaults=inferred(parameters, context)
        )
        stream = wants_stream(body, streaming)
        framing = self._framing(parameters, context, stream)
        give_notice(greedy, parameters, context)
        names = [*unknown_names(body, parameters, context), *beaten, *greedy]
        streams, errors = framing is not JSON, self.errors.framed(framing)
        if streams and request.sampling.num_sequences > 1:
            raise InvalidParameter(
                "parameters.n, best_of and num_beams must be 1 when streaming: only whole answers hold more; "
                "a body with 'prompt' in the place of 'inputs' streams n choices side by side"
            )

        reply: Reply
        if streams:
            reply = StreamReply(self.format, request, framing, errors, outputs)
        else:
            reply = DocumentReply(self.format, request, outputs)

        def as_openai() -> Reply:
            name = context.model_names[0] if request.adapter is None else request.adapter.name
            return completion_of(request, Head(*identity("cmpl"), name, context.fingerprint), streams=streams)

        if parameters.get("output_formatter") is not None:  # the client's own choice
            return ParsedRequest((request,), reply, errors, names, streams)
        return ParsedRequest((request,), reply, errors, names, streams, of_tokens=True, as_openai=as_openai)

    def _framing(self, parameters: Mapping[str, Any], context: ServerContext, stream: bool | None) -> Framing:
        named: Framing | None = read_field(parameters, "output_formatter")
        if parameters.get("output_formatter") is None:
            named = FRAMINGS.get(context.config.output_formatter or "")
        return named or (self.stream_framing if stream else JSON)

    def errors_of(self, body: Any, context: ServerContext) -> LmiErrors:
        body = relaxed(body) if isinstance(body, dict) else {}
        content = body.get("parameters")
        parameters = content if isinstance(content, dict) else {}

        def stream() -> bool:
            given = parameters.get("streaming")
            return wants_stream(body, None if given is None else TABLE.parameters["streaming"].read(given))

        streams = _readable(stream)
        framing = _readable(lambda: self._framing(parameters, context, streams))
        return self.errors.framed(framing or self._framing({}, context, streams))

    def parse_prompt(
        self,
        prompt: str | None,
        parameters: Mapping[str, Any],
        context: ServerContext,
        adapter: Adapter | None = None,
        *,
        defaults: Mapping[str, Any] = NO_DEFAULTS,
    ) -> ParsedPrompt:
        """Read one prompt with its `parameters`.

        Args:
            prompt: None where the parameter `input_ids` replaces it.
            adapter: the adapter that the body names beside the parameters.
            defaults: Sampling fields by which this mode differs.

        Raises:
            InvalidParameter, InvalidPayload: naming what is wrong.
        """
        parameters, beaten = without_beaten(parameters, _BEATEN_OF_TRTLLM if context.engine == "trtllm" else _BEATEN)
        flags = {name: read_field(parameters, name) for name in ("details", "return_full_text", "truncate")}
        engines = context.sampling_defaults if parameters.get("do_sample") else {}
        parsed = read_all(parameters, context, defaults={**engines, **self.defaults, **defaults}, table=TABLE)
        others = parsed.others
        sampling = parsed.sampling.with_seed()
        sampling, end_id = _use_end_id(sampling, others.get("end_id"), parameters)
        details = self.details_default if flags["details"] is None else flags["details"]
        ids = others.get("prompt_ids")
        request = Request(
            prompt=_prompt(prompt, ids, context),
            sampling=sampling,
            truncation=keep_last(flags["truncate"]),
            # Several sequences, alternatives, prompt tokens stand in the details: asking for them asks for those.
            details=details or sampling.num_sequences > 1 or sampling.prompt_logprobs or sampling.top_logprobs > 0,
            full_text=bool(flags["return_full_text"]),
            prompt_ids=ids,
            adapter=merge_adapters(adapter, others.get("adapter"), parsed.names.get("adapter", "")),
            priority=others.get("priority", 0),
            eos_token_id=end_id,
            names=_names(parsed),
        )
        return ParsedPrompt(request, _select_tensors(parsed), others.get("stream"), ignored(parsed), beaten)


T = TypeVar("T")


def _readable(read: Callable[[], T]) -> T | None:
    """Return what `read` returns, or None where it refuses the request."""
    try:
        return read()
    except (ServingError, ValueError):
        return None


def _is_one_text(prompt: Any) -> bool:
    return isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str)


def _prompt(prompt: str | None, ids: Sequence[int] | None, context: ServerContext) -> str:
    """Return the prompt's text. Ids become the text of their tokens, special tokens included."""
    if ids is None:
        assert prompt is not None, "a body without either is refused by read_object()"
        return prompt
    if prompt is not None:
        raise InvalidParameter(f"parameters.input_ids={show(ids)}: contradicts 'inputs'; send one of them")
    assert context.vocabulary is not None, "ids are refused without one"
    return context.vocabulary.decode(ids)


def _use_end_id(sampling: Sampling, end_id: int | None, parameters: Mapping[str, Any]) -> tuple[Sampling, int | None]:
    """Make `end_id` a stop token in the place of the model's own end token.

    Returns the id too: an end by it is shown as EOS, unless the client lists it among its stop tokens.
    """
    if end_id is None or end_id in sampling.stop_token_ids:
        return sampling, None
    if parameters.get("ignore_eos_token"):
        raise InvalidParameter(f"parameters.end_id={end_id}: contradicts parameters.ignore_eos_token=true")
    return sampling._replace(stop_token_ids=(*sampling.stop_token_ids, end_id)), end_id


def _select_tensors(parameters: ParsedParameters) -> OutputTensors | None:
    """Select the output tensors."""
    sampling, others = parameters.sampling, parameters.others
    tensor_names = others.get("outputs", ())
    flags = {
        "return_log_probs": others.get("return_log_probs"),
        "return_context_logits": sampling.return_context_logits,
        "return_generation_logits": sampling.return_generation_logits,
    }
    if flags["return_log_probs"] is False and not {"output_log_probs", "cum_log_probs"}.isdisjoint(tensor_names):
        raise InvalidParameter(
            f"parameters.outputs={show(tensor_names)}: contradicts parameters.return_log_probs=false"
        )
    return select_tensors(tensor_names, flags, others.get("pad_id", others.get("end_id", -1)))


def _names(parameters: ParsedParameters) -> FieldNames:
    """Return the client's names of the fields that later checks refuse."""
    names, default = parameters.names, LMI_NAMES
    return FieldNames(
        prompt=names.get("prompt_ids", default.prompt),
        max_new_tokens=names.get("max_new_tokens", default.max_new_tokens),
        stop_token_ids=names.get("stop_token_ids", names.get("end_id", default.stop_token_ids)),
        bad_token_ids=names.get("bad_token_ids", default.bad_token_ids),
        logit_bias=names.get("logit_bias", default.logit_bias),
        logits=names.get("return_generation_logits", names.get("return_context_logits", default.logits)),
        structured_output=names.get("structured_output", default.structured_output),
    )
