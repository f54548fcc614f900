"""Options as flags of `lmi serve`: `--max-model-len 8192` is `-o option.max_model_len=8192`.

Underscores count as dashes, and `--compilation-config.mode 3` is `-o option.compilation_config.mode=3`: both as in vLLM.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any

from handler.config.options import KNOWN
from handler.config.options.engine_arguments import NAMES, shipped
from handler.config.options.lookup import find_option
from handler.config.options.option import boolean
from handler.core.command_line import Parser

_SHORT = {
    "option.tensor_parallel_size": "-tp",
    "option.pipeline_parallel_size": "-pp",
    "option.data_parallel_size": "-dp",
    "option.quantization": "-q",
    "option.speculative_config": "-sc",
    "option.compilation_config": "-cc",
    "option.attention_config": "-ac",
}
"""vLLM's short flags."""
_FORMER_SWITCHES = {"option.disable_log_requests", "option.enable_log_requests", "option.enable_reasoning"}
"""vLLM's switches that its present lists of arguments lack, and commands in use still have."""
_DOTTED = re.compile(r"(--?[A-Za-z][\w-]*)(\.[^=]+)(=?)(.*)", re.DOTALL)

_SHOWN = {
    "dtype": "precision: auto, bf16, fp16, fp32",
    "max-model-len": "tokens of a prompt and its answer",
    "max-num-seqs": "sequences in the engine at once",
    "tensor-parallel-size": "number of devices for a model, or max",
    "served-model-name": "the model's name in OpenAI's API",
    "gpu-memory-utilization": "share of a GPU's memory that vLLM takes",
    "quantization": "how weights are quantized",
    "chat-template": "a chat template, or the path of one",
    "reasoning-parser": "how the model marks its reasoning; auto by default",
    "tool-call-parser": "how the model writes tool calls; auto by default",
}
"""The flags that --help lists; all the others are in `lmi options`."""


class _Flag(argparse.Action):
    """Adds `key=value` to `options`, where `-o` adds its own: the last of them counts, whichever way it came."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, flag: str | None = None) -> None:
        value = values if isinstance(values, str) else "false" if str(flag).startswith("--no-") else "true"
        namespace.options = [*namespace.options, f"{self.const}={value}"]


def add_flags(serve: Parser) -> None:
    """Add a flag for each option, and for each argument of the engines' own."""
    serve.rewrite = _rewritten
    group = serve.add_argument_group("options", "each option of `lmi options` is a flag too, as these are")
    taken = {*serve._option_string_actions}
    for key, is_switch in sorted(_keys().items()):
        name = key.removeprefix("option.").replace("_", "-")
        if f"--{name}" in taken:
            continue
        names = [*([_SHORT[key]] if key in _SHORT else []), f"--{name}", *([f"--no-{name}"] if is_switch else [])]
        group.add_argument(
            *names,
            action=_Flag,
            const=key,
            dest=f"option {key}",
            default=argparse.SUPPRESS,
            nargs=0 if is_switch else None,
            metavar="VALUE",
            help=_SHOWN.get(name, argparse.SUPPRESS),
        )


def _keys() -> dict[str, bool]:
    """Return the keys of all options, and whether each is a switch."""
    keys = {
        key: all(one.parse is boolean or "false" in getattr(one.parse, "unless", ()) for one in options)
        for key, options in KNOWN.items()
        if f"option.{key}" not in KNOWN
    }
    arguments = [one for engine in NAMES for one in shipped(engine).arguments.items()]
    own = {f"option.{name}": argument.types <= {"bool", "null"} for name, argument in arguments}
    server = shipped("vllm", "server").arguments.items()
    idle = {f"option.{name}" for name, argument in server if argument.types == {"bool"}} | _FORMER_SWITCHES
    return {**own, **{key: is_switch or own.get(key, key in idle) for key, is_switch in keys.items()}}


def _rewritten(words: Sequence[str]) -> list[str]:
    """Write dashes for underscores in the names of flags, and flags by dotted names as `-o`."""
    long = {short: f"--{key.removeprefix('option.')}" for key, short in _SHORT.items()}
    found: list[str] = []
    rest = iter(words)
    for word in rest:
        match = _DOTTED.fullmatch(word)
        flag = match and long.get(match[1], match[1])
        key = f"option.{flag[2:].replace('-', '_')}" if flag and flag.startswith("--") else ""
        if match and key and find_option(key, ""):
            value = match[4] if match[3] else next(rest, None)
            found += [word] if value is None else ["-o", f"{key}{match[2]}={value}"]
        elif word.startswith("--"):
            name, equals, value = word.partition("=")
            found.append(f"{name.replace('_', '-')}{equals}{value}")
        else:
            found.append(word)
    return found
