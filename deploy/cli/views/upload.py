"""An upload as it is shown: a bar of bytes with files and rate on a terminal, else a line every tenth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from deploy.cli.console import say
from deploy.s3.upload import Sent, human


@contextmanager
def upload_progress(console: Console) -> Iterator[Callable[[Sent], None]]:
    """A `progress` for `upload`."""
    if not console.is_terminal:
        yield _plain(console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("uploading", total=None)

        def report(sent: Sent) -> None:
            bar.update(
                task, total=sent.of_size, completed=sent.size, description=f"{sent.files} of {sent.of_files} files"
            )

        yield report


def _plain(console: Console) -> Callable[[Sent], None]:
    last = -1

    def report(sent: Sent) -> None:
        nonlocal last
        tenth = 10 * sent.size // max(sent.of_size, 1)
        if tenth != last:
            last = tenth
            say(console, f"uploaded {human(sent.size)} of {human(sent.of_size)}, {sent.files} of {sent.of_files} files")

    return report
