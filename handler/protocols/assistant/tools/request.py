"""Readers of OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from handler.core.errors import InvalidParameter
from handler.core.values import StructuredOutput
from handler.protocols.assistant.events import Parser
from handler.protocols.assistant.tools.formats import find, named
from handler.protocols.assistant.tools.formats.hf import HF
from handler.protocols.assistant.tools.formats.json_calls import SMOLLM2, List
from handler.protocols.assistant.tools.grammar import Notation, calls, calls_in_text
from handler.protocols.assistant.tools.parsing import Format, NamedCall
from handler.protocols.assistant.tools.prompt import takes_tools
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.readers.structured_output import json_schema, structural_tag
from handler.protocols.kernel.schema.shapes import FLAG, NULL, TEXT, Shape, listing, nullable, record
from handler.protocols.kernel.validation import Named

MAX_TOOLS = 128  # OpenAI's limit

AUTO, NONE = "auto", "none"
"""What the options of the parsers may be beside the name of one."""

_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_CHOICES = (
    "must be none, auto, required, a name in tools, or an object with 'type': 'function' and 'function' with a 'name' "
    "in tools, or with 'type': 'allowed_tools'"
)
_ALLOWED = "must be an object with 'mode', auto or required, and 'tools', a list that names some of tools"
_REFERENCE = re.compile(r'"\$ref": "(?!#/(?:\$defs|definitions)/)([^"]{0,64})')
"""A reference in a schema's JSON that means something else where its definitions move to another root."""

_NO_ARGUMENTS = {"type": "object", "properties": {}}


_FUNCTION: Mapping[str, Shape] = {
    "name": {**TEXT, "pattern": f"^{_NAME.pattern}$"},
    "description": nullable(TEXT),
    "parameters": {"type": ["object", "null"]},
    "strict": nullable(FLAG),
}
_TOOL: Mapping[str, Shape] = {
    "type": {"const": "function"},
    "function": {**record(_FUNCTION), "required": ["name"]},
}
FIELDS: Mapping[str, Shape] = {
    "tools": nullable(listing({**record(_TOOL), "required": ["function"]}, maxItems=MAX_TOOLS)),
    "tool_choice": {
        "anyOf": [TEXT, {"type": "object"}, NULL],
        "description": "none, auto, required, the name of a tool, or an object that names one or those allowed",
    },
    "parallel_tool_calls": nullable(FLAG),
}
"""What `read_tools` reads."""


class Tools(NamedTuple):
    """The tools of a request.

    Attributes:
        shown: the tools in the prompt, in OpenAI's form.
        choice: auto, required, or "" without tools to call; a named tool sets `name` too.
        single: at most one call.
        allowed: names of the tools that may be called, where the request allows these alone; None: any name is a call.
        format: the format in which the model writes calls; None where structured output makes the answer JSON.
        structured_output: makes the answer a call; with the choice auto, each call one of a tool.
        unknown: names that no table knows.
        unheeded: names that have no effect here.
    """

    shown: Sequence[Mapping[str, Any]] = ()
    choice: str = ""
    name: str = ""
    single: bool = False
    allowed: frozenset[str] | None = None
    format: Format | None = None
    structured_output: StructuredOutput | None = None
    unknown: Sequence[str] = ()
    unheeded: Sequence[str] = ()

    def parser(self) -> Parser | None:
        """Return a new parser for one answer; None where there are no calls to read."""
        if self.format is not None:
            return self.format.make(self.shown)
        if self.name:
            return NamedCall(self.name)
        return None if self.structured_output is None else List(self.shown)


