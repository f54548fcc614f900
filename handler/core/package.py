"""The pip command that installs an extra of this package from the same source as the package itself."""

from __future__ import annotations

import functools
import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

NAME = "lmi-handler"


def install(requirement: str) -> str:
    """Return the command that installs a requirement.

    This package is not in any registry, so its extras are installed from its clone or wheel. If that source is unknown,
    the command contains only the requirement, and pip detects that the package is installed.

    Args:
        requirement: `lmi-handler[EXTRA]`, or another package.
    """
    url, is_editable = _source()
    if requirement.partition("[")[0] != NAME or not url:
        return f"pip install {shlex.quote(requirement)}"
    if is_editable:
        return f"pip install -e {shlex.quote(unquote(urlsplit(url).path) + requirement.removeprefix(NAME))}"
    return f"pip install {shlex.quote(f'{requirement} @ {url}')}"


@functools.cache
def _source() -> tuple[str, bool]:
    """Return the URL from which this package was installed ("" if unknown), and whether it is an editable install."""
    try:
        noted = json.loads(distribution(NAME).read_text("direct_url.json") or "{}")
    except PackageNotFoundError:  # a checkout on the path
        return "", False
    url = noted.get("url", "")
    if not Path(unquote(urlsplit(url).path)).exists():  # the wheel was deleted, as in an image
        return "", False
    return url, noted.get("dir_info", {}).get("editable", False)
