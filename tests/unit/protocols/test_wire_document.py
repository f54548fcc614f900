"""docs/wire/: the README's tables of routes and errors, out of the dialects' registry and the API's document; and each
page's table of its answers' fields, out of their declarations.

`python -m tests.unit.protocols.test_wire_document` rewrites them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Iterator

from handler.config.options.common import REASONING_PARSERS
from handler.core.errors import (
    FormatterFailed,
    GenerationFailed,
    InternalError,
    InvalidParameter,
    ModelNotFound,
    NotJson,
    Overloaded,
    PromptTooLong,
    ServingError,
    TooLarge,
    TooSlow,
    Unauthorized,
    Unavailable,
    UnsupportedMedia,
)
from handler.core.values import Task
from handler.protocols.kernel.base import Dialect
from handler.protocols.kernel.schema.types import components_of
from handler.protocols.openapi.document import DESCRIPTIONS, OPERATIONS
from handler.protocols.registry import INVOCATIONS, POOLED_INVOCATIONS, POOLED_ROUTES, ROOTS, ROUTES, DispatchByField
from tests.docs.pages import fill, table
from tests.one_test import in_one_test
from tests.parameter_matrix import DOCUMENTS, section

DOCUMENT = DOCUMENTS / "README.md"

DIALECTS = {
    "[LMI](lmi.md)": ("lmi", "tgi_compat", "dynamic_batch"),
    "[LMI's async mode](async.md)": ("lmi_async", "lmi_async_chat", "lmi_async_completions"),
    "[LMI's chat](chat.md)": ("lmi_chat", "tgi_compat_chat", "dynamic_batch_chat"),
    "[OpenAI](openai.md)": ("openai_chat", "openai_completions"),
    "[OpenAI's Responses](responses.md)": ("openai_responses", "openai_responses_count"),
    "[Anthropic](anthropic.md)": ("anthropic_messages", "anthropic_count"),
    "[TGI](tgi.md)": ("tgi", "tgi_generate", "tgi_generate_stream"),
    "[MindIE](mindie.md), with `option.root_schema=mindie`": ("mindie",),
    "[Triton](triton.md)": ("triton_generate", "triton_generate_stream", "triton_shape"),
    "[OpenAI's embeddings](embeddings.md#openais-embeddings)": ("openai_embeddings",),
    "[LMI's embeddings](embeddings.md#lmis-embeddings)": ("lmi_embedding",),
    "[TEI](embeddings.md#teis-routes)": ("tei_embed", "tei_similarity", "tei_rerank", "tei_predict"),
    "[Rerank](embeddings.md#rerank)": ("rerank", "rerank_v2"),
    "[Transcriptions](audio.md)": ("openai_transcriptions", "openai_translations"),
    "[vLLM's scores](vllm.md#scores)": ("vllm_score",),
    "[vLLM's pooling](vllm.md#pooling-and-labels)": ("vllm_pooling", "vllm_classify"),
}
"""A row of the table of dialects -> the names of its schemas."""

ERRORS: dict[str, ServingError] = {
    "the body is not JSON": NotJson("text after the document"),
    "a field is missing or wrong, or the engine lacks it": InvalidParameter("top_p=2: must be at most 1"),
    "the prompt, or prompt and answer, are too long": PromptTooLong("inputs", 9, 8),
    "no key, or a wrong one": Unauthorized("no key"),
    "unknown model": ModelNotFound("other"),
    "the body does not arrive in time": TooSlow("the body did not arrive"),
    "the body is too large": TooLarge("the body is too large"),
    "content type or encoding": UnsupportedMedia("text/html"),
    "the queue is full, or the wait too long": Overloaded("the queue is full"),
    "the engine is loading or down, the server stops": Unavailable("the engine is not ready"),
    "the engine failed": GenerationFailed("the engine raised"),
    "a model.py's formatter raised": FormatterFailed("x"),
    "a bug of the server": InternalError("internal error"),
}

COLUMNS: dict[str, Dialect] = {
    "[LMI](lmi.md)": INVOCATIONS["lmi"],
    "[TGI](tgi.md)": ROUTES["/generate"],
    "[OpenAI](openai.md)": ROUTES["/v1/chat/completions"],
    "[Anthropic](anthropic.md)": ROUTES["/v1/messages"],
    "[Triton](triton.md)": ROUTES["/v2/models/{model}/generate"],
    "[TEI](embeddings.md#teis-routes)": POOLED_ROUTES[Task.EMBEDDING]["/embed"],
    "[Cohere](embeddings.md#rerank)": POOLED_ROUTES[Task.RERANK]["/v1/rerank"],
}
"""A column of the table of errors -> the dialect that renders them."""

PAGES = {
    "Page": "[serving](../serving.md)",
    "State": "",
    "Adapters": "[adapters](../adapters.md)",
    "TGI": "[TGI](tgi.md)",
    "OpenAI": "[OpenAI](openai.md)",
    "Triton": "[Triton](triton.md)",
    "vLLM": "[vLLM](vllm.md)",
}
"""An operation's tag -> where more is said about it."""


