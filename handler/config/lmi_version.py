"""The LMI release (`option.lmi_version`), which determines all behavior that differs between releases."""

from __future__ import annotations

import re
from typing import NamedTuple

KEY = "option.lmi_version"


class LmiVersion(NamedTuple):
    """A release of LMI, as a version of DJL Serving. It can be compared with a tuple such as `(0, 32)`."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


OLDEST, NEWEST = LmiVersion(0, 28), LmiVersion(0, 38)

VERSIONS = tuple(LmiVersion(0, minor) for minor in range(OLDEST.minor, NEWEST.minor + 1))

ASYNC_SINCE, ASYNC_BY_DEFAULT_SINCE = LmiVersion(0, 33), LmiVersion(0, 35)
"""The first release with async mode, and the first release that uses async mode by default for text models."""

ASYNC = LmiVersion(0, 36)
"""The release to assume if the configuration selects async mode but no release."""

_RELEASE = re.compile(r"v?([0-9]+)\.([0-9]+)(?:\.[0-9]+)?(?:-lmi([0-9]+))?")  # 0.36, v0.36.0, 0.36.0-lmi27.0.0-cu130
_NEW_STREAMS = 26  # LMI v26 and v27 have DJL Serving 0.36, but the rolling batch of later releases


def read_lmi_version(text: str) -> LmiVersion:
    """Parse a release such as 0.36 or 0.36.0. 0.3 is read as 0.30, because YAML drops the zero.

    Raises:
        ValueError: if the release is not supported.
    """
    match = re.fullmatch(r"([0-9]+)\.([0-9]+)(\.[0-9]+)?", "0.30" if text == "0.3" else text)
    version = LmiVersion(int(match[1]), int(match[2])) if match and len(text) < 20 else None
    if version not in VERSIONS:
        raise ValueError(f"must be one of {', '.join(map(str, VERSIONS))}")
    return version


def release_of(text: str) -> LmiVersion | None:
    """Return the supported release nearest to a version of DJL Serving or the tag of an image.

    Args:
        text: a version such as 0.36.0 or a tag such as 0.36.0-lmi27.0.0-cu130.

    Returns:
        The release, or None if the text does not begin with a version.
    """
    match = _RELEASE.match(text)
    if match is None or len(text) > 200:
        return None
    version = LmiVersion(int(match[1]), int(match[2]))
    if version == (0, 36) and int(match[3] or 0) >= _NEW_STREAMS:
        version = LmiVersion(0, 37)
    return min(max(version, OLDEST), NEWEST)
