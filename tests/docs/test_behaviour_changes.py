"""docs/migrating and docs/wire/async.md say where behaviour differs from LMI's: every row has its test, named here.

A row's test is a function, `FILE::NAME`, or a golden file, which tests/unit/protocols/test_golden.py compares.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from handler.config.lmi_version import VERSIONS
from tests.docs.pages import ROOT

_MIGRATING = "docs/migrating/README.md"
_ASYNC = "docs/wire/async.md"

_PROTOCOLS = "tests/unit/protocols/"
_VERSIONS = _PROTOCOLS + "test_lmi_versions.py::"
_CONFIG = "tests/unit/config/test_loader.py::"
_LOADER = "tests/unit/config/test_loader.py::"
_LMI = "tests/golden/lmi/"
_LINES = "tests/golden/async/"
_OWN_BATCH = "tests/app/dialects/test_lmi.py::test_requests_of_other_parameters_share_a_batch_and_bad_ones_fail"

CHANGES = {
    "text of a dynamic batch, without `return_full_text`": (
        _VERSIONS + "test_a_dynamic_batchs_text_begins_with_its_prompt_since_0_29"
    ),
    "a list of one prompt in rolling batch": _VERSIONS + "test_a_list_of_one_prompt_is_that_prompt_before_0_30",
    "`inputs` in rolling batch, without `do_sample`": _VERSIONS + "test_a_temperature_alone_samples_since_0_32",
    "a chat without `max_tokens`": (_VERSIONS + "test_a_chat_without_a_limit_has_30_tokens_before_0_32"),
    "a chat without other sampling parameters": (
        "tests/unit/serving/test_model.py::test_lmis_chats_heed_it_since_0_32"
    ),
    "`option.async_mode=true`, and LMI's async handlers": _CONFIG + "test_the_schema_of_the_async_mode",
    "neither `option.rolling_batch` nor `batch_size` is set": _CONFIG + "test_the_schema_of_the_async_mode",
    "one text for an embedding model in async mode": (
        "tests/unit/protocols/test_pooled.py::test_embeddings_of_async_mode_are_lists_since_0_36"
    ),
    "a streamed chat in rolling batch": _VERSIONS + "test_a_chat_streams_json_lines_and_events_since_0_37",
}

BETTER = {
    "no `inputs`, or several, in rolling batch": _PROTOCOLS + "test_lmi.py::test_a_wrong_payload_is_refused",
    "a chat's prompt": "tests/model/openvino/test_chat_template.py::test_echos_template",
    "a stop string ends the response": _LMI + "outputs_beams.txt",
    "`best_of` with `n`": (_PROTOCOLS + "test_lmi.py::test_the_most_probable_sequence_comes_first_and_n_says_how_many"),
    "a token's text since 0.29": ("tests/unit/core/test_text.py::test_a_split_character_is_never_shown_in_parts"),
    "`top_n_tokens`, tools, reasoning, images in chats": (
        _VERSIONS + "test_what_later_releases_brought_is_there_in_every_release"
    ),
    "a failed request": _LMI + "fails.txt",
    "text of a dynamic batch in 0.28, without `return_full_text`": (
        _VERSIONS + "test_a_dynamic_batchs_text_begins_with_its_prompt_since_0_29"
    ),
    "`return_full_text` of a prompt with quotes": _LMI + "full_text.txt",
    "log-probabilities of a streamed chat": "tests/golden/chat/stream_top_logprobs.txt",
    "the text of a token in `prefill`": _LMI + "prefill.txt",
    "alternatives in a stream": _LMI + "stream_top_tokens.txt",
    "a dynamic batch whose requests have wrong or unequal `parameters`": _OWN_BATCH,
    "counts, finish reasons, statuses and errors in async mode": _LINES + "stream_details_length.txt",
    "`option.tgi_compat=true`: the stop string that ended the response": (
        _PROTOCOLS + "test_lmi.py::test_tgi_keeps_the_stop_string_unless_told_otherwise"
    ),
    "`option.tgi_compat=true`: fields": "tests/golden/tgi_compat/stream.txt",
    "fields that are always null in vLLM's responses": "tests/golden/async/chat.txt",
    "chunks of OpenAI's streams": "tests/golden/async/chat_stream.txt",
    "the first chunk of a streamed chat": "tests/golden/async/chat_stream.txt",
    "text beside a forced tool call in async mode": "tests/golden/openai/chat/named_tool.txt",
}

UNNAMED = {
    "the default engine": _LOADER + "test_engine_choice_without_contradiction",
    "`option.tensor_parallel_degree`": _LOADER + "test_more_devices_than_the_engine_uses_are_refused",
    "a tensor parallel degree of 2 on 4 GPUs": "tests/unit/serving/test_model.py::test_devices",
    "a dynamic batch without `max_new_tokens`": (
        _PROTOCOLS + "test_lmi_versions.py::test_a_dynamic_batch_has_30_tokens_whatever_the_models_own_limit"
    ),
    "chats with dynamic batch": _PROTOCOLS
    + "test_lmi_versions.py::test_a_chat_streams_json_lines_and_events_since_0_37",
    "`text/csv` with a header `inputs`": "tests/app/test_http.py::test_other_types_are_415",
    "an unknown option": "tests/unit/config/test_foreign_names.py::test_names_that_nobody_has_get_one_line_together",
    "reasoning in chats": (
        "tests/unit/protocols/assistant/test_reasoning.py::"
        "test_by_default_reasoning_is_apart_where_the_template_shows_it"
    ),
    "images and audio by URL": "tests/app/media/test_images.py::test_urls_stay_where_the_options_allow_them",
    "video": _LOADER + "test_only_images_and_audio_clips_may_have_a_limit_above_zero",
    "`X-Amzn-SageMaker-Target-Model`": (
        "tests/app/test_http.py::test_sagemaker_headers_that_ask_for_what_is_not_there_are_refused"
    ),
    "`decoding_strategy`, `cached_prompt` with `rolling_batch=scheduler`": (
        "tests/app/dialects/test_lmi_clients.py::test_a_strategy_of_lmis_scheduler_is_reported"
    ),
}

ASYNC = {
    "`finish_reason` of non-streaming responses is null, a stop string, or a token's id": _LINES + "details_stop.txt",
    "`generated_tokens` of a stream counts one too many": _LINES + "stream_details_length.txt",
    "with `return_full_text`, `tokens` also contains the prompt's tokens": _LINES + "full_text.txt",
    "for `inputs` with several prompts, only the first gets a response": _LINES + "several_prompts.txt",
    "a list in `adapters`, null as `parameters`, and `stream` in `parameters` are refused": (
        _LINES + "stream_in_parameters.txt"
    ),
    "`stop_sequences` is dropped": _PROTOCOLS + "test_lmi_async.py::test_lmis_names_and_vllms_set_the_same_fields",
    "a wrong type gets 500": _LINES + "bad_parameter.txt",
    "an unknown model gets 500 or 424 from 0.34 on, as does a `prompt` or chat that is too long": (
        _LINES + "prompt_unknown_model.txt"
    ),
    "a failed engine call is reported as `Async Inference Failure`; a failing stream leaves the client waiting": (
        _LINES + "stream_fails.txt"
    ),
}

TABLES = {
    "changes": (_MIGRATING, "## Behaviour changes", 1, CHANGES),
    "better": (_MIGRATING, "### Deliberate differences", 0, BETTER),
    "unnamed": (_MIGRATING, "## Other differences", 0, UNNAMED),
    "async": (_ASYNC, "## Deliberate differences", 0, ASYNC),
}
"""Page, heading and column of what each table's rows are about, with their tests."""


def rows(document: str, heading: str) -> list[list[str]]:
    """Return the rows of a section's last table, without its head."""
    section = re.split(r"^##+ ", Path(ROOT, document).read_text().partition(f"\n{heading}\n")[2], flags=re.MULTILINE)[0]
    *_, last = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in last.strip().splitlines()[2:]]


@pytest.mark.parametrize("table", TABLES)
def test_every_row_has_its_test(table: str) -> None:
    document, heading, column, tests = TABLES[table]
    assert [row[column] for row in rows(document, heading)] == list(tests)
    for test in tests.values():
        file, _, name = test.partition("::")
        text = Path(ROOT, file).read_text()
        assert not name or re.search(rf"^ *(async )?def {name}\(", text, re.MULTILINE), test


def test_the_changes_stand_in_the_order_of_the_releases() -> None:
    since = [row[0] for row in rows(_MIGRATING, "## Behaviour changes")]
    assert since == sorted(since)
    assert set(since) <= {str(version) for version in VERSIONS}


def test_they_stand_first() -> None:
    headings = re.findall(r"^## (.+)", Path(ROOT, _MIGRATING).read_text(), re.MULTILINE)
    assert headings[0] == "Behaviour changes"
