"""`lmi_handler`: the public names, beside folders of a user's that have the names of our packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lmi_handler
from handler import formatters


def run(directory: Path, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=directory, capture_output=True, text=True)


def test_each_name_is_there() -> None:
    from deploy.client import Predictor
    from handler.http.app import create_app

    assert (lmi_handler.Predictor, lmi_handler.create_app, lmi_handler.formatters) == (
        Predictor,
        create_app,
        formatters,
    )
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = lmi_handler.Nothing


def test_a_package_of_the_users_is_hidden_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "__init__.py").touch()
    found = run(tmp_path, "from lmi_handler import Predictor; print(Predictor.__module__)")
    assert found.stdout == "deploy.client.predictor\n"
    told = f"{tmp_path / 'deploy'} cannot be imported: lmi-handler also has a package 'deploy'"
    assert f"<string>:1: UserWarning: {told}" in found.stderr


def test_a_folder_of_the_users_without_modules_is_not_in_the_way(tmp_path: Path) -> None:
    """Python prefers a package that comes later on its path, installed or editable."""
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "main.tf").touch()
    found = run(tmp_path, "from lmi_handler import Predictor; print(Predictor.__module__)")
    assert (found.stdout, found.stderr) == ("deploy.client.predictor\n", "")


def test_a_package_of_the_users_that_is_imported_is_named(tmp_path: Path) -> None:
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "__init__.py").touch()
    found = run(tmp_path, "import deploy; from lmi_handler import Predictor")
    wanted = f"{tmp_path / 'deploy'} has the same name as a package of lmi-handler and has been imported: rename it"
    assert found.stderr.splitlines()[-1] == f"ImportError: {wanted}"
