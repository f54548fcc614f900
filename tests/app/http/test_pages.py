"""The files of the pages: vendored libraries are their packages' own."""

from __future__ import annotations

import hashlib
import re

from handler.http.routes import ASSETS

STATIC = ASSETS["/page/icon.svg"].parent
VENDOR = {name.removeprefix("/page/vendor/"): path for name, path in ASSETS.items() if "/vendor/" in name}
MAX_SIZE = 400_000
"""Bytes of all files of the two pages."""


def test_vendored_files_are_those_of_the_packages() -> None:
    text = (STATIC / "vendor" / "README.txt").read_text()
    sums = dict(re.findall(r"^(\S+) .* ([0-9a-f]{64})$", text, re.MULTILINE))
    assert sums == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in VENDOR.items()}
    for name in VENDOR:
        assert (STATIC / "vendor" / f"{re.split('[./]', name)[0]}.LICENSE.txt").is_file()


def test_the_pages_are_small() -> None:
    assert sum(path.stat().st_size for path in (*ASSETS.values(), *STATIC.glob("*.html"))) < MAX_SIZE
