"""Which parsers read a model's answers: by the options, the model's response template and its chat template."""

from __future__ import annotations

import logging

from handler.protocols.assistant.events import CallStart
from handler.protocols.assistant.reasoning.families import Family, choose_family
from handler.protocols.assistant.response_template.request import family
from handler.protocols.assistant.tools.formats import find
from handler.protocols.assistant.tools.formats.hf import HF
from handler.protocols.assistant.tools.grammar import write_calls
from handler.protocols.assistant.tools.prompt import takes_tools
from handler.protocols.assistant.tools.request import AUTO, NONE, choose_format
from handler.protocols.kernel.context import ServerContext

log = logging.getLogger("handler.template")


def reasoning_family(context: ServerContext) -> Family | None:
    """Return the family of the model's thoughts; None where they stay in the text."""
    name = context.config.reasoning
    if context.response_template is not None and name != NONE:
        return family(context.response_template) if context.response_template.reasoning is not None else None
    return choose_family(name, context.chat_template)


def describe_parsers(context: ServerContext) -> str:
    """Say which parsers read the model's answers, and by what they were chosen."""
    thoughts, calls = reasoning_family(context), choose_format(context)
    own, shown = "the model's response template", "the chat template"
    by = own if context.response_template is not None else shown
    if context.config.reasoning != AUTO:
        said = f"by option.reasoning_parser={context.config.reasoning}"
    elif thoughts is None:
        said = f"none, by {by}"
    else:
        said = f"{thoughts.name}, by {by} (option.reasoning_parser=none leaves it in the text)"
    if context.tool_format is not None:
        told = "by option.tool_parser_plugin"
    elif context.config.tool_call_parser != AUTO:
        told = f"by option.tool_call_parser={context.config.tool_call_parser}"
    else:
        told = f"{calls.name if calls else 'in an unknown format'}, by {own if calls is HF else shown}"
    return f"reasoning: {said}; tool calls: {told}"


_TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def warn_of_unread_calls(context: ServerContext) -> None:
    """Log that prompts show calls in a form that the parser of the answers does not read."""
    template, format = context.chat_template, choose_format(context)
    if format is None:
        return
    if not takes_tools(template):
        if format.notation(template) is None:
            log.warning(
                "tools: the chat template has no place for them, and %s does not say how calls are written; "
                "prompts ask for <tool_call>[JSON]</tool_call>",
                format.name,
            )
        return
    shown = find(template)
    if context.tool_format is not None or shown is None or (notation := shown.notation(template)) is None:
        return
    parser = format.make([_TOOL])
    events = [*parser.feed(write_calls(notation, [("f", {})])), *parser.flush()]
    if not any(isinstance(event, CallStart) for event in events):
        log.warning(
            "option.tool_call_parser=%s does not read calls as the chat template shows them, which are %s's",
            context.config.tool_call_parser,
            shown.name,
        )
