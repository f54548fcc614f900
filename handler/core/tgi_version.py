"""The release of TGI (`option.tgi_version`) that /invocations follows."""

from __future__ import annotations

import re
from typing import NamedTuple


class TgiVersion(NamedTuple):
    """A release of TGI, by default the last of its minor version. It can be compared with a tuple such as `(2, 4)`."""

    major: int
    minor: int
    patch: int = 99

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"

    @property
    def max_new_tokens(self) -> int | None:
        """Return the default of `max_new_tokens`, or None for the rest of the context.

        The source is `default_max_new_tokens` in router/src/lib.rs of each release.
        """
        if self < (1, 1, 1):
            return 20
        return 100 if (1, 3, 3) <= self < (3, 0) else None

    @property
    def samples_alone(self) -> bool:
        """Return whether a request without `parameters` samples (`default_parameters` in the same file)."""
        return self >= (1, 4)


NEWEST = TgiVersion(3, 3)
"""The last release: TGI's repository is archived."""


def read_tgi_version(text: str) -> TgiVersion:
    """Parse a release such as 3.3 or 2.3.1.

    Raises:
        ValueError: if the text is not a release of TGI.
    """
    match = re.fullmatch(r"v?([0-3])\.([0-9]{1,2})(?:\.([0-9]{1,2}))?", text)
    version = TgiVersion(*map(int, filter(None, match.groups()))) if match else None
    if version is None or version > NEWEST:
        raise ValueError(f"must be a release of TGI up to {NEWEST}, such as 2.4.1")
    return version
