"""Readers of recordings: SageMaker's data capture, batch files, HAR, and lines of requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path

from handler.core.errors import ConfigError
from proof.replay.exchange import Request, Unreadable
from proof.replay.sources import batch, captures, har, request_lines
from proof.replay.sources.files import (
    BROKEN,
    SCHEME,
    File,
    Malformed,
    Member,
    SourceLine,
    find,
    lines,
    members,
    with_unique_ids,
)

KINDS = """\
SageMaker's data capture (a directory or s3://BUCKET/PREFIX/, lines with captureData),
OpenAI's batch files (lines with custom_id, method, url, body),
HAR 1.2 ({"log": {"entries": [...]}}),
lines of requests (path, headers, body), as option.capture_requests writes them,
bodies alone, as lines or in a JSON file, which are sent to /invocations (inputs, messages, prompt, ...)"""

_LOOKED_AT = 100  # maximum lines and files that are checked to recognize the kind
_HEAD = 1 << 12
_RESPONSE_SUFFIXES = ("_output", "_error", "_errors", "-output", "-error")
"""Suffixes that convert the name of a batch request file to the names of its response files."""


class Recording(Iterator[Request | Unreadable]):
    """The requests of a recording, in constant memory.

    Attributes:
        by: what sent the recorded responses, and those of a shadow variant, or "" if the recording does not say it.
    """

    def __init__(self, items: Iterator[Request | Unreadable], by: tuple[str, str]) -> None:
        self._items, self.by = items, by

    def __next__(self) -> Request | Unreadable:
        return next(self._items)


def open_requests(argument: str) -> Recording:
    """Return the requests of a recording.

    Args:
        argument: a file, a directory, or `s3://BUCKET/PREFIX/`.

    Raises:
        ConfigError: there is nothing to read, or the kind of the recording is unknown.
    """
    files = find(argument)
    kinds = (kind for file in files[:_LOOKED_AT] if (kind := _kind(file)))
    by = captures.variants(files) if next(kinds, "") == "capture" else ("", "")
    return Recording(with_unique_ids(_of_kind(argument, files)), by)


def _of_kind(argument: str, files: Sequence[File]) -> Iterator[Request | Unreadable]:
    """Read files of the same kind, which is determined by the first recognized file."""
    for file in files[:_LOOKED_AT]:
        kind = _kind(file)
        if kind == "capture":
            return captures.read(files)
        if kind == "har":
            return har.read(files)
        if kind == "lines":
            return request_lines.read(list(files))
        if kind == "batch" or kind == "answers":
            return _batch(argument, files)
    whole = [(file, request_lines.bodies(file)) for file in files[:_LOOKED_AT]]
    if any(requests is not None for _, requests in whole):
        others = (Unreadable(file.name, "it is no JSON body") for file, requests in whole if requests is None)
        return chain(others, *(requests for _, requests in whole if requests is not None))
    fault = _fault(files[0]) or _unknown(files[0])
    reason = "" if fault is None else f" ({fault.location}: {fault.reason})"
    where = f"{files[0].name} is" if len(files) == 1 else f"its files ({files[0].name} and others) are"
    raise ConfigError(f"{argument}: {where} of an unknown kind{reason}; known kinds:\n{KINDS}")


def _batch(argument: str, files: Sequence[File]) -> Iterator[Request | Unreadable]:
    """Read batch files, and their response files from the same directory or next to a single file."""
    if len(files) == 1 and not argument.startswith(SCHEME):
        files = [*files, *_beside(Path(argument))]
    kinds = [(file, _kind(file)) for file in files]
    requests = [file for file, kind in kinds if kind == "batch"]
    if not requests:
        raise ConfigError(f"{argument}: contains only the responses of a batch; name the file with its requests")
    return _with_remaining(kinds, batch.read(requests, [file for file, kind in kinds if kind == "answers"]))


def _with_remaining(
    kinds: Sequence[tuple[File, str]], requests: Iterator[Request | Unreadable]
) -> Iterator[Request | Unreadable]:
    for file, kind in kinds:
        if kind not in ("batch", "answers"):
            yield _fault(file) or Unreadable(file.name, "it contains neither requests nor responses of a batch")
    yield from requests


def _beside(path: Path) -> list[File]:
    """Return the response files next to a batch request file. Their names identify them."""
    stem, dot, suffix = path.name.partition(".")
    names = [path.with_name(f"{stem}{end}{dot}{suffix}") for end in _RESPONSE_SUFFIXES]
    return [file for name in names if name.is_file() for file in find(str(name))]


def _kind(file: File) -> str:
    """Return the kind of a file from its first recognized line, or "" if no line is recognized."""
    try:
        with file.open() as stream:
            if har.BEGIN.match(stream.peek(_HEAD)[:_HEAD]):
                return "har"
    except BROKEN:
        return ""
    for line in islice(lines(file), _LOOKED_AT):
        if not isinstance(line, Unreadable) and (kind := _kind_of_line(line.text)):
            return kind
    return ""


def _fault(file: File) -> Unreadable | None:
    """Return the first line that cannot be read, or None if all checked lines are readable."""
    return next((line for line in islice(lines(file), _LOOKED_AT) if isinstance(line, Unreadable)), None)


def _unknown(file: File) -> Unreadable | None:
    """Return the first line, with its names, none of which belongs to a known kind, or None if the file is empty."""
    for line in islice(lines(file), 1):
        try:
            names = (
                ", ".join(name[:40] for name in islice(members(line.text), 8)) if isinstance(line, SourceLine) else ""
            )
            return Unreadable(line.location, f"its names are {names or 'none'}")
        except Malformed as error:
            return Unreadable(line.location, str(error))
    return None


def _kind_of_line(text: str) -> str:
    try:
        fields: Mapping[str, Member] = members(text)
    except Malformed:
        return ""
    kinds = {
        "capture": captures.is_line,
        "batch": batch.is_request,
        "answers": batch.is_response,
        "lines": request_lines.is_line,
    }
    return next((kind for kind, matches in kinds.items() if matches(fields)), "")
