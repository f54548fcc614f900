"""A clone for the tests of what is built of a commit."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.release.distributions import ROOT, git


def clone(directory: Path) -> Path:
    """Copy the files that git does not ignore, as they are now, into a directory, as one commit of a new clone.

    The checkout itself may be no repository of git's, or another user's.
    """
    directory.mkdir(exist_ok=True)
    git(directory, "init", "--quiet")
    look = ["--git-dir", str(directory / ".git"), "--work-tree", str(ROOT)]
    listed = git(ROOT, *look, "ls-files", "-z", "--others", "--exclude-standard").decode().split("\0")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, directory / name)
    git(directory, "add", "--all")
    who = ["-c", "user.name=test", "-c", "user.email=test@example.com", "-c", "commit.gpgsign=false"]
    git(directory, *who, "commit", "--quiet", "--message", "All")
    return directory