def dialects() -> str:
    routes: dict[str, dict[str, None]] = {name: {} for name in DESCRIPTIONS}
    for schemas in (*({"/": root} for root in ROOTS.values()), ROUTES, *POOLED_ROUTES.values()):
        for path, schema in schemas.items():
            for name, _ in _fields(schema):
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
    return table(("API", "routes of its own (POST)", "field of the body at `/invocations`"), rows)


def operations() -> str:
    rows = (
        (f"{method} `{path}`", operation.summary, PAGES[operation.tag])
        for (method, path), operation in OPERATIONS.items()
        if not path.startswith("/models/{model}/")
    )
    return table(("route", "what it returns or does", "more"), rows)


def errors() -> str:
    rows = ((what, *(_error(schema, error) for schema in COLUMNS.values())) for what, error in ERRORS.items())
    return table(("error", *COLUMNS), rows)


def answers(names: Iterable[str]) -> str:
    """List the fields of the dialects' answers, those that may be absent with a question mark."""
    told = [DESCRIPTIONS[name] for name in names]
    kinds = [kind for one in told for kind in (one.answer, one.chunk, one.error)]
    rows = (
        (f"`{name}`", ", ".join(_field(field, shape.get("required", ())) for field in shape["properties"]))
        for name, shape in sorted(components_of(kinds).items())
        if shape["properties"].keys() - {"code", "type", "message", "error"}
    )
    return table(("type in the API's document", "fields; ? may be absent"), rows)


def _field(name: str, required: Container[str]) -> str:
    return f"`{name}`" if name in required else f"`{name}`?"


def pages() -> dict[str, list[str]]:
    """Return the dialects of each page."""
    found: dict[str, list[str]] = {}
    for row, names in DIALECTS.items():
        match = re.search(r"\((\w+\.md)", row)
        assert match is not None
        found.setdefault(match[1], []).extend(names)
    return found


def render(text: str) -> str:
    for name, part in (("dialects", dialects()), ("operations", operations()), ("errors", errors())):
        text = fill(text, name, part)
    return text


def _error(schema: Dialect, error: ServingError) -> str:
    """The status, and the code or the type."""
    answer = schema.errors.whole(error)
    body = json.loads(answer.body)
    nested = body["error"] if isinstance(body.get("error"), dict) else body
    kinds = [nested[key] for key in ("code", "type", "error_type") if isinstance(nested.get(key), str)]
    return f"{answer.status} `{kinds[0]}`" if kinds else str(answer.status)


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


def test_the_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == render(DOCUMENT.read_text()), WRITTEN


@in_one_test("page", pages())
def test_the_fields_of_answers_are_up_to_date(page: str) -> None:
    text = (DOCUMENTS / page).read_text()
    assert text == fill(text, "fields", answers(pages()[page])), WRITTEN


def test_every_dialect_has_its_row_and_every_page_is_linked() -> None:
    rows = {name for names in DIALECTS.values() for name in names}
    without, left = sorted(set(DESCRIPTIONS) - rows), sorted(rows - set(DESCRIPTIONS))
    here = "DIALECTS in tests/unit/protocols/test_wire_document.py"
    assert not without, f"{', '.join(without)}: write a page in docs/wire/, and add a row to {here}; then {WRITTEN}"
    assert not left, f"{', '.join(left)}: no dialect has this name; remove it from {here}"
    linked = set(re.findall(r"\]\((\w[\w-]*\.md)", DOCUMENT.read_text()))
    alone = sorted({path.name for path in DOCUMENTS.glob("*.md")} - {"README.md"} - linked)
    assert not alone, f"{', '.join(alone)}: add a row to {here}, or a link to docs/wire/README.md"


def test_every_family_of_thoughts_has_its_row() -> None:
    rows = re.findall(r"^\| (`.+?) \|", section("reasoning.md#reasoning"), re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(REASONING_PARSERS)


if __name__ == "__main__":
    DOCUMENT.write_text(render(DOCUMENT.read_text()))
    for page, names in pages().items():
        path = DOCUMENTS / page
        path.write_text(fill(path.read_text(), "fields", answers(names)))
