"""docs/options.md is the table of options; `python -m tests.unit.config.test_options_document` writes it anew."""

from __future__ import annotations

from pathlib import Path

from handler.config.options import ENVIRONMENT, OF_JAVA, OPTIONS, Option

DOCUMENT = Path(__file__).parents[3] / "docs" / "options.md"

HEAD = """# Options

Keys as serving.properties and `-o` write them. `option.x_y` is also the environment variable `OPTION_X_Y`, a
key without `option.` is `SERVING_X_Y`. Who wins: `-o`, then serving.properties, then the environment, then the
default. A key that nobody knows, and a wrong value, stop the start with a message that names the file and line,
or the variable, and the nearest known name.

"""

TAIL = """
## Where they are looked for
`lmi serve --properties FILE` names a serving.properties; without it, the one in the model's directory is read. The
MODEL argument and `--engine` count as `-o`. `LMI_LOG_LEVEL` is debug, info (default), warning or error. `SERVING_*`
names that only DJL Serving's Java side reads are let be.

## The echo engine
`lmi serve --engine echo` needs no model: it answers with the prompt's words, over and over, one word a token,
until `max_new_tokens`. With `option.echo_tokens_per_second` it keeps a pace. With `option.echo_cues=true` these
words of a prompt act when their turn comes to be echoed: `<raise>` (the engine raises), `<hang>` (it never
comes back), `<die>` (its process ends); `<refuse>` makes it refuse the request. They are for tests, and off by
default.

## Precision on OpenVINO
`option.dtype=auto` leaves it to the engine: on a CPU with bf16 that is bf16, an 8-bit KV cache, and quantized
activations where weights are compressed; a request's tokens may then differ in near ties with what else is in
the batch. `fp32` is f32 throughout: greedy, the same tokens in any company, and those of transformers, at about half
the speed. Log-probabilities still differ in their sixth digit, by which a sampled answer can turn out otherwise.

OpenVINO's reader rounds the weights of quantized GGUF files. With `fp32` they are the file's own; otherwise
files of up to 256 MiB get 8-bit weights made of the file's own, and larger ones are served as they are read.
What is made of a model is made at its first start, which takes some seconds longer, and kept under
`~/.cache/lmi-handler` (`LMI_CACHE`), or found in `converted/` beside the file. Where that fails for memory or
disk, the start is refused. A file whose weights have an unknown layout is served as it is read, with a warning.
"""


def render() -> str:
    common = [option for option in OPTIONS if option.field and not option.engines]
    groups = sorted({option.engines for option in OPTIONS if option.engines})
    tables = [_table(common)]
    for engines in groups:
        names = " and ".join(engines)
        tables.append(f"## Only with {names}\n" + _table([option for option in OPTIONS if option.engines == engines]))
    javas = ", ".join(f"`{option.key}`" for option in OPTIONS if option.help is OF_JAVA)
    idle = "; ".join(f"`{option.key}`: {option.idle}" for option in OPTIONS if option.idle)
    note = (
        f"An option of another engine's stops the start; let be with a warning, without effect: {idle}. "
        f"DJL Serving's own keys likewise in the embedded server: {javas}."
    )
    body = "\n\n".join(tables)
    return f"{HEAD}{body}\n\n{note}\n{TAIL}"


def _table(options: list[Option]) -> str:
    lines = ["| option | default | meaning | other names |", "|---|---|---|---|"]
    by_key = {key: name for name, key in ENVIRONMENT.items()}
    for option in options:
        others = [*option.aliases, *([by_key[option.key]] if option.key in by_key else [])]
        names = ", ".join(f"`{name}`" for name in others)
        lines.append(f"| `{option.key}` | {_shown(option.default)} | {option.help} | {names} |")
    return "\n".join(lines)


def _shown(default: object) -> str:
    if default is None:
        return ""
    return str(default).lower() if isinstance(default, bool) else str(default)


def test_the_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == render()


if __name__ == "__main__":
    DOCUMENT.write_text(render())
