"""The serving.properties at the top: it loads as it is, names every option, and shows the true defaults."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from handler.config.loader import read_config
from handler.config.options import COMMON, KNOWN, Option
from tests.one_test import in_one_test

FILE = Path(__file__).parents[3] / "serving.properties"
SHOWN = dict(re.findall(r"^#?([\w.]+)=(.*)$", FILE.read_text(), re.MULTILINE))


def test_it_loads_with_defaults_everywhere() -> None:
    """But for the mode, which option.rolling_batch=scheduler chooses."""
    found = read_config(properties=FILE, environ={}).checked()
    assert replace(found, warnings=(), async_mode=None) == read_config(environ={}).checked()


@in_one_test("option", COMMON, ids=lambda option: option.key)
def test_every_option_that_is_not_an_engines_own_is_shown_with_its_default(option: Option) -> None:
    shown = SHOWN[option.key]
    wanted = None if option.by_engine else option.default  # a line with one engine's would be wrong for another
    assert (option.parse(shown) if shown else None) == wanted


def test_it_shows_nothing_that_is_unknown() -> None:
    assert set(SHOWN) <= set(KNOWN)
