"""docs/options.md; `python -m tests.unit.config.test_options_document` rewrites it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from handler.config.options import ENVIRONMENT, OPTIONS, Option
from handler.config.options.engine_arguments import shipped
from handler.config.options.listing import engines_of
from handler.config.options.option import Gone

_PAGE = re.compile(r"(?:docs/)?((?:[\w-]+/)*[\w-]+\.md)")
DOCUMENT = Path(__file__).parents[3] / "docs" / "options.md"

HEAD = """# Options

Set an option with `-o`, in a `serving.properties` file, or in the environment. `option.x_y` is also the variable
`OPTION_X_Y`; a key without `option.` is `SERVING_X_Y`. `-o` wins over serving.properties, that over the environment,
that over the default. An unknown key or a wrong value stops the start. The message names the file and line, or the
variable, and the nearest known name.

Any argument of vLLM's EngineArgs, and of TensorRT-LLM's TorchLlmArgs, is an option too: `option.seed` is `seed`. Its
name and type are checked against the installed engine's own class. Without an installed one, those of vLLM {VLLM} and
TensorRT-LLM {TRTLLM} count. [migrating/](migrating/README.md) has the names of LMI, vLLM and TGI that are refused here,
or have no effect.

"""

TAIL = """
## Where options come from
`lmi serve --properties FILE` names a serving.properties; otherwise the server reads the one in the model's directory.
The MODEL argument and `--engine` count as `-o`. `LMI_LOG_LEVEL` is debug, info (default), warning or error. The
server ignores `SERVING_*` names that only DJL Serving's Java side reads.

## The echo engine
Run `lmi serve --engine echo` to try the server without a model. The engine repeats the prompt's words, one per token,
until `max_new_tokens`. OpenAI's routes and the chat page have no such limit by default: they fill the context of
1,048,576 tokens. Set `max_tokens`, or `option.max_model_len=256`. `option.echo_tokens_per_second` sets the pace.

With `option.echo_cues=true`, some words of a prompt act when they are echoed. At `<raise>` the engine raises an
exception, at `<hang>` it never returns, at `<die>` its process ends. `<refuse>` makes it refuse the request. These
words are for tests, and off by default.

## Precision on OpenVINO
`option.dtype=auto` lets the engine choose. On a CPU with bf16 it chooses bf16, an 8-bit KV cache, and quantized
activations where weights are compressed. A request's tokens may then differ in near ties, depending on the other
requests in the batch.

`fp32` computes in f32 throughout, at about half the speed. Greedy answers are then the same in any batch, and equal
those of transformers. Log-probabilities still differ in their sixth digit, so a sampled answer can differ.

OpenVINO's reader rounds the weights of quantized GGUF files. With `fp32`, the server uses the file's exact weights.
Otherwise it makes 8-bit weights from the exact ones, for files of up to 256 MiB. It serves larger files as OpenVINO
reads them.

A conversion happens at the model's first start, which then takes some seconds longer. The server keeps the result
under `~/.cache/lmi-handler` (`LMI_CACHE`), and also reads `converted/` beside the file. If memory or disk space is
missing, the start fails. A file with an unknown layout of weights is served as OpenVINO reads it, with a warning.
"""


def render() -> str:
    options = [option for option in OPTIONS if option.field and not isinstance(option.parse, Gone)]
    common = [option for option in options if not engines_of(option)]
    groups = sorted({engines_of(option) for option in options} - {()})
    tables = [_table(common)]
    for engines in groups:
        tables.append(
            f"## Only with {_enumerate(engines)}\n"
            + _table([option for option in options if engines_of(option) == engines])
        )
    javas = ", ".join(f"`{option.key}`" for option in OPTIONS if option.of_java and not isinstance(option.parse, Gone))
    idle = "\n".join(f"* `{option.key}`: {option.idle}" for option in OPTIONS if option.idle)
    note = (
        f"An option of another engine stops the start. These have no effect and log a warning instead:\n{idle}\n\n"
        f"In the embedded server, DJL Serving's own keys have no effect and log a warning too: {javas}. "
        "`engine` and `option.entryPoint` may only be LMI's own: Python, MPI or DeepSpeed, and LMI's handlers or "
        "`handler.entry`."
    )
    body = "\n\n".join(tables)
    releases = {name.upper(): shipped(name).source.split(" ", 1)[1] for name in ("vllm", "trtllm")}
    return f"{HEAD.format(**releases)}{body}\n\n{note}\n{TAIL}"


def _enumerate(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _table(options: list[Option]) -> str:
    lines = ["| option | default | meaning | other names |", "|---|---|---|---|"]
    by_key = {key: name for name, key in ENVIRONMENT.items()}
    for option in options:
        others = [*option.aliases, *([by_key[option.key]] if option.key in by_key else [])]
        names = ", ".join(f"`{name}`" for name in others)
        lines.append(f"| `{option.key}` | {_shown(option.default)} | {_linked(option.help)} | {names} |")
    return "\n".join(lines)


def _linked(text: str) -> str:
    """Return an option's description as Markdown, with links to the pages that it names."""
    return _PAGE.sub(r"[\1](\1)", text.replace("<", "&lt;"))


def _shown(default: object) -> str:
    if default is None:
        return ""
    return str(default).lower() if isinstance(default, bool) else str(default)


def test_the_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == render()


if __name__ == "__main__":
    DOCUMENT.write_text(render())
