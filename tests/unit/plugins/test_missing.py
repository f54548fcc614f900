"""What a user's file names that is not here."""

from __future__ import annotations

from pathlib import Path

import pytest

from handler.plugins.foreign_handlers import VLLMS_OWN, missing
from handler.plugins.stand_ins import StandIn

PARTLY = StandIn({"partly": {"here": 1}, "partly.sub": {}})

IMPORTS = {
    "import json, os.path": [],
    "import no_such": ["no_such is not installed here"],
    "from no_such.part import name": ["no_such is not installed here"],
    "def f():\n    import no_such": ["no_such is not installed here"],
    "from . import no_such": [],
    "import beside, package.part": [],
    "from partly import here, sub": [],
    "from partly import there": ["partly.there is not installed here"],
    "try:\n    import no_such\nexcept Exception:\n    no_such = None": [],
    "try:\n    x = 1\n    import no_such\nexcept ImportError:\n    pass": [],
    "try:\n    x = 1\n    import no_such\nexcept ValueError:\n    pass": ["no_such is not installed here"],
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import no_such": [],
}


@pytest.mark.parametrize("text", IMPORTS)
def test_imports(text: str, tmp_path: Path) -> None:
    (tmp_path / "beside.py").touch()
    (tmp_path / "package").mkdir()
    assert told(tmp_path, text) == IMPORTS[text]


def told(directory: Path, text: str) -> list[str]:
    path = directory / "model.py"
    path.write_text(text)
    found = missing(path, [PARTLY])
    return [line.removeprefix(f"{path}, line ").partition(": ")[2] for line in found]


def test_what_the_file_itself_puts_into_the_state_is_there(tmp_path: Path) -> None:
    text = "def f(request):\n    request.app.state.mine = 1\n    return request.app.state.mine, request.state.other"
    assert told(tmp_path, text) == []
    text = "def f(request):\n    try:\n        request.app.state.engine_client()\n    except Exception:\n        pass"
    assert told(tmp_path, text) == [f"request.app.state.engine_client: {VLLMS_OWN}"]
