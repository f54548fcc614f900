"""Serving handler for large language models with LMI's APIs. It runs as an embedded server or inside DJL Serving."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("lmi-handler")
except PackageNotFoundError:  # a checkout on PYTHONPATH that was never installed
    __version__ = "0+unknown"
