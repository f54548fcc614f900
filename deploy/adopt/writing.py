"""Write an adopted specification as YAML, with comments for what does not map."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import yaml

from deploy.adopt.specification import Adopted

_NOTES = {
    "image": "Its image is not taken over: name yours.",
    "instance": "It serves on this type already, so whether the model fits is not asked.",
    "alarms": "Without this line `up` adds alarms, which roll back a bad update.",
    "sagemaker": "Fields that go into SageMaker's requests as they are.",
}


def written(adopted: Adopted, command: str) -> str:
    """Return the file's text.

    Args:
        command: that wrote it.
    """
    lines = [_comment(f"Written by `{command}` {sentence}. Nothing was changed.") for sentence in adopted.head]
    for name, value in adopted.content.items():
        if (note := _NOTES.get(name)) is not None:
            lines.append(_comment(note))
        lines.append(yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True, width=120).rstrip("\n"))
    lines += _listed("Does not map", adopted.unmapped)
    lines += _listed("Has no effect here, and is left out", adopted.idle)
    return "\n".join(lines) + "\n"


def _listed(title: str, items: Sequence[tuple[str, str]]) -> Iterator[str]:
    if items:
        yield f"\n# {title}:"
        yield from (_comment(f"  {what}: {why}") for what, why in items)


def one_line(text: str) -> str:
    """Return a text without what could leave its line, or change a terminal."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


def _comment(text: str) -> str:
    return f"# {one_line(text)}"
