"""Checksums, their signature, and the provenance of a release's files: an in-toto statement with SLSA's predicate."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SUMS = "SHA256SUMS"
PROVENANCE = "provenance.json"
NAMESPACE = "lmi-handler"
"""What a signature is for: one for another purpose is not taken for it."""

BUILDER = "urn:lmi-handler:make-release"
"""Of a build on any machine. A workflow gives its own, which its host can attest."""


def sha256(path: Path) -> str:
    """Return the digest of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def statement(
    files: Sequence[Path], commit: str, source: str, locks: Mapping[str, str], builder: str = BUILDER
) -> dict[str, Any]:
    """Return the in-toto statement about files.

    Args:
        files: the files that were built.
        commit: the id of the commit that they were built of.
        source: the repository's address, or "" if it has none.
        locks: digests of the files that pin what was taken from outside, by path.
        builder: a URI of who built.
    """
    repository = f"git+{source}@{commit}" if source else f"git+lmi-handler@{commit}"
    pinned = [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(locks.items())]
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": path.name, "digest": {"sha256": sha256(path)}} for path in sorted(files)],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:lmi-handler:make-release:1",
                "externalParameters": {"command": "make release", "commit": commit},
                "resolvedDependencies": [{"uri": repository, "digest": {"gitCommit": commit}}, *pinned],
            },
            "runDetails": {"builder": {"id": builder}},
        },
    }


def write_sums(directory: Path) -> Path:
    """Write the digests of a directory's files, in the format of `sha256sum --check`."""
    listed = [path for path in sorted(directory.iterdir()) if not path.name.startswith(SUMS)]
    sums = directory / SUMS
    sums.write_text("".join(f"{sha256(path)}  {path.name}\n" for path in listed))
    return sums


def released(directory: Path) -> set[str]:
    """Return the names of the files of the release in a directory: those with a checksum, and the checksums."""
    sums = directory / SUMS
    listed = {line.partition("  ")[2] for line in sums.read_text().splitlines()} if sums.exists() else set[str]()
    return listed | {SUMS, f"{SUMS}.sig"}


def write_statement(directory: Path, value: Mapping[str, Any]) -> Path:
    path = directory / PROVENANCE
    path.write_text(json.dumps(value, indent=1) + "\n")
    return path


def sign(path: Path, key: Path) -> Path:
    """Sign a file with an SSH key, and return the signature's path.

    Maintainers have such a key for their host already, and who checks needs only its public line: no keyring, no
    agent's state, no web of trust. OpenSSH 8.2 and later read it.

    Raises:
        subprocess.CalledProcessError: if ssh-keygen refuses the key.
    """
    signature = path.with_name(f"{path.name}.sig")
    signature.unlink(missing_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-Y", "sign", "-n", NAMESPACE, "-f", str(key), str(path)], check=True)
    return signature
