from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from handler.plugins.stand_ins.djl import DJL_PYTHON


@pytest.fixture(autouse=True)
def _imports_are_undone() -> Iterator[None]:
    """Begin without a model.py, djl_python or its stand-in, which other tests of the same process may have left."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("model", "djl_python")]:
        del sys.modules[name]
    modules, path, finders = set(sys.modules), list(sys.path), list(sys.meta_path)
    sys.meta_path[:] = [finder for finder in finders if finder is not DJL_PYTHON]
    yield
    for name in set(sys.modules) - modules:
        del sys.modules[name]
    sys.path[:], sys.meta_path[:] = path, finders
