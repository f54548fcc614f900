"""Imports the worker's modules, for which a stand-in is djl_python. Without Java, the package is not installed."""

from __future__ import annotations

import sys

import pytest

from tests.doubles import djl_python

with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, "djl_python", djl_python.stand_in())
    import handler.djl.worker  # noqa: F401  # with all the other modules that import djl_python
