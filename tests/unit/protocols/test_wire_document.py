"""docs/wire/README.md's tables of routes and errors, out of the dialects' registry and the API's document.

`python -m tests.unit.protocols.test_wire_document` rewrites them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator

from handler.config.options.tables import REASONING_PARSERS
from handler.core.errors import (
    FormatterFailed,
    GenerationFailed,
    InvalidParameter,
    ModelNotFound,
    NotJson,
    Overloaded,
    PromptTooLong,
    ServingError,
    TooLarge,
    Unauthorized,
    Unavailable,
    UnsupportedMedia,
)
from handler.core.values import SAMPLED, Task
from handler.protocols.kernel.dialect import Dialect
from handler.protocols.kernel.parameters import ROWS
from handler.protocols.openapi import DESCRIPTIONS
from handler.protocols.operations import OPERATIONS
from handler.protocols.registry import INVOCATIONS, POOLED_INVOCATIONS, POOLED_ROUTES, ROOTS, ROUTES, DispatchByField
from tests.docs.pages import fill, table
from tests.parameter_matrix import DOCUMENTS, PARAMETERS, section

DOCUMENT = DOCUMENTS / "README.md"

DIALECTS = {
    "[LMI](lmi.md)": ("lmi", "tgi_compat", "dynamic_batch"),
    "[LMI's async mode](async.md)": ("lmi_async", "lmi_async_chat", "lmi_async_completions"),
    "[LMI's chat](openai.md#lmis-chat)": ("lmi_chat", "tgi_compat_chat", "dynamic_batch_chat"),
    "[OpenAI](openai.md)": ("openai_chat", "openai_completions"),
    "[OpenAI's Responses](responses.md)": ("openai_responses", "openai_responses_count", "openai_responses_compact"),
    "[Anthropic](anthropic.md)": ("anthropic_messages", "anthropic_count"),
    "[TGI](tgi.md)": ("tgi", "tgi_generate", "tgi_generate_stream"),
    "[MindIE](other.md#mindies-route), with `option.root_schema=mindie`": ("mindie",),
    "[Triton](triton.md)": (
        "triton_generate",
        "triton_generate_stream",
        "triton_shape",
        "triton_infer",
        "triton_invocations",
    ),
    "[OpenAI's embeddings](../embeddings.md#openais-embeddings)": ("openai_embeddings",),
    "[LMI's embeddings](../embeddings.md#lmis-embeddings)": ("lmi_embedding",),
    "[TEI](../embeddings.md#teis-routes)": ("tei_embed", "tei_similarity", "tei_rerank", "tei_predict"),
    "[Rerank](../embeddings.md#rerank)": ("rerank", "rerank_v2"),
    "[Transcriptions](../media.md#transcriptions)": ("openai_transcriptions", "openai_translations"),
    "[System One](decisions.md#system-one)": ("systemone",),
    "[OpenAI's decisions](decisions.md#openais-decisions)": ("openai_decisions",),
    "[vLLM's scores](other.md#scores)": ("vllm_score",),
    "[vLLM's pooling](other.md#pooling-and-labels)": ("vllm_pooling", "vllm_classify"),
}
"""A row of the table of dialects -> the names of its schemas."""

ERRORS: dict[str, tuple[ServingError, ...]] = {
    "the body is not JSON": (NotJson("text after the document"),),
    "a field is missing, wrong, or not supported by the engine": (InvalidParameter("top_p=2: must be at most 1"),),
    "the prompt, alone or with its answer, is too long": (PromptTooLong("inputs", 9, 8),),
    "the API key is missing or wrong": (Unauthorized("no key"),),
    "unknown model": (ModelNotFound("other"),),
    "the body is too large": (TooLarge("the body is too large"),),
    "unsupported content type or encoding": (UnsupportedMedia("text/html"),),
    "the queue is full, or the wait exceeds `option.predict_timeout`": (Overloaded("the queue is full"),),
    "the engine is loading or down, or the server is stopping": (Unavailable("the engine is not ready"),),
    "the engine or a model.py's formatter failed": (GenerationFailed("the engine raised"), FormatterFailed("x")),
}
"""A row of the table of errors -> those that it is about."""

USUAL = ("validation", "invalid_request_error")
"""Types of errors that the table leaves out: most rows have them."""

COLUMNS: dict[str, Dialect] = {
    "[LMI](lmi.md)": INVOCATIONS["lmi"],
    "[TGI](tgi.md)": ROUTES["/generate"],
    "[OpenAI](openai.md)": ROUTES["/v1/chat/completions"],
    "[Anthropic](anthropic.md)": ROUTES["/v1/messages"],
    "[Triton](triton.md)": ROUTES["/v2/models/{model}/generate"],
}
"""A column of the table of errors -> the dialect that renders them."""

HERE = ("Page", "State")
"""Tags of the operations that this page explains. The pages of their APIs explain the others."""

VERSIONS = "/versions/{version}"
"""A part of Triton's routes; each is also there without it, and only that one is listed."""


