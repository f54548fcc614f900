"""The documents' options: those that a page names exist, and docs/tuning.md has their defaults."""

from __future__ import annotations

import re

from handler.config.engines import ENGINES
from handler.config.options import SERVER_ENVIRONMENT
from handler.config.options.names import find_option, key_of
from handler.config.options.option import Gone
from tests.docs.pages import ROOT, options_by_engine, pages
from tests.one_test import in_one_test

EXCEPTIONS = {
    "option.entryPoint": "DJL Serving reads it; the embedded server takes a few values",
    "option.cluster_size": "LMI's, as an example of a refused one",
    **dict.fromkeys(
        ("option.sessions_s3url",),
        "LMI's, named as refused",
    ),
    "option.max_model_length": "misspelt, to show the message",
    "option.max_rolling_batch": "a mistake of public notebooks, which adopt.md shows as one",
    **dict.fromkeys(("option.key", "option.x", "option.x_y", "x_y"), "stands for any option"),
}
"""Names in the documents that are no options here, and why they are there."""

_OPTION = re.compile(r"(?<![\w.])option\.\w+")
_VARIABLE = re.compile(r"\b(?:OPTION|SERVING)_[A-Z][A-Z0-9_]+\b")
_TABLE = re.compile(r"<!-- (options|variables|arguments): begin -->.*?<!-- \1: end -->", re.DOTALL)
"""A table of the names of LMI, TGI or vLLM, which other tests hold to the code."""

_DEFAULT = re.compile(r"^\| `([\w.]+)` \| ([\d,]+)(?: s)? \|", re.MULTILINE)


def named(text: str) -> set[str]:
    """Return the options that a text names, also by their variables."""
    text = _TABLE.sub("", text)
    return {*_OPTION.findall(text), *map(key_of, _VARIABLE.findall(text))}


def is_option(key: str) -> bool:
    """Whether the server, DJL Serving or an engine has it: ours, or as an argument of the engine's own."""
    options = [option for engine in ENGINES if (option := find_option(key, engine)) is not None]
    return key in SERVER_ENVIRONMENT or any(not isinstance(option.parse, Gone) for option in options)


@in_one_test("page", pages())
def test_the_options_of_a_page_exist(page: str) -> None:
    keys = named((ROOT / page).read_text()) - EXCEPTIONS.keys()
    assert {key for key in keys if not is_option(key)} == set()


def test_each_exception_is_needed() -> None:
    keys = set().union(*(named((ROOT / page).read_text()) for page in pages()))
    assert EXCEPTIONS.keys() - keys == set()
    assert {key for key in EXCEPTIONS if is_option(key)} == set()


def test_names_that_are_no_options_are_found() -> None:
    text = "`option.job_queue_size`, SERVING_JOB_QUEUE_SIZE, OPTION_MAX_MODEL_LEN=1, `option.seed`; an option. Next"
    assert {key for key in named(text) if not is_option(key)} == {"option.job_queue_size"}


def test_the_defaults_are_the_codes() -> None:
    defaults = dict(_DEFAULT.findall((ROOT / "docs" / "tuning.md").read_text()))
    assert len(defaults) == 3
    for name, value in defaults.items():
        option = find_option(name, "vllm")
        assert option is not None
        assert option.default == float(value.replace(",", "")), name


def test_the_site_has_a_page_of_options_for_each_engine() -> None:
    found = options_by_engine((ROOT / "docs" / "options.md").read_text())
    assert found.keys() == ENGINES.keys()
    assert all("(options.md#where-options-come-from)" in page for page in found.values())
    names = {engine: re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE) for engine, page in found.items()}
    for engine, here in names.items():
        assert len(here) == len(set(here)) > 70
        options = [find_option(name, engine) for name in here]
        assert all(option is not None and not isinstance(option.parse, Gone) for option in options)
    assert "option.enforce_eager" in names["vllm"]
    assert "option.enforce_eager" not in names["trtllm"]
    assert {"option.guide_timeout", "job_queue_size"} <= {*names["openvino"]}
