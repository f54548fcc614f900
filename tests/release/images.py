"""The images' names in examples, documents and tests' programs: `python -m tests.release.images [FILE]` writes them.

A tag is the version in pyproject.toml. `examples/images.json` has the digest of each published image by its name;
without one, the tag alone names the image. The digests of FILE, such a list of a release, are taken into it. Documents
keep the tags alone: their commands build the images. So do files that `lmi deploy export` has written.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.release.distributions import ROOT

DIGESTS = "examples/images.json"
_WITH_DIGESTS = ("examples/hosting/compose.yaml", "kserve.yaml", "hyperpod.yaml")
_FOLDERS = ("docs", "examples", "tests/clients/scripts/sagemaker/programs")
_SUFFIXES = (".md", ".yaml", ".yml", ".json", ".py")
REFERENCE = re.compile(r"\b(lmi-handler(?:-[a-z0-9]+)*):(\d+\.\d+\.\d+)((?:-[\w.]+)?)(@sha256:[0-9a-f]{64})?")
"""A name, a version, what the tag has behind it, and a digest."""


def version(root: Path) -> str:
    """Return the version in pyproject.toml."""
    [found] = re.findall(r'^version = "(.+)"$', (root / "pyproject.toml").read_text(), re.MULTILINE)
    return str(found)


def pages(root: Path) -> Iterator[Path]:
    """Yield the files that may name images."""
    for path in (path for folder in _FOLDERS for path in sorted((root / folder).rglob("*"))):
        if path.suffix in _SUFFIXES and path.is_file():
            yield path


def named(root: Path, path: Path) -> str:
    """Return a file's text with the images' names as they should be."""
    digests = json.loads((root / DIGESTS).read_text())
    takes = path.relative_to(root).as_posix().endswith(_WITH_DIGESTS)

    def reference(match: re.Match[str]) -> str:
        digest = digests[match[1]] if takes and not match[3] else ""
        return f"{match[1]}:{version(root)}{match[3]}" + (f"@{digest}" if digest else "")

    return REFERENCE.sub(reference, path.read_text())


def main(digests: str = "", *, root: Path = ROOT) -> int:
    if digests:
        known = json.loads((root / DIGESTS).read_text())
        given = json.loads(Path(digests).read_text())
        (root / DIGESTS).write_text(json.dumps(known | given, indent=2) + "\n")
    for path in pages(root):
        if (text := named(root, path)) != path.read_text():
            path.write_text(text)
            print(path.relative_to(root))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
