"""Archives of model data."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping


def archive(files: Mapping[str, bytes | None]) -> bytes:
    """A tar.gz of files; None: a link."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            if data is None:
                member.type, member.linkname = tarfile.SYMTYPE, "../other"
            member.size = len(data or b"")
            tar.addfile(member, io.BytesIO(data or b""))
    return packed.getvalue()
