"""Arguments of `lmi bench` and `lmi deploy bench` that say where a result goes."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from handler.bench.report.curves import Curve

_INSTALL = "pip install 'lmi-handler[bench]'"
_TERMINAL = Path("-")


def add_arguments(parser: argparse.ArgumentParser, picture: Path) -> None:
    """Add the arguments.

    Args:
        picture: the default of `--plot`.
    """
    report = parser.add_argument_group("report")
    report.add_argument("--output", type=Path, metavar="FILE", help="save the line of JSON there too, for --compare")
    report.add_argument("--title", metavar="TEXT", help="of the plot (default: what was measured)")
    choice = report.add_mutually_exclusive_group()
    choice.add_argument(
        "--plot",
        type=_picture,
        metavar="FILE",
        help=f"the plot, as .png, .svg or .pdf; - draws bars "
        f"in the terminal (default {picture}; bars where matplotlib is missing)",
    )
    choice.add_argument("--no-plot", action="store_true", help="draw nothing")
    parser.set_defaults(default_picture=picture)


def print_result(arguments: argparse.Namespace, document: Mapping[str, Any]) -> int:
    """Save the document, draw the plot, print the document as the last line; return status 1 if a file failed."""
    from handler.bench.report.curves import curve_of

    line, status = json.dumps(document), 0
    if arguments.output is not None:
        status |= _write(arguments.output, lambda: arguments.output.write_text(line + "\n", "utf-8"))
    status |= draw(arguments, [curve_of(document)])
    print(line)
    return status


def draw(arguments: argparse.Namespace, curves: Sequence[Curve]) -> int:
    """Save the plot, or draw it in the terminal; return status 1 if its file cannot be written."""
    if arguments.no_plot:
        return 0
    path = arguments.plot
    if path is None:
        path = arguments.default_picture if _has("matplotlib") else _TERMINAL
    if path != _TERMINAL:
        from handler.bench.report import plot

        return _write(path, lambda: plot.save(path, curves, arguments.title))
    if _has("rich"):
        from handler.bench.report import bars

        bars.show(curves)
    if arguments.plot is None:
        print(f"for a plot in a file install matplotlib: {_INSTALL}", file=sys.stderr)
    return 0


def _write(path: Path, write: Callable[[], object]) -> int:
    """Write a file and name it; a failure does not end the command, as the measurement would be lost."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write()
    except OSError as error:
        print(f"cannot write {path}: {error.strerror}", file=sys.stderr)
        return 1
    print(f"written: {path}")
    return 0


def _picture(text: str) -> Path:
    """Check before the measurement that this file can be drawn."""
    path = Path(text)
    package = "rich" if path == _TERMINAL else "matplotlib"
    if not _has(package):
        raise argparse.ArgumentTypeError(f"needs {package}: {_INSTALL}")
    if path != _TERMINAL and path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text}: must end with .png, .svg or .pdf")
    return path


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
