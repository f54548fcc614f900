"""What a release consists of, below a directory: `make release`. Nothing is published.

Both distributions, the images `cpu` and `llamacpp` for both architectures as archives, a bill of materials for each,
the provenance of all, SHA256SUMS, and its signature if a key is given. An image that cannot be built here is left out,
and named. All is made of the commit, so what is not committed is refused. A release that fails leaves the directory as
it was.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from tests.release import bill, containers, distributions, provenance
from tests.release.distributions import ROOT, extract, git
from tests.release.images import version

EXTRA = "cpu"
"""What `uvx` and `pip install` of the documents install beside the distributions, and so what their bills list."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make release", description=__doc__)
    parser.add_argument("directory", type=Path, help="a new or empty directory, or that of an earlier release")
    parser.add_argument("--key", type=Path, help="a private SSH key, or a public one whose private half an agent holds")
    parser.add_argument("--tools", type=Path, required=True, help="the environment of the bills' tool")
    parser.add_argument("--images", nargs="*", choices=(*containers.LOCKS, "none"), default=[*containers.LOCKS])
    parser.add_argument("--source", default="", help="the repository's address, for the provenance")
    parser.add_argument("--builder", default=provenance.BUILDER, help="a URI of who builds, for the provenance")
    parser.add_argument("--build-constraint", action="append", default=[])
    given = parser.parse_args(arguments)
    if changed := distributions.changed(ROOT):
        print(f"commit these first: {', '.join(changed)}", file=sys.stderr)
        return 1
    found = {path.name for path in given.directory.iterdir()} if given.directory.exists() else set()
    if foreign := sorted(found - provenance.released(given.directory)):
        print(f"{given.directory} has other files: {', '.join(foreign)}", file=sys.stderr)
        return 1
    partial = given.directory.with_name(f"{given.directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    left_out = _make(given, partial)
    shutil.rmtree(given.directory, ignore_errors=True)
    partial.rename(given.directory)
    if given.key is None:
        print("not signed: no key (KEY=FILE)")
    for image, why in left_out.items():
        print(f"left out: {image.name}: {why}")
    for path in sorted(given.directory.iterdir()):
        print(path)
    return 0


def _make(given: argparse.Namespace, directory: Path) -> dict[containers.Image, str]:
    """Write all files of a release into an empty directory, and return why images are left out."""
    commit, tool = distributions.head(ROOT), bill.tool(given.tools)
    constraints = [word for file in given.build_constraint for word in ("--build-constraint", file)]
    built = distributions.build(ROOT, directory, *constraints)
    needed = bill.made(tool, ROOT, bill.pins_of_extra(ROOT, EXTRA))
    for path in built:
        _bill(path, needed)
    chosen = [image for image in containers.IMAGES if image.target in given.images]
    left_out = {image: why for image in chosen if (why := containers.obstacle(image))}
    built += _images([image for image in chosen if image not in left_out], directory, commit, tool)
    bills = [*directory.glob("*.cdx.json")]
    locks = [bill.LOCK, *(lock for names in containers.LOCKS.values() for lock in names)]
    pinned = {name: provenance.sha256(ROOT / name) for name in locks}
    statement = provenance.statement([*built, *bills], commit, given.source, pinned, given.builder)
    provenance.write_statement(directory, statement)
    sums = provenance.write_sums(directory)
    if given.key is not None:
        provenance.sign(sums, given.key)
    return left_out


def _bill(path: Path, needed: Mapping[str, Any]) -> None:
    """Write the bill of a distribution beside it."""
    number = version(ROOT)
    purl = f"pkg:pypi/lmi-handler@{number}?file_name={path.name}"
    subject = bill.Subject("application", "lmi-handler", number, purl, provenance.sha256(path))
    bill.write(path.with_name(f"{path.name}.cdx.json"), needed, subject)


def _images(chosen: Sequence[containers.Image], directory: Path, commit: str, tool: Path) -> list[Path]:
    """Build images of the commit, with their bills, and return the archives."""
    number, archives = version(ROOT), []
    own = {
        "type": "application",
        "bom-ref": "lmi-handler",
        "name": "lmi-handler",
        "version": number,
        "purl": f"pkg:pypi/lmi-handler@{number}",
    }
    with tempfile.TemporaryDirectory() as scratch:
        with tarfile.open(fileobj=BytesIO(git(ROOT, "archive", "HEAD"))) as archive:
            extract(archive, Path(scratch))
        for image in chosen:
            path = directory / f"{image.name}-{number}.tar"
            containers.build(image, Path(scratch), path, number, commit)
            purl = f"pkg:oci/{image.name}?tag={number}&arch={image.architecture}"
            subject = bill.Subject("container", image.name, number, purl, provenance.sha256(path))
            needed = bill.made(tool, ROOT, bill.pins(ROOT, containers.LOCKS[image.target], image.architecture))
            more = [own, *containers.debian_packages(path)]
            bill.write(directory / f"{path.name}.cdx.json", needed, subject, more)
            archives.append(path)
    return archives


if __name__ == "__main__":
    raise SystemExit(main())
