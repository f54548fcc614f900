"""The files of the pages: vendored libraries are their packages' own."""

from __future__ import annotations

import hashlib
import re

from handler.http.routes.pages import ASSETS

VENDOR = {path.name: path for path in ASSETS.values() if path.parent.name == "vendor"}


def test_vendored_files_are_those_of_the_packages() -> None:
    text = (ASSETS["/page/icon.svg"].parent / "vendor" / "README.txt").read_text()
    sums = dict(re.findall(r"^(\S+) .* ([0-9a-f]{64})$", text, re.MULTILINE))
    assert sums == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in VENDOR.items()}
    for name, path in VENDOR.items():
        assert (path.parent / f"{name.split('.')[0]}.LICENSE.txt").is_file()
