"""The lines of docs/client.md for frameworks, run as they stand but for the address."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.clients import venvs
from tests.servers import LiveServer

pytestmark = pytest.mark.clients

_PAGE = Path(__file__).parents[2] / "docs" / "client.md"


@pytest.mark.parametrize(
    ("name", "environment"), [("LangChain", "openai"), ("LlamaIndex", "llama-index"), ("litellm", "litellm")]
)
def test_the_lines_for_a_framework(openai_server: LiveServer, name: str, environment: str) -> None:
    found = re.search(rf"^{name} \(.*?\):\n```python\n(.*?)```", _PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None
    code = found[1].replace("http://127.0.0.1:8080", openai_server.url)
    done = subprocess.run(
        [venvs.python(environment), "-c", code], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True
    )
    assert done.stdout == "The capital of France is Paris.\n", done.stderr
