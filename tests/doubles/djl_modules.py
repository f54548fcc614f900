"""The modules of DJL's worker, for which a stand-in is djl_python. Without Java, the package is not installed."""

from __future__ import annotations

import sys

import pytest

from tests.doubles import djl_python

with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, "djl_python", djl_python.stand_in())
    from handler.djl import modes, wire, worker

__all__ = ["modes", "wire", "worker"]
