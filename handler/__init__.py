"""One serving handler for large language models: LMI's APIs over a rolling batcher, embedded or inside DJL Serving."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("lmi-handler")
except PackageNotFoundError:  # a checkout on PYTHONPATH that was never installed
    __version__ = "0+unknown"
