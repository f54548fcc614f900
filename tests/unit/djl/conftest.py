"""Has the worker's modules imported before the tests import them."""

from __future__ import annotations

import tests.doubles.djl_modules  # noqa: F401
