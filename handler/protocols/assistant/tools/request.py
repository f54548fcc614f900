"""Readers of OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from handler.core.errors import InvalidParameter
from handler.core.values import StructuredOutput
from handler.protocols.assistant.events import Parser
from handler.protocols.assistant.tools.formats import FORMATS, find
from handler.protocols.assistant.tools.formats.json_calls import SMOLLM2, List
from handler.protocols.assistant.tools.parsing import Format, NamedCall
from handler.protocols.assistant.tools.prompt import takes_tools
from handler.protocols.base import ServerContext
from handler.protocols.readers.structured_output import json_schema
from handler.protocols.validation import Named

MAX_TOOLS = 128  # OpenAI's limit

_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_CHOICES = (
    "must be none, auto, required, a name in tools, or an object with 'type': 'function' and 'function' with a 'name' "
    "in tools"
)
_NO_ARGUMENTS = {"type": "object", "properties": {}}


class Tools(NamedTuple):
    """The tools of a request.

    Attributes:
        shown: the tools in the prompt, in OpenAI's form.
        choice: auto, required, or "" without tools to call; a named tool sets `name` too.
        single: at most one call.
        format: the format in which the model writes calls by itself.
        structured_output: makes the answer a call.
        unknown: names that no table knows.
    """

    shown: Sequence[Mapping[str, Any]] = ()
    choice: str = ""
    name: str = ""
    single: bool = False
    format: Format | None = None
    structured_output: StructuredOutput | None = None
    unknown: Sequence[str] = ()

    def parser(self) -> Parser | None:
        """Return a new parser for one answer; None where there are no calls to read."""
        if self.name:
            return NamedCall(self.name)
        if self.structured_output is not None:
            return List(self.shown)
        return None if self.format is None else self.format.make(self.shown)


def read_tools(body: Mapping[str, Any], context: ServerContext) -> Tools:
    """Read the three fields.

    Raises:
        InvalidParameter: naming which of the three is wrong.
    """
    tools, unknown = _tools(Named("tools", body.get("tools")))
    choice = Named("tool_choice", body.get("tool_choice"))
    single = Named("parallel_tool_calls", body.get("parallel_tool_calls"))
    if single.value is not None and not isinstance(single.value, bool):
        raise single.refused("must be true or false")
    wanted, name = _choice(choice, [tool["function"]["name"] for tool in tools])
    if not tools:
        if wanted not in ("", "auto", "none"):
            raise choice.refused("needs tools")
        return Tools()
    if wanted == "none":  # what is not shown is not called
        return Tools(unknown=unknown)
    result = Tools(tools, wanted or "auto", name, single.value is False, unknown=unknown)
    if name:
        (named,) = [tool for tool in tools if tool["function"]["name"] == name]
        return result._replace(structured_output=_by_schema(choice, _parameters(named)))
    if wanted == "required":
        return result._replace(structured_output=_by_schema(choice, _calls(tools, choice, single=result.single)))
    format = choose_format(context)
    if format is None:
        raise InvalidParameter(
            "tools: the model's chat template shows calls of a form that is not known here; "
            "option.tool_call_parser may name one"
        )
    return result._replace(format=format)


def choose_format(context: ServerContext) -> Format | None:
    """Return the format of the options, a plugin first; by `auto` the chat template's, None where it shows none."""
    if context.tool_format is not None:
        return context.tool_format
    if context.tool_call_parser != "auto":
        return FORMATS[context.tool_call_parser]
    if not takes_tools(context.chat_template):
        return SMOLLM2  # which our own words about the tools ask for
    return find(context.chat_template)


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
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if name not in names:
        raise choice.refused(_CHOICES)
    return "named", str(name)


def _tools(tools: Named) -> tuple[list[Mapping[str, Any]], list[str]]:
    if tools.value is None:
        return [], []
    if not isinstance(tools.value, list) or len(tools.value) > MAX_TOOLS:
        raise tools.refused(f"must be a list of at most {MAX_TOOLS} tools")
    unknown = dict[str, None]()
    result = [_tool(tool, f"tools[{index}]", unknown) for index, tool in enumerate(tools.value)]
    names = [tool["function"]["name"] for tool in result]
    if len(set(names)) < len(names):
        raise InvalidParameter("tools: two have the same name")
    return result, list(unknown)


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
    known = ("name", "description", "parameters", "strict")  # strict changes nothing, as with response_format
    unknown |= {f"tools[].{key}": None for key in tool if key not in ("type", "function")}
    unknown |= {f"tools[].function.{key}": None for key in function if key not in known}
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


def _by_schema(choice: Named, schema: dict[str, Any]) -> StructuredOutput:
    try:
        return json_schema(schema)
    except ValueError as error:
        raise InvalidParameter(f"tools: for {choice} their schemas {error}") from None
