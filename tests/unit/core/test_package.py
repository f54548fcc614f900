"""How to add an extra of this package: to the clone or the wheel that is installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from handler.core import package


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    package._source.cache_clear()
    yield
    package._source.cache_clear()


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize(
    ("noted", "requirement", "expected"),
    [
        ({"dir_info": {"editable": True}}, "lmi-handler[cpu]", "pip install -e 'HERE/a b[cpu]'"),
        ({"archive_info": {}}, "lmi-handler[cpu]", "pip install 'lmi-handler[cpu] @ file://HERE/a%20b'"),
        (None, "lmi-handler[cpu]", "pip install 'lmi-handler[cpu]'"),
        ({"dir_info": {"editable": True}}, "vllm", "pip install vllm"),
    ],
    ids=["clone", "wheel", "name", "other"],
)
def test_it_names_what_is_installed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    noted: dict[str, object] | None,
    requirement: str,
    expected: str,
    is_there: bool,
) -> None:
    if is_there:
        (tmp_path / "a b").touch()
    elif requirement != "vllm":
        expected = f"pip install '{requirement}'"
    info = tmp_path / "lmi_handler-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: lmi-handler\nVersion: 1\n")
    if noted is not None:
        (info / "direct_url.json").write_text(json.dumps({"url": f"file://{tmp_path}/a%20b", **noted}))
    monkeypatch.syspath_prepend(tmp_path)
    assert package.install(requirement) == expected.replace("HERE", str(tmp_path))
