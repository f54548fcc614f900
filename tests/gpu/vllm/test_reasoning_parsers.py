"""The answers of each family, read by vLLM's parser of that name."""

from __future__ import annotations

from typing import Any

import pytest

from handler.protocols.assistant.reasoning_families import FAMILIES, HARMONY
from tests.unit.protocols.assistant.test_reasoning import ANSWERS, parts, read

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

DIFFERENT = {
    "\n<think>\n</think>Yes.": "with the thinking off, vLLM reads no marks; here the model may think all the same",
    "\n<think>Hm. \n</think>\nYes.<think>So</think>!": "the same",
    "Hm. <｜DSML｜function_calls>x": "vLLM knows the mark of V4 alone, here that of V3.2 ends a thought too",
    "Hm.</think>Use </think>.": "vLLM drops another end mark, which is text here",
}
"""Answers that vLLM reads in another way, and why."""


OTHERS = {
    *("cohere_command3", "deepseek_v41", "ernie45", "hunyuan_a13b", "hy_v3", "k2_horizon", "kimi_k3", "minimax_m3"),
    *("inkling", "muse_glimmer", "olmo3"),
}
"""Families that tests/templates/vllm compares with vLLM 0.33's parsers, on the cases of vLLM's own tests."""


def tokenizer() -> Any:
    """A tokenizer of bytes and marks: vLLM's parsers look for marks in it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={sign: id for id, sign in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=made)
    marks = {mark.strip() for family in FAMILIES.values() if family.name != "granite" for mark in family.marks}
    found.add_tokens(sorted(marks - {"<|channel>thought"}))
    return found


def theirs(family: str, answer: str, *, thinking: bool) -> tuple[str, str]:
    """Return the thoughts and the text that vLLM finds."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.reasoning import ReasoningParserManager

    arguments = {"enable_thinking": thinking}
    messages = [{"role": "user", "content": "hi"}]
    request = ChatCompletionRequest(model="m", messages=messages, chat_template_kwargs=arguments)
    parser = ReasoningParserManager.get_reasoning_parser(family)(tokenizer(), chat_template_kwargs=arguments)
    thoughts, text = parser.extract_reasoning(answer, request)
    return thoughts or "", text or ""


@pytest.mark.parametrize(
    ("family", "thinking", "answer"), [case[:3] for case in ANSWERS if case[0] not in {HARMONY, *OTHERS}]
)
def test_it_is_read_as_vllm_reads_it(family: str, thinking: bool, answer: str) -> None:
    ours = parts(read(family, [answer], thinking=thinking))[:2]
    assert (theirs(family, answer, thinking=thinking) == ours) == (answer not in DIFFERENT)