def dialects() -> str:
    routes: dict[str, dict[str, None]] = {name: {} for name in DESCRIPTIONS}
    for schemas in (*({"/": root} for root in ROOTS.values()), ROUTES, *POOLED_ROUTES.values()):
        for path in [path for path in schemas if VERSIONS not in path]:
            for name, _ in _fields(schemas[path]):
                routes[name][f"`{path}`"] = None
    fields: dict[str, dict[str, None]] = {name: {} for name in DESCRIPTIONS}
    by_task = {Task.GENERATION: list(INVOCATIONS.values()), **{task: [one] for task, one in POOLED_INVOCATIONS.items()}}
    for task, modes in by_task.items():
        for name, field in (pair for mode in modes for pair in _fields(mode)):
            key = f"`{field}`" if field else "`inputs`" if task is Task.GENERATION else "any other"
            fields[name][key if task is Task.GENERATION else f"{key} ({task.value})"] = None
    rows = (
        (dialect, ", ".join(_joined(routes, names)), ", ".join(_joined(fields, names)))
        for dialect, names in DIALECTS.items()
    )
    return table(("API", "its own routes (POST)", "field of the body at `/invocations`"), rows)


def errors() -> str:
    rows = ((what, *(_error(schema, errors) for schema in COLUMNS.values())) for what, errors in ERRORS.items())
    return table(("error", *COLUMNS), rows)


def render(text: str) -> str:
    for name, part in (("dialects", dialects()), ("errors", errors())):
        text = fill(text, name, part)
    return text


def _error(schema: Dialect, errors: Iterable[ServingError]) -> str:
    """What the errors of a row have in common."""
    [cell] = {_status(schema, error) for error in errors}
    return cell


def _status(schema: Dialect, error: ServingError) -> str:
    """The status, and the code or the type."""
    answer = schema.errors.whole(error)
    body = json.loads(answer.body)
    nested = body["error"] if isinstance(body.get("error"), dict) else body
    kinds = [nested[key] for key in ("code", "type", "error_type") if isinstance(nested.get(key), str)]
    return f"{answer.status} `{kinds[0]}`" if kinds and kinds[0] not in USUAL else str(answer.status)


def _fields(schema: Dialect) -> Iterator[tuple[str, str | None]]:
    """Each dialect of a route, with the field that selects it; the first one has none."""
    if not isinstance(schema, DispatchByField):
        yield schema.name, None
        return
    yield schema.dialects[0].name, None
    yield from ((dialect.name, field) for field, dialect in schema._others.items())


def _joined(values: dict[str, dict[str, None]], names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(value for name in names for value in values[name]))


WRITTEN = "`python -m tests.unit.protocols.test_wire_document` writes it"


def test_the_document_is_up_to_date_in_wire_document() -> None:
    assert DOCUMENT.read_text() == render(DOCUMENT.read_text()), WRITTEN


def test_the_page_names_the_routes_without_inference() -> None:
    named = DOCUMENT.read_text()
    paths = [path for (_, path), operation in OPERATIONS.items() if operation.tag in HERE]
    assert paths
    assert [path for path in paths if f"`{path}`" not in named] == []


def test_the_sampled_parameters_are_marked() -> None:
    marked = {
        name for line in section(PARAMETERS).splitlines() if "†" in line for name in re.findall(r"`(\w+)` †", line)
    }
    assert marked == {row.lmi for row in ROWS if row.lmi and row.field in SAMPLED}, (
        "† in docs/wire/lmi.md: Nature.SAMPLED"
    )


def test_every_dialect_has_its_row_and_every_page_is_linked() -> None:
    rows = {name for names in DIALECTS.values() for name in names}
    without, left = sorted(set(DESCRIPTIONS) - rows), sorted(rows - set(DESCRIPTIONS))
    here = "DIALECTS in tests/unit/protocols/test_wire_document.py"
    assert not without, f"{', '.join(without)}: write a page in docs/wire/, and add a row to {here}; then {WRITTEN}"
    assert not left, f"{', '.join(left)}: no dialect has this name; remove it from {here}"
    linked = set(re.findall(r"\]\((\w[\w-]*\.md)", DOCUMENT.read_text()))
    alone = sorted({path.name for path in DOCUMENTS.glob("*.md")} - {"README.md"} - linked)
    assert not alone, f"{', '.join(alone)}: add a row to {here}, or a link to docs/wire/README.md"


def test_the_families_of_thoughts_that_have_a_row_exist() -> None:
    rows = re.findall(r"^\| (`.+?) \|", section("reasoning.md#reasoning"), re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert len(named) == len(set(named)) > 6
    assert set(named) < set(REASONING_PARSERS), "`lmi options reasoning_parser` lists the others"


if __name__ == "__main__":
    DOCUMENT.write_text(render(DOCUMENT.read_text()))
