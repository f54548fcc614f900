"""Print the progress of an upload: a bar on a terminal, else a line for every tenth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from deploy.cli.console import say
from deploy.s3.upload import UploadProgress, human


@contextmanager
def upload_progress(console: Console) -> Iterator[Callable[[UploadProgress], None]]:
    """Yield a `progress` for `upload`."""
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

        def report(progress: UploadProgress) -> None:
            bar.update(
                task,
                total=progress.of_size,
                completed=progress.size,
                description=f"{progress.files} of {progress.of_files} files",
            )

        yield report


def _plain(console: Console) -> Callable[[UploadProgress], None]:
    last = -1

    def report(progress: UploadProgress) -> None:
        nonlocal last
        tenth = 10 * progress.size // max(progress.of_size, 1)
        if tenth != last:
            last = tenth
            size, files = (
                f"{human(progress.size)} of {human(progress.of_size)}",
                f"{progress.files} of {progress.of_files}",
            )
            say(console, f"uploaded {size}, {files} files")

    return report
