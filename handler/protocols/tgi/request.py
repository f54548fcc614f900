"""TGI's request: JSON types as its library serde reports them, then ranges in its order.

Source: text-generation-inference 3, router/src/lib.rs and validation.rs. MindIE's `mindie.py` uses the same pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.readers.body import report_unknown
from handler.protocols.kernel.readers.structured_output import tgi_grammar
from handler.protocols.kernel.validation import show
from handler.protocols.tgi.errors import OutOfRange, WrongType

MAX_BEST_OF, MAX_STOPS, MAX_TOP_TOKENS = 2, 4, 5
"""The defaults of TGI's launcher."""


class Kind(NamedTuple):
    """A JSON type.

    Attributes:
        name: serde's name for it.
        schema: its JSON Schema, with the range of a parameter.
        null: null means absent.
        integral: report an integer that does not fit as a wrong value, not as a wrong type.
        items: the type of a list's items.
    """

    name: str
    fits: Callable[[Any], bool]
    schema: Mapping[str, Any]
    null: bool = True
    integral: bool = False
    items: Kind | None = None

    def within(self, **range: Any) -> Kind:
        """Add the range of a parameter to the schema."""
        return self._replace(schema={**self.schema, **range})


def _integer(name: str, least: int, most: int) -> Kind:
    schema = {"type": "integer", "minimum": least, "maximum": most}
    return Kind(name, lambda value: type(value) is int and least <= value <= most, schema, integral=True)


_F32 = Kind("f32", lambda value: type(value) in (int, float), {"type": "number"})
_BOOL = Kind("a boolean", lambda value: isinstance(value, bool), {"type": "boolean"}, null=False)
_STRING = Kind("a string", lambda value: isinstance(value, str), {"type": "string"})
_USIZE, _U64 = (_integer(name, 0, (1 << 64) - 1) for name in ("usize", "u64"))
_U32, _I32 = _integer("u32", 0, (1 << 32) - 1), _integer("i32", -(1 << 31), (1 << 31) - 1)
_STRINGS = Kind(
    "a sequence",
    lambda value: isinstance(value, list),
    {"type": "array", "items": _STRING.schema},
    null=False,
    items=_STRING,
)
_OBJECT = Kind("an object", lambda value: isinstance(value, dict), {"type": "object"}, null=False)
_POSITIVE, _OPEN = {"exclusiveMinimum": 0}, {"exclusiveMinimum": 0, "exclusiveMaximum": 1}

PARAMETERS: Mapping[str, Kind] = {
    "best_of": _USIZE.within(maximum=MAX_BEST_OF),
    "temperature": _F32.within(**_POSITIVE),
    "repetition_penalty": _F32.within(**_POSITIVE),
    "frequency_penalty": _F32.within(minimum=-2, maximum=2),
    "top_k": _I32.within(**_POSITIVE),
    "top_p": _F32.within(**_OPEN),
    "typical_p": _F32.within(**_OPEN),
    "do_sample": _BOOL,
    "max_new_tokens": _U32.within(minimum=1),
    "return_full_text": _BOOL._replace(null=True),
    "stop": _STRINGS.within(maxItems=MAX_STOPS),
    "truncate": _USIZE.within(minimum=1),
    "watermark": _BOOL,
    "details": _BOOL,
    "decoder_input_details": _BOOL,
    "seed": _U64,
    "top_n_tokens": _U32.within(maximum=MAX_TOP_TOKENS),
    "grammar": _OBJECT._replace(null=True),
    "adapter_id": _STRING,
}

TOP_LEVEL: Mapping[str, Kind] = {"inputs": _STRING._replace(null=False), "parameters": _OBJECT, "stream": _BOOL}


class Body(NamedTuple):
    """A body of the right types, without nulls.

    Attributes:
        has_parameters: TGI samples by default where `parameters` is absent.
    """

    inputs: str
    parameters: Mapping[str, Any]
    has_parameters: bool
    stream: bool


def read_body(
    body: Any, top_level: Mapping[str, Kind] = TOP_LEVEL, parameters: Mapping[str, Kind] = PARAMETERS
) -> Body:
    """Read the body's fields.

    Raises:
        WrongType: naming the first field of a wrong type, or the missing `inputs`.
    """
    _check("the body", body, _OBJECT)
    fields = _read_fields(body, top_level, "")
    if "inputs" not in fields:
        raise WrongType("missing field `inputs`")
    given = fields.get("parameters")
    typed = {} if given is None else _read_fields(given, parameters, "parameters.")
    return Body(fields["inputs"], typed, given is not None, bool(fields.get("stream")))


