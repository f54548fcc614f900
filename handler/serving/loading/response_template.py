"""The model's own response template, where it reads the answers."""

from __future__ import annotations

import logging
from pathlib import Path

from handler.config.config import Config
from handler.config.model_files import read_json
from handler.core.errors import ConfigError, Problem
from handler.protocols.assistant.response_template.template import ResponseTemplate, read_response_template
from handler.protocols.assistant.tools.formats.hf import HF
from handler.protocols.assistant.tools.request import AUTO, NONE

log = logging.getLogger("handler.launch")

_OPTIONS = ("option.reasoning_parser", "option.tool_call_parser")


def response_template(config: Config, model: Path | None) -> ResponseTemplate | None:
    """Read the template of the tokenizer's files; None where there is none, or the options leave it out.

    It reads whole answers, so `auto` takes it unless an option names another parser. One that is wrong is left out
    with a warning there, and refused where an option names it.

    Args:
        model: the model's directory or file.

    Raises:
        ConfigError: an option names it, and it is missing, wrong, lacks that part, or stands beside another parser.
    """
    given = dict(zip(_OPTIONS, (config.reasoning, config.tool_call_parser), strict=True))
    plugin = {"option.tool_parser_plugin": config.tool_parser_plugin} if config.tool_parser_plugin else {}
    named = [key for key, name in given.items() if name == HF.name]
    others = [f"{key}={name}" for key, name in {**given, **plugin}.items() if name not in (AUTO, NONE, HF.name)]
    if named and others:
        raise _refused(config, named[0], f"reads whole answers, and cannot stand beside {others[0]}")
    if others or set(given.values()) == {NONE}:
        return None
    path = None if model is None else model / "tokenizer_config.json"
    value = None if path is None else read_json(path).get("response_template")
    if value is None:
        if named:
            raise _refused(
                config, named[0], f"{path or 'the model'} has no response_template; auto goes by the chat template"
            )
        return None
    try:
        template = read_response_template(value)
    except ValueError as error:
        if named:
            raise _refused(config, named[0], f"{path}: {error}") from None
        log.warning("%s: %s; answers are read by the chat template", path, error)
        return None
    lacks = {
        "option.reasoning_parser": (template.reasoning, "thinking"),
        "option.tool_call_parser": (template.calls, "tool_calls"),
    }
    for key in named:
        part, name = lacks[key]
        if part is None:
            raise _refused(config, key, f"{path}: response_template.fields has no {name}")
    return template


def _refused(config: Config, key: str, why: str) -> ConfigError:
    return ConfigError(Problem(config.where(key), key, f"{key}={HF.name}: {why}"))