def read_tools(body: Mapping[str, Any], context: ServerContext) -> Tools:
    """Read the three fields.

    Raises:
        InvalidParameter: naming which of the three is wrong.
    """
    if body.keys().isdisjoint(FIELDS):
        return Tools()
    tools, strict, unknown = _tools(Named("tools", body.get("tools")))
    choice = Named("tool_choice", body.get("tool_choice"))
    single = Named("parallel_tool_calls", body.get("parallel_tool_calls"))
    if single.value is not None and not isinstance(single.value, bool):
        raise single.refused("must be true or false")
    choice, tools, allowed = _allowed(choice, tools)
    wanted, name = _choice(choice, [tool["function"]["name"] for tool in tools])
    if not tools:
        if wanted not in ("", "auto", "none"):
            raise choice.refused("needs tools")
        return Tools()
    if wanted == "none":  # what is not shown is not called
        return Tools(unknown=unknown)
    result = Tools(tools, wanted or "auto", name, single.value is False, allowed, unknown=unknown)
    format = choose_format(context)
    notation = _notation(format, context)
    if result.choice == "auto":
        if format is None and context.config.tool_call_parser != NONE:
            raise InvalidParameter(
                "tools: the model's chat template shows calls of a form that is not known here; "
                "option.tool_call_parser may name one"
            )
        return _with_strict(result._replace(format=format), notation, strict)
    called = [tool for tool in tools if name in ("", tool["function"]["name"])]
    if notation is not None:
        rule = calls(notation, called, single=result.single or bool(name))
        return result._replace(format=format, structured_output=_rule(f"for {choice}", lambda: structural_tag(rule)))
    schema = _parameters(called[0]) if name else _calls(tools, choice, single=result.single)
    listed = _rule(f"for {choice}", lambda: json_schema(schema))
    if not name and (lost := _REFERENCE.search(listed.value)):
        raise choice.refused(f"a tool's $ref {lost[1]!r} must begin with '#/$defs/' or '#/definitions/'")
    return result._replace(structured_output=listed)


def _notation(format: Format | None, context: ServerContext) -> Notation | None:
    """Return how structured output writes the format's calls; None where the format or the engine has no way."""
    found = None if format is None else format.notation(context.chat_template)
    return found if found is not None and found.style in context.structural_tags else None


def _with_strict(tools: Tools, notation: Notation | None, strict: Collection[str]) -> Tools:
    """Rule the calls in an answer's text where a tool is `strict`, or report that nothing does."""
    if not strict:
        return tools
    if notation is None or not notation.mark:
        return tools._replace(unheeded=["tools[].function.strict"])
    rule = calls_in_text(notation, tools.shown, strict, single=tools.single)
    return tools._replace(structured_output=_rule("with strict", lambda: structural_tag(rule, allows_text=True)))


def choose_format(context: ServerContext) -> Format | None:
    """Return the format of calls, a plugin's first; by `auto` the chat template's, None where it shows none,
    or calls stay in the text.
    """
    given: Format | None = context.tool_format
    if given is not None:
        return given
    name = context.config.tool_call_parser
    if name == NONE:
        return None
    if name == AUTO and not takes_tools(context.chat_template):
        return SMOLLM2  # which our own words about the tools ask for
    if context.response_template is not None and context.response_template.calls is not None:
        return HF
    return find(context.chat_template) if name == AUTO else named(name)


def _allowed(
    choice: Named, tools: list[Mapping[str, Any]]
) -> tuple[Named, list[Mapping[str, Any]], frozenset[str] | None]:
    """Return the mode of OpenAI's allowed tools as the choice, these tools alone and their names; else all as it is.

    The model sees no other tool, but may know one from the messages, or make one up.
    """
    if not isinstance(choice.value, dict) or choice.value.get("type") != "allowed_tools":
        return choice, tools, None
    allowed = choice.value.get("allowed_tools")
    mode, listed = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, dict) else (None, None)
    names = {_function_name(tool) for tool in listed} if isinstance(listed, list) else set[str | None]()
    known = {tool["function"]["name"] for tool in tools}
    if mode not in ("auto", "required") or not names or not known.issuperset(names):
        raise Named("tool_choice.allowed_tools", allowed).refused(_ALLOWED)
    shown = [tool for tool in tools if tool["function"]["name"] in names]
    return Named(choice.name, mode), shown, frozenset(tool["function"]["name"] for tool in shown)


