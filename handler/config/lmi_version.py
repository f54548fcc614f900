"""LMI's release (`option.lmi_version`), which decides everything that differs between releases."""

from __future__ import annotations

import re
from typing import NamedTuple

KEY = "option.lmi_version"


class LmiVersion(NamedTuple):
    """A release of LMI, numbered by its DJL Serving. Compare it with a pair: `config.lmi_version >= (0, 32)`."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


OLDEST, NEWEST = LmiVersion(0, 28), LmiVersion(0, 38)

VERSIONS = tuple(LmiVersion(0, minor) for minor in range(OLDEST.minor, NEWEST.minor + 1))

ASYNC_SINCE, ASYNC_BY_DEFAULT_SINCE = LmiVersion(0, 33), LmiVersion(0, 35)
"""The releases with an async mode, and those in which it is the mode of a text model where none is chosen."""

ASYNC = LmiVersion(0, 36)
"""The release whose async mode is served if the configuration names only the mode."""

_RELEASE = re.compile(r"v?(\d+)\.(\d+)(?:\.\d+)?(?:-lmi(\d+))?")  # 0.36, v0.36.0, 0.36.0-lmi27.0.0-cu130
_NEW_STREAMS = 26  # LMI v26 and v27 still have DJL Serving 0.36, and the rolling batch of later releases


def read_lmi_version(text: str) -> LmiVersion:
    """Parse a release, as 0.36 or 0.36.0; 0.3 is what YAML makes of 0.30.

    Raises:
        ValueError: there is no such release; the message names those that there are.
    """
    found = re.fullmatch(r"(\d+)\.(\d+)(\.\d+)?", "0.30" if text == "0.3" else text)
    version = LmiVersion(int(found[1]), int(found[2])) if found and len(text) < 20 else None
    if version not in VERSIONS:
        raise ValueError(f"must be one of {', '.join(map(str, VERSIONS))}")
    return version


def release_of(text: str) -> LmiVersion | None:
    """Return the release of a DJL Serving (`0.36.0`) or of an image's tag (`0.36.0-lmi27.0.0-cu130`), or the nearest.

    None: the text has no version.
    """
    found = _RELEASE.match(text)
    if found is None or len(text) > 200:
        return None
    version = LmiVersion(int(found[1]), int(found[2]))
    if version == (0, 36) and int(found[3] or 0) >= _NEW_STREAMS:
        version = LmiVersion(0, 37)
    return min(max(version, OLDEST), NEWEST)
