"""docs/engines-by-url.md; `python -m tests.unit.engines.test_url_document` rewrites its tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from handler.config.config import Config
from handler.config.options.tables import REMOTE
from handler.core.values import Sampling, StructuredOutput
from handler.engines.base import Capabilities, EngineConfig
from handler.engines.grpc.client import CONTRACTS
from handler.engines.openai import completions
from handler.engines.openai.engine import capabilities
from handler.engines.openai.kinds import KINDS
from handler.engines.openai.sglang.api import generate
from tests.docs.pages import fill, table
from tests.parameter_matrix import FIELD_VALUES

DOCUMENT = Path(__file__).parents[3] / "docs" / "engines-by-url.md"
HANDLERS_OWN = {
    "stop", "include_stop", "skip_special_tokens", "marks", "thoughts", "n", "best_of", "do_sample",
    "length_penalty", "early_stopping", "prompt_top_logprobs", "thinking_token_budget",
}  # fmt: skip
"""Fields that no engine sees, or that go with another that is refused."""

NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "bad_sequences": "bad_words",
    "structured_output": "structured output",
    "return_context_logits": "outputs: context_logits",
    "return_generation_logits": "outputs: generation_logits",
}
BODIES = {**{name: kind.body for name, kind in completions.KINDS.items()}, "sglang": generate}
"""A kind -> what makes the body of a request."""
OWN_TESTS = {"llamacpp"}
"""Kinds whose requests other tests hold against their capabilities."""
GUIDES = {"json_schema": "{}", "json_object": "", "regex": "a", "grammar": 'root ::= "c"', "choice": '["a"]'}


def _able(kind: str) -> Capabilities:
    return capabilities(EngineConfig(Config(engine_options={"base_url": ("http://x/v1",), "base_url_kind": kind})))


def cell(able: Capabilities, field: str) -> str:
    """Return what a table says about a field. The error that a client gets has the reason."""
    if field in able.unsupported:
        return "refused"
    return f"yes, up to {able.limits[field]:g}" if field in able.limits else "yes"


def rows(kinds: Mapping[str, Capabilities]) -> list[tuple[str, ...]]:
    """Return a row for each outcome of parameters, without the parameters that each kind supports."""
    same: dict[tuple[str, ...], list[str]] = {}
    for field in [field for field in Sampling._fields if field not in HANDLERS_OWN]:
        cells = tuple(cell(able, field) for able in kinds.values())
        if {*cells} != {"yes"}:
            same.setdefault(cells, []).append(f"`{NAMES.get(field, field)}`")
    return [(", ".join(names), *cells) for cells, names in same.items()]


def parameters(kinds: Mapping[str, Capabilities]) -> str:
    """Return a table of what each kind does with the parameters that one of them lacks."""
    return table(("parameters", *kinds), rows(kinds))


def render() -> str:
    """Return the page with the tables of both engines."""
    page = fill(DOCUMENT.read_text(), "parameters", parameters({kind: _able(kind) for kind in KINDS}))
    able = {name: one.capabilities for name, one in CONTRACTS.items()}
    return fill(page, "grpc parameters", table(("parameters and features", *able), [*rows(able), *_features()]))


def _features() -> list[tuple[str, ...]]:
    reasons = {
        "[embeddings](embeddings.md)": [one.no_embeddings for one in CONTRACTS.values()],
        "[LoRA adapters](adapters.md)": [one.capabilities.no_adapters for one in CONTRACTS.values()],
        "[images and audio](media.md)": [one.no_media for one in CONTRACTS.values()],
    }
    return [(name, *("refused" if reason else "yes" for reason in found)) for name, found in reasons.items()]


def test_the_document_has_every_parameter_as_the_code_has_it() -> None:
    assert DOCUMENT.read_text() == render(), "`python -m tests.unit.engines.test_url_document` writes it"


def test_the_document_names_every_option() -> None:
    assert all(f"`{option.key}`" in DOCUMENT.read_text() for option in REMOTE)


def test_what_is_not_refused_changes_the_request() -> None:
    base: dict[str, Any] = {"max_new_tokens": 5, "do_sample": True, "logprobs": False}
    assert BODIES.keys() == KINDS.keys() - OWN_TESTS, "a kind needs the body of a request"
    for kind, body in BODIES.items():
        unsupported = _able(kind).unsupported
        plain = body("m", [1], Sampling(**base))
        for field in set(Sampling._fields) - unsupported.keys() - HANDLERS_OWN:
            sampling = Sampling(**{**base, field: FIELD_VALUES[field]})
            assert body("m", [1], sampling) != plain, field
        guided = [
            body("m", [1], Sampling(**base, structured_output=StructuredOutput(*guide)))
            for guide in {**GUIDES, "regex": "b"}.items()  # for SGLang, a choice is a regular expression too
        ]
        assert len({str(body) for body in (plain, *guided)}) == 1 + len(GUIDES)


def test_what_a_contract_does_not_refuse_changes_the_message() -> None:
    base: dict[str, Any] = {"max_new_tokens": 5, "do_sample": True, "logprobs": False}
    for contract in CONTRACTS.values():
        unsupported = contract.capabilities.unsupported
        plain = contract.request("", [1], Sampling(**base))
        for field in set(Sampling._fields) - unsupported.keys() - HANDLERS_OWN:
            assert contract.request("", [1], Sampling(**{**base, field: FIELD_VALUES[field]})) != plain, field
        guided = [
            contract.request("", [1], Sampling(**base, structured_output=StructuredOutput(*guide)))
            for guide in {**GUIDES, "regex": "b"}.items()  # a choice is a regular expression too
        ]
        assert len({str(message) for message in (plain, *guided)}) == 1 + len(GUIDES)


if __name__ == "__main__":
    DOCUMENT.write_text(render())