def _read_fields(given: Mapping[str, Any], kinds: Mapping[str, Kind], prefix: str) -> dict[str, Any]:
    fields = {}
    for name, value in given.items():
        kind = kinds.get(name)
        if kind is None or (value is None and kind.null):
            continue
        _check(f"{prefix}{name}", value, kind)
        fields[name] = value
    return fields


def _check(where: str, value: Any, kind: Kind) -> None:
    if not kind.fits(value):
        raise WrongType(f"{where}: {_describe(value, kind)}, expected {kind.name}")
    if kind.items is not None:
        for index, item in enumerate(value):
            _check(f"{where}[{index}]", item, kind.items)


def _describe(value: Any, kind: Kind) -> str:
    """Describe an unexpected value as serde does."""
    match value:
        case None:
            return "invalid type: null"
        case bool():
            return f"invalid type: boolean `{show(value)}`"
        case int():
            return f"invalid {'value' if kind.integral else 'type'}: integer `{show(value)}`"
        case float():
            return f"invalid type: floating point `{show(value)}`"
        case str():
            return f"invalid type: string {show(value)}"
        case list():
            return "invalid type: sequence"
    return "invalid type: map"


def unknown(body: Mapping[str, Any], context: ServerContext, parameters: Mapping[str, Kind] = PARAMETERS) -> list[str]:
    """List the names that no table knows."""
    names = [name for name in body if name not in TOP_LEVEL]
    names += [f"parameters.{name}" for name in body.get("parameters") or {} if name not in parameters]
    return report_unknown(names, body, context)


# -- limits ------------------------------------------------------------------------------------------------------


def require(right: bool, otherwise: str) -> None:
    if not right:
        raise OutOfRange(otherwise)


def check_limits(body: Body, context: ServerContext, *, stream: bool) -> None:
    """Check TGI's ranges in its order.

    Raises:
        OutOfRange: in TGI's words.
    """
    given = body.parameters
    best_of, do_sample = given.get("best_of", 1), given.get("do_sample", not body.has_parameters)
    if stream:
        require(best_of == 1, "`best_of` != 1 is not supported when streaming tokens")
        no_prefill = not given.get("decoder_input_details")
        require(no_prefill, "`decoder_input_details` == true is not supported when streaming tokens")
    require(best_of <= MAX_BEST_OF, f"`best_of` must be > 0 and <= {MAX_BEST_OF}. Given: {best_of}")
    sampled = do_sample or not given.keys().isdisjoint(("temperature", "top_k", "top_p", "typical_p"))
    require(best_of <= 1 or sampled, "you must use sampling when `best_of` is > 1")
    check_sampling(given)
    require(given.get("max_new_tokens") != 0, "`max_new_tokens` must be strictly positive")
    num_stops = len(given.get("stop", ()))
    require(num_stops <= MAX_STOPS, f"`stop` supports up to {MAX_STOPS} stop sequences. Given: {num_stops}")
    require(best_of <= 1 or "seed" not in given, "`seed` must not be set when `best_of` > 1")
    top = given.get("top_n_tokens", 0)
    require(top <= MAX_TOP_TOKENS, f"`top_n_tokens` must be >= 0 and <= {MAX_TOP_TOKENS}. Given: {top}")
    require(body.inputs != "", "`inputs` cannot be empty")
    check_truncate(given, context)
    if "grammar" in given:
        try:
            tgi_grammar(given["grammar"])
        except ValueError as error:
            raise OutOfRange(f"grammar is not valid: it {error}") from None


def check_sampling(given: Mapping[str, Any]) -> None:
    """Check the ranges that TGI and MindIE share, in TGI's order."""
    for name in ("temperature", "repetition_penalty", "frequency_penalty", "top_p", "typical_p", "top_k"):
        match PARAMETERS[name].schema:
            case {"exclusiveMinimum": least, "exclusiveMaximum": most}:
                require(least < given.get(name, 0.5) < most, f"`{name}` must be > {least:.1f} and < {most:.1f}")
            case {"exclusiveMinimum": least}:
                require(given.get(name, 1) > least, f"`{name}` must be strictly positive")
            case {"minimum": least, "maximum": most}:
                require(least <= given.get(name, 0) <= most, f"`{name}` must be >= {least:.1f} and <= {most:.1f}")


def check_truncate(given: Mapping[str, Any], context: ServerContext) -> None:
    """Check that the prompt leaves room for one token."""
    truncate, total = given.get("truncate", 1), context.most_tokens()
    most = (1 << 32) if total is None else total - 1
    text = "`truncate` must be strictly positive and less than"
    require(0 < truncate <= most, f"{text} {most}. Given: {truncate}")
