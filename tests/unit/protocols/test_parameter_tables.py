"""The parameter tables of docs/wire/: no row is missing, and engines and notes are those that exist."""

from __future__ import annotations

import re
from collections.abc import Collection

import pytest

from handler.config.engines import ENGINES
from handler.protocols.kernel import tensors
from handler.protocols.kernel.parameters import PARAMETERS, REQUEST_FIELDS
from handler.protocols.lmi.chat import TABLE as CHAT_TABLE
from handler.protocols.lmi.request import TABLE as LMI_TABLE
from handler.protocols.openai import request as openai_parameters
from handler.protocols.openai.completions import OpenAiEmbeddings
from handler.protocols.openai.request import HARMLESS
from handler.protocols.rerank import request as rerank
from handler.protocols.tei import request as tei
from handler.protocols.tgi import mindie
from handler.protocols.tgi import native as tgi_request
from handler.protocols.triton.request import INPUTS
from tests import parameter_matrix as matrix
from tests.one_test import in_one_test
from tests.parameter_matrix import (
    CHAT_VALUES,
    MINDIE_VALUES,
    TENSOR_VALUES,
    TGI_VALUES,
    VALUES,
    section,
    table,
)

TRITON, OPENAI = "triton.md#inputs", "openai.md#request"
EMBEDDINGS = ("embeddings.md#openais-embeddings", "embeddings.md#teis-routes", "embeddings.md#rerank")


def check(rows: Collection[str], read: Collection[str], heading: str, values: Collection[str] | None = None) -> None:
    """Check that a table has a row for each name that is read, once, and that `parameter_matrix.py` has its value."""
    assert len(rows) == len(set(rows)), f"docs/wire/{heading} has a name twice: {sorted(rows)}"
    missing, left = sorted(set(read) - set(rows)), sorted(set(rows) - set(read))
    assert not missing, f"docs/wire/{heading} needs rows for {', '.join(missing)}"
    assert not left, f"docs/wire/{heading} has rows for what is not read: {', '.join(left)}"
    if values is not None:
        unlike = sorted(set(read) ^ set(values))
        assert not unlike, f"tests/parameter_matrix.py must have values of what is read, and of no other: {unlike}"


def test_every_parameter_has_its_row() -> None:
    rows, more = table(), table(matrix.TENSORS)
    check(rows, (set(PARAMETERS) | set(REQUEST_FIELDS) | {"outputs"}) - {"stream"}, matrix.PARAMETERS, VALUES)
    check(more, set(tensors.TENSORS) - set(PARAMETERS), matrix.TENSORS, TENSOR_VALUES)
    assert set(rows) | set(more) | {"stream"} == set(LMI_TABLE.parameters) | set(REQUEST_FIELDS)


def test_every_chat_parameter_has_its_row() -> None:
    """In OpenAI's table; LMI's chats have no others."""
    rows = set(table(matrix.CHAT))
    assert {*CHAT_VALUES, *CHAT_TABLE.parameters} <= rows
    assert set(CHAT_TABLE.parameters) < set(openai_parameters.CHAT.parameters) | {*HARMLESS, "model"}


def test_every_parameter_of_tgis_and_mindies_has_its_row() -> None:
    check(table(matrix.TGI), tgi_request.PARAMETERS, matrix.TGI, TGI_VALUES)
    check(table(matrix.MINDIE), mindie.KINDS, matrix.MINDIE, MINDIE_VALUES)


def test_every_input_of_triton_has_its_row_and_is_what_that_names() -> None:
    rows = table(TRITON)
    check(rows, INPUTS, TRITON)
    for name, row in rows.items():
        if known := row["as"].strip("`"):
            known = name.removeprefix("sampling_param_") if known.startswith("the same name") else known
            assert INPUTS[name].parameter.field == LMI_TABLE.parameters[known].field, name
        assert row["meaning"].startswith("refused") == _refuses(name), name


def test_every_field_of_openais_has_its_row() -> None:
    found: dict[str, list[str]] = {"chat": [], "completions": []}
    for cell in re.findall(r"^\| ([^|]*`[^|]*)\|", section(OPENAI), re.MULTILINE):
        both, *others = re.split(r"\b(chat|completions): ", cell)
        for route, names in [*((route, both) for route in found), *zip(others[::2], others[1::2], strict=True)]:
            found[route] += re.findall(r"`(\w+)`", names)
    every = {*HARMLESS, "model", "stream", "stream_options"}
    tools = {"tools", "tool_choice", "parallel_tool_calls"}
    check(found["chat"], {*openai_parameters.CHAT.parameters, *every, *tools, "messages"}, f"{OPENAI}, chats")
    check(found["completions"], {*openai_parameters.COMPLETIONS.parameters, *every, "prompt"}, f"{OPENAI}, completions")


def test_every_field_of_embeddings_and_rerank_has_its_row() -> None:
    openai, tei_routes, ranking = (
        re.findall(r"^\| (`.*?)\|(.*?)\|", section(heading), re.MULTILINE) for heading in EMBEDDINGS
    )
    fields = [name for names, _ in openai for name in re.findall(r"`(\w+)`", names)]
    check(fields, {*OpenAiEmbeddings.table.parameters, "input", "model", "user"}, EMBEDDINGS[0])
    fields = [name for names, _ in ranking for name in re.findall(r"`(\w+)`", names)]
    check(fields, {*rerank.TABLE.parameters, "query", "documents", "model"}, EMBEDDINGS[2])
    of_route: dict[str, set[str]] = {"/embed": set(), "/similarity": set(), "/rerank": set(), "/predict": set()}
    for names, routes in tei_routes:
        for route in of_route if routes.strip() == "all" else re.findall(r"`(/\w+)`", routes):
            of_route[route] |= set(re.findall(r"`(\w+)`", names))
    assert of_route == {
        "/embed": {*tei.EMBED.parameters, "inputs"},
        "/similarity": {*tei.SIMILARITY.parameters, "inputs", "parameters"},
        "/rerank": {*tei.RERANK.parameters, "query", "texts"},
        "/predict": {*tei.PREDICT.parameters, "inputs"},
    }


def _refuses(name: str) -> bool:
    """Whether an input is there only to be refused."""
    parameter = INPUTS[name].parameter
    if parameter.field or name in ("guided_decoding_guide_type", "sampling_parameters"):  # which are joined before
        return False
    with pytest.raises(ValueError, match="is not supported"):
        parameter.read("x")
    return True


@in_one_test("heading", [matrix.PARAMETERS, matrix.TENSORS])
def test_engines_and_notes_are_those_that_exist(heading: str) -> None:
    for name, row in table(heading).items():
        found = matrix.refusing(heading, name)
        assert found.keys() <= set(ENGINES) - {"openai"}, name  # docs/engines-by-url.md has those of servers
        assert len(found) == len(row[matrix.REFUSED_BY].split(", ")) * bool(row[matrix.REFUSED_BY]), name


def test_every_note_is_used() -> None:
    cells = [
        row[matrix.REFUSED_BY] for heading in (matrix.PARAMETERS, matrix.TENSORS) for row in table(heading).values()
    ]
    assert {letter for cell in cells for letter in cell if not letter.isascii()} == set(matrix.notes())
