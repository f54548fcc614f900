"""Which parsers read a model's answers: by the options, the model's response template and its chat template."""

from __future__ import annotations

from handler.protocols.assistant.reasoning.families import Family, choose_family
from handler.protocols.assistant.response_template.request import family
from handler.protocols.assistant.tools.formats.hf import HF
from handler.protocols.assistant.tools.request import AUTO, NONE, choose_format
from handler.protocols.kernel.context import ServerContext


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
