"""Each request field of vLLM, SGLang, TGI and llama.cpp is read, refused by name, or without effect for a reason."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from handler.core.errors import ServingError
from handler.protocols.kernel.dialect import Dialect
from handler.protocols.openai.request import HARMLESS, OpenAiDialect
from handler.protocols.openapi import DESCRIPTIONS
from handler.protocols.tgi.native import PARAMETERS
from tests.unit.protocols.answers import CAPABLE, DIALECTS


class Peer(NamedTuple):
    """Request classes of a peer, whose fields a dialect of ours gets.

    Attributes:
        files: the files that declare the classes, or C++ code that declares the fields.
        classes: the names of the classes; none for C++.
    """

    files: str
    classes: tuple[str, ...]
    dialect: str


_VLLM, _SGLANG, _TGI, _LLAMA_CPP = "vllm-source/vllm", "fields/protocol.py", "fields", "fields/server-schema.cpp"
PEERS: dict[str, Peer] = {
    "vLLM's chats": Peer(_VLLM, ("ChatCompletionRequest",), "openai_chat"),
    "vLLM's completions": Peer(_VLLM, ("CompletionRequest",), "openai_completions"),
    "vLLM's responses": Peer(_VLLM, ("ResponsesRequest",), "openai_responses"),
    "vLLM's messages": Peer(_VLLM, ("AnthropicMessagesRequest",), "anthropic_messages"),
    "vLLM's token counts": Peer(_VLLM, ("AnthropicCountTokensRequest",), "anthropic_count"),
    "vLLM's embeddings": Peer(_VLLM, ("EmbeddingCompletionRequest", "EmbeddingChatRequest"), "openai_embeddings"),
    "vLLM's ranks": Peer(_VLLM, ("RerankRequest",), "rerank"),
    "vLLM's transcripts": Peer(_VLLM, ("TranscriptionRequest",), "openai_transcriptions"),
    "SGLang's chats": Peer(_SGLANG, ("ChatCompletionRequest",), "openai_chat"),
    "SGLang's completions": Peer(_SGLANG, ("CompletionRequest",), "openai_completions"),
    "SGLang's responses": Peer(_SGLANG, ("ResponsesRequest",), "openai_responses"),
    "SGLang's embeddings": Peer(_SGLANG, ("EmbeddingRequest",), "openai_embeddings"),
    "TGI's chats": Peer(_TGI, ("ChatCompletionInput",), "openai_chat"),
    "llama.cpp's chats": Peer(_LLAMA_CPP, (), "openai_chat"),
    "llama.cpp's completions": Peer(_LLAMA_CPP, (), "openai_completions"),
}

_PLACE = "the server chooses where a request runs"
_REPORT = "asks only for more about the response, such as timings"
_SPEED = "affects only the speed"
_ALONE = "has an effect only beside a field that is refused"
_SCREEN = "is for the use of llama.cpp's own server"
WITHOUT_EFFECT: dict[str, dict[str, str]] = {
    "vLLM's": {
        "length_penalty": "has an effect only with beam search, which is refused",
    },
    "SGLang's": {
        **dict.fromkeys(("data_parallel_rank", "disagg_prefill_dp_rank", "routed_dp_rank"), _PLACE),
        **dict.fromkeys(("return_cached_tokens_details", "return_spec_tokens_details"), _REPORT),
        "rid": "names the request in SGLang's log",
        "custom_labels": "are labels of SGLang's metrics",
        "routed_experts_start_len": _ALONE,
    },
    "llama.cpp's": {
        **dict.fromkeys(
            (
                "adaptive_decay", "dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers",
                "dynatemp_exponent", "mirostat_eta", "mirostat_tau", "repeat_last_n", "xtc_threshold",
                "reasoning_budget_end_tag", "reasoning_budget_end_tags", "reasoning_budget_message",
                "reasoning_budget_start_tag", "reasoning_control",
            ),
            _ALONE,
        ),
        **dict.fromkeys(
            (
                "chat_format", "chat_parser", "generation_prompt", "grammar_lazy", "grammar_triggers",
                "preserved_tokens",
            ),
            _SCREEN,
        ),
        **dict.fromkeys(
            (
                "backend_sampling", "cache_prompt", "n_cache_reuse", "sse_ping_interval", "speculative.n_max",
                "speculative.n_min", "speculative.ngram_min_hits", "speculative.ngram_size_m",
                "speculative.ngram_size_n", "speculative.p_min", "speculative.type",
            ),
            _SPEED,
        ),
        **dict.fromkeys(("n_discard", "n_keep"), "a context is never shifted: a prompt that is too long is refused"),
        **dict.fromkeys(
            ("post_sampling_probs", "return_progress", "return_tokens", "timings_per_token", "verbose"), _REPORT
        ),
        "continue_final_message": "completions have no messages",
    },
}  # fmt: skip
"""The fields that our tables do not name, by peer, with the reason why each has no effect here."""


@pytest.fixture(scope="module")
def sources(request: pytest.FixtureRequest) -> Path:
    directory = request.config.getoption("--templates")
    assert directory, "make test-templates gives --templates"
    return Path(directory)


@pytest.mark.parametrize("label", PEERS)
def test_each_field_is_read_refused_or_without_effect(label: str, sources: Path) -> None:
    peer = PEERS[label]
    declared, dialect = fields(peer, sources), DIALECTS[peer.dialect]
    assert len(declared) > 7, "the classes have moved"
    unread = declared - known(dialect)
    refused = {name for name in unread if is_refused(peer.dialect, name)}
    reasons = WITHOUT_EFFECT.get(label.split(" ", 1)[0], {})
    assert sorted(unread - refused - reasons.keys()) == [], "read these, refuse them, or give the reason here"


def test_no_reason_is_left_over(sources: Path) -> None:
    for prefix, reasons in WITHOUT_EFFECT.items():
        peers = [peer for label, peer in PEERS.items() if label.startswith(prefix)]
        unread = set[str]().union(*(fields(peer, sources) - known(DIALECTS[peer.dialect]) for peer in peers))
        assert sorted(reasons.keys() - unread) == [], prefix


def test_each_parameter_of_tgi_is_read(sources: Path) -> None:
    declared = fields(Peer(_TGI, ("TextGenerationInputGenerateParameters",), ""), sources)
    assert len(declared) > 9
    assert sorted(declared - PARAMETERS.keys()) == []


def fields(peer: Peer, sources: Path) -> set[str]:
    path = sources / peer.files
    if not peer.classes:
        code = re.sub(r"//[^\n]*", "", path.read_text())
        return set(re.findall(r'(?:add\(\(new field_\w+\(|add_alias\()"([\w.]+)"', code))
    files = [path] if path.is_file() else path.rglob("protocol.py" if peer.files == _VLLM else "*.py")
    found = classes(file for file in files if file.name != "protocol.py" or path.is_file() or peer.files == _VLLM)
    return set[str]().union(*(fields_of(name, found) for name in peer.classes))


def classes(files: Iterable[Path]) -> dict[str, ast.ClassDef]:
    """The classes in files, by name."""
    found: dict[str, ast.ClassDef] = {}
    for file in sorted(files):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, node)
    return found


def fields_of(name: str, found: dict[str, ast.ClassDef]) -> set[str]:
    """The fields of a class and of its bases."""
    if name not in found:
        return set()
    own = {
        item.target.id
        for item in found[name].body
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and item.target.id[0] != "_"
        and "ClassVar" not in ast.dump(item.annotation)
    }
    bases = (fields_of(base.id, found) for base in found[name].bases if isinstance(base, ast.Name))
    return own.union(*bases)


def known(dialect: Dialect) -> set[str]:
    """The names that a dialect reads, refuses or lists as harmless."""
    assert isinstance(dialect, OpenAiDialect)
    return {*dialect.fields, *dialect.table.parameters, *dialect.accepted, *(dialect.harmless or HARMLESS)}


def is_refused(dialect: str, name: str) -> bool:
    """Whether an unknown name is refused, because it refers to state, or asks for isolation or a constraint."""
    body: dict[str, Any] = copy.deepcopy({**DESCRIPTIONS[dialect].example, name: {"a": 1}})
    try:
        DIALECTS[dialect].parse(body, CAPABLE)
    except ServingError as error:
        return name in error.message
    return False
