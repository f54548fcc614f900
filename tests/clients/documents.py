"""The lines of docs/client.md for a framework, as they stand but for the address."""

from __future__ import annotations

import re
from pathlib import Path

_PAGE = Path(__file__).parents[2] / "docs" / "client.md"
SAYS = "The capital of France is Paris.\n"


def example(name: str, url: str) -> str:
    found = re.search(rf"^{name} \(.*?\):\n```python\n(.*?)```", _PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1].replace("http://127.0.0.1:8080", url)
