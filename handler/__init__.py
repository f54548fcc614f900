"""Serving handler for large language models with LMI's APIs. It runs as an embedded server or inside DJL Serving."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

try:
    __version__ = version("lmi-handler")
except PackageNotFoundError:  # a checkout on PYTHONPATH that was never installed
    __version__ = "0+unknown"
try:
    __commit__ = Path(__file__).with_name("commit.txt").read_text().strip()  # `make dist` writes it
except OSError:  # a checkout
    __commit__ = ""
