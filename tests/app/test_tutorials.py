"""docs/adopt.md about notebooks, each of them on the engine echo; `python -m tests.app.test_tutorials` writes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.app.server import serve
from tests.deploy.tutorials import TUTORIALS, Tutorial
from tests.docs.pages import fill, table
from tests.servers import http

DOCUMENT = Path(__file__).parents[2] / "docs" / "adopt.md"


@pytest.fixture(scope="module")
def properties(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """serving.properties, and the adapter beside it that a notebook packs."""
    directory = tmp_path_factory.mktemp("model")
    adapter = directory / "adapters" / "eng_alpaca"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    (adapter / "adapter_model.safetensors").touch()
    (directory / "serving.properties").touch()
    return directory / "serving.properties"


@pytest.mark.parametrize(
    "tutorial", [pytest.param(one, id=name) for group in TUTORIALS.values() for name, one in group.items()]
)
def test_the_notebook_reads_its_answer(tutorial: Tutorial, properties: Path) -> None:
    with serve("--engine", "echo", "--properties", str(properties), env=tutorial.environment) as server:
        answer = http.post(server.url + "/invocations", json=tutorial.asked, headers=tutorial.headers)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    for step in tutorial.place:
        found = found[step]
    assert str(found).startswith(tutorial.answer)


def render() -> str:
    named = [(name, one) for group in TUTORIALS.values() for name, one in group.items()]
    rows = ((f"`{name}`", f"{one.change}. {one.note}") for name, one in named if one.change)
    same = ", ".join(f"`{name}`" for name, one in named if not one.change)
    text = f"{table(('notebook', 'change, besides the image'), rows)}\nThese need no other change: {same}.\n"
    return fill(DOCUMENT.read_text(encoding="utf-8"), "tutorials", text)


def test_the_document_is_up_to_date_in_tutorials() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == render(), "`python -m tests.app.test_tutorials` writes it"


if __name__ == "__main__":
    DOCUMENT.write_text(render(), encoding="utf-8")