def _function_name(value: Any) -> str | None:
    """Return the name that an object in OpenAI's form gives; None where it names no function."""
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _choice(choice: Named, names: Sequence[str]) -> tuple[str, str]:
    """Read the choice, and the one tool that it names."""
    value = choice.value
    if value is None:
        return "", ""
    if isinstance(value, str):
        if value in ("none", "auto", "required"):
            return value, ""
        if value not in names:
            raise choice.refused(_CHOICES)
        return "named", value  # as TGI and its client have it
    name = _function_name(value)
    if name is None or name not in names:
        raise choice.refused(_CHOICES)
    return "named", name


def _tools(tools: Named) -> tuple[list[Mapping[str, Any]], set[str], list[str]]:
    """Read the tools, the names of those that are strict, and unknown names."""
    if tools.value is None:
        return [], set(), []
    if not isinstance(tools.value, list) or len(tools.value) > MAX_TOOLS:
        raise tools.refused(f"must be a list of at most {MAX_TOOLS} tools")
    unknown = dict[str, None]()
    result = [_tool(tool, f"tools[{index}]", unknown) for index, tool in enumerate(tools.value)]
    names = [tool["function"]["name"] for tool in result]
    if len(set(names)) < len(names):
        raise InvalidParameter("tools: two have the same name")
    strict = {name for name, tool in zip(names, tools.value, strict=True) if tool["function"].get("strict") is True}
    return result, strict, list(unknown)


def _tool(tool: Any, at: str, unknown: dict[str, None]) -> Mapping[str, Any]:
    """Read a tool in OpenAI's form; keep what the model sees."""
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type", "function") == "function" else None
    if not isinstance(function, dict):
        raise InvalidParameter(f"{at}: must be an object with 'type': 'function' and 'function'")
    name, about, parameters = function.get("name"), function.get("description"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidParameter(f"{at}.function.name: must be 1 to 64 letters, digits, '_', '-' or '.'")
    if about is not None and not isinstance(about, str):
        raise InvalidParameter(f"{at}.function.description: must be a string")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidParameter(f"{at}.function.parameters: must be a JSON schema, which is an object")
    if not isinstance(function.get("strict"), bool | None):
        raise InvalidParameter(f"{at}.function.strict: must be true or false")
    unknown |= {f"tools[].{key}": None for key in tool if key not in _TOOL}
    unknown |= {f"tools[].function.{key}": None for key in function if key not in _FUNCTION}
    description = {} if about is None else {"description": about}
    return {"type": "function", "function": {"name": name, **description, "parameters": parameters or _NO_ARGUMENTS}}


def _parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    return dict(tool["function"]["parameters"])


def _calls(tools: Sequence[Mapping[str, Any]], choice: Named, *, single: bool) -> dict[str, Any]:
    """Build the schema of a list of calls. Definitions move to its root, where references look for them."""
    definitions: dict[str, dict[str, Any]] = {}
    items = []
    for tool in tools:
        parameters = _parameters(tool)
        for place in ("$defs", "definitions"):
            schemas = parameters.pop(place, {})
            if not isinstance(schemas, dict):
                raise choice.refused(f"a tool's {place} must be an object")
            for name, schema in schemas.items():
                if definitions.setdefault(place, {}).setdefault(name, schema) != schema:
                    raise choice.refused(f"two of the tools define {name[:64]!r} differently")
        properties = {"name": {"const": tool["function"]["name"]}, "arguments": parameters}
        items.append(
            {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        )
    calls = items[0] if len(items) == 1 else {"anyOf": items}
    return {**definitions, "type": "array", "minItems": 1, **({"maxItems": 1} if single else {}), "items": calls}


def _rule(purpose: str, make: Callable[[], StructuredOutput]) -> StructuredOutput:
    try:
        return make()
    except ValueError as error:
        raise InvalidParameter(f"tools: {purpose} their schemas {error}") from None
