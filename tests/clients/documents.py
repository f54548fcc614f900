"""The lines of docs/client.md for a framework, as they stand but for the address."""

from __future__ import annotations

from pathlib import Path

from tests.docs.blocks import Block, parse

_PAGE = Path(__file__).parents[2] / "docs" / "client.md"
SAYS = "The capital of France is Paris.\n"


def example(name: str, url: str) -> str:
    text = _PAGE.read_text()
    title = next(number for number, line in enumerate(text.splitlines(), 1) if line.startswith(f"{name} ("))
    block = next(item for item in parse(text).items if isinstance(item, Block) and item.line > title)
    assert (block.language, block.reason) == ("python", "another client")
    return block.text.replace("http://127.0.0.1:8080", url)
