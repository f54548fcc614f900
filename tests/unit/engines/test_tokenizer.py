"""Hugging Face's tokenizers: vocabularies as bytes, prompts as ids, and texts with too many of them."""

from __future__ import annotations

import functools
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.trainers import BpeTrainer

from handler.config.loader import read_config
from handler.core.errors import ConfigError, GenerationFailed, InvalidPayload, PromptTooLong
from handler.core.text import Detokenizer, Vocabulary, check_tokens, spans
from handler.core.values import TemplateOptions
from handler.engines.base import EngineConfig
from handler.engines.echo import engine as echo
from handler.engines.echo.engine import EchoTokenizer
from handler.engines.huggingface import tokenizer as hf_tokenizer
from handler.engines.huggingface.files import load_tokenizer
from handler.engines.huggingface.tokenizer import HfTokenizer, MistralTokenizer, _message
from handler.engines.openvino import model as openvino_model
from handler.engines.openvino.model import OpenVinoTokenizer, prepare

# -- vocabularies of every common kind as bytes, and prompts and chats as ids ------------------------------------------


CORPUS = [
    "Hello world, hello there. The capital of France is Paris.",
    "def add(a, b):\n    return a + b",
    "été 😀 日本語 12",
]
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(directory: Path, tokenizer: Tokenizer, template: Any = TEMPLATE) -> Path:
    directory.mkdir(exist_ok=True)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    if template:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text("{}")
    return directory


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3, Qwen and SmolLM2 have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS * 3, BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer


def sentence_piece() -> Tokenizer:
    """As Llama 2, Mistral and Gemma have it: a mark for spaces, and single bytes for what it does not know."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁Hello",
        "▁world",
        "l",
        "o",
        "é",
    ]
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HfTokenizer]:
    at = tmp_path_factory.mktemp("tokenizers")
    made = {"byte_level": byte_level(), "sentence_piece": sentence_piece()}
    return {name: HfTokenizer(write(at / name, tokenizer)) for name, tokenizer in made.items()}


KINDS = ("byte_level", "sentence_piece")


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(max_size=40))
def test_what_the_ids_stand_for_is_the_text(loaded: dict[str, HfTokenizer], kind: str, text: str) -> None:
    text = text.replace("▁", "_")  # which SentencePiece cannot tell from a space
    prompt = loaded[kind].encode(text)
    detokenizer = Detokenizer(prompt.vocabulary)
    found = "".join(detokenizer.feed(id) for id in prompt.ids)
    assert found == (f" {text}" if kind == "sentence_piece" and text else text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_of_several_tokens_comes_whole(loaded: dict[str, HfTokenizer], kind: str) -> None:
    prompt = loaded[kind].encode("😀日")
    assert len(prompt.ids) > 3
    detokenizer = Detokenizer(prompt.vocabulary)
    assert [text for id in prompt.ids if (text := detokenizer.feed(id)).strip()] == ["😀", "日"]


def test_special_tokens_are_marks_and_known_as_such(loaded: dict[str, HfTokenizer]) -> None:
    tokenizer = loaded["byte_level"]
    (id,) = tokenizer.encode("<|im_end|>").ids
    assert tokenizer.vocabulary is not None
    assert tokenizer.vocabulary.special >= {id}
    assert tokenizer.vocabulary.text(id) == "<|im_end|>"


def test_the_beginning_that_a_model_wants_is_there_once(loaded: dict[str, HfTokenizer]) -> None:
    assert loaded["sentence_piece"].encode("Hello").ids[0] == 1
    chat = loaded["sentence_piece"].encode_chat([{"role": "user", "content": "Hello"}])
    assert chat.ids.count(1) == 0, "the template has all marks that are wanted"


@pytest.mark.parametrize("kind", KINDS)
def test_a_chat_is_laid_out_by_the_template(loaded: dict[str, HfTokenizer], kind: str) -> None:
    prompt = loaded[kind].encode_chat([{"role": "user", "content": "Hi {{ 1 + 1 }}"}])
    assert prompt.text == "<|im_start|>user\nHi {{ 1 + 1 }}<|im_end|>\n<|im_start|>assistant\n"


def test_what_the_template_refuses_is_refused_in_its_words_in_tokenizer(loaded: dict[str, HfTokenizer]) -> None:
    with pytest.raises(InvalidPayload, match="'messages': the model's chat template refuses them: no tools here"):
        loaded["byte_level"].encode_chat([{"role": "tool", "content": "x"}])


def test_a_model_without_template_says_so_in_tokenizer(tmp_path: Path) -> None:
    tokenizer = HfTokenizer(write(tmp_path / "plain", byte_level(), template=None))
    with pytest.raises(InvalidPayload, match=r"no chat template; set option.chat_template, or .* on /v1/completions"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])


def test_a_directory_without_mistrals_own_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"option\.tokenizer_mode=mistral: {tmp_path} has none of .*tekken\.json"):
        MistralTokenizer(tmp_path)


def test_mistrals_own_tokenizer_gets_texts_short_ids_and_arguments_as_json() -> None:
    def part(kind: str) -> dict[str, str]:
        return {"type": kind, "text": kind}

    calls = [{"id": "call_123456789", "function": {"name": "f", "arguments": given}} for given in ({"a": "ö"}, "{}")]
    assert _message({"role": "user", "content": [part("text"), part("text")]})["content"] == "text\ntext"
    assert _message({"role": "tool", "content": "a", "tool_call_id": "call_123456789"})["tool_call_id"] == "123456789"
    made = _message({"role": "assistant", "content": None, "tool_calls": calls})["tool_calls"]
    assert [call["id"] for call in made] == ["123456789"] * 2
    assert [call["function"]["arguments"] for call in made] == ['{"a": "ö"}', "{}"]
    with pytest.raises(InvalidPayload, match="tokenizer_mode=mistral accepts text only"):
        _message({"role": "user", "content": [part("text"), part("image")]})


def test_a_vocabulary_that_is_not_bytes_is_refused(tmp_path: Path) -> None:
    pieces = {"[UNK]": 0, "hello": 1, "##lo": 2, "hel": 3}
    tokenizer = Tokenizer(models.WordPiece(vocab=pieces, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="cannot be converted to bytes"):
        HfTokenizer(write(tmp_path / "pieces", tokenizer))


def test_many_threads_share_it(loaded: dict[str, HfTokenizer]) -> None:
    tokenizer = loaded["byte_level"]
    texts = [f"text number {n} 😀" * 20 for n in range(64)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(tokenizer.encode, texts))
    assert [prompt.ids for prompt in found] == [tokenizer.encode(text).ids for text in texts]


@pytest.mark.vllm  # where torch is, by which the demo model's directory is made
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_tokens_stand_where_the_library_has_them(hf_demo: Path, text: str) -> None:
    """Its offsets are characters, ours are their bytes."""
    text = f"<|im_start|> {text} 😀<|im_end|>\n"
    library = Tokenizer.from_file(str(hf_demo / "tokenizer.json")).encode(text)
    tokenizer = _demo(hf_demo)
    found = spans(tokenizer.encode(text))
    if found is None:  # its vocabulary lacks a byte of the text
        assert tokenizer.vocabulary is not None
        assert not set(text.encode()) <= {piece[0] for piece in tokenizer.vocabulary.pieces if len(piece) == 1}
        return
    assert found == [(len(text[:start].encode()), len(text[:stop].encode())) for start, stop in library.offsets]


@functools.cache
def _demo(directory: Path) -> HfTokenizer:
    return HfTokenizer(directory)


def test_tools_go_to_a_template_that_has_a_place_for_them_in_tokenizer(tmp_path: Path) -> None:
    template = (
        "{% for tool in tools or [] %}T:{{ tool | tojson }}\n{% endfor %}"
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for call in m.tool_calls %}C:{{ call.function.name }}={{ call.function.arguments | tojson }}{% endfor %}"
        "{% endfor %}A:"
    )
    tokenizer = HfTokenizer(write(tmp_path / "tools", byte_level(), template=template))
    assert tokenizer.chat_template == template
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": ["é", 1]}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Do."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    shown, _, rest = tokenizer.encode_chat(messages, [tool]).text.partition("\n")
    assert json.loads(shown.removeprefix("T:")) == tool
    assert rest == 'user:Do.assistant:C:f={"x": ["é", 1]}A:'
    assert tokenizer.encode_chat(messages).text == rest


def test_a_template_of_several_is_all_of_them(tmp_path: Path) -> None:
    several = {"default": "{{ messages[0].content }}", "tool_use": "{% for tool in tools %}<tool_call>{% endfor %}"}
    listed = [{"name": name, "template": template} for name, template in several.items()]
    tokenizer = HfTokenizer(write(tmp_path / "several", byte_level(), template=listed))
    assert "<tool_call>" in tokenizer.chat_template
    message, tool = {"role": "user", "content": "Hi"}, {"type": "function", "function": {"name": "f"}}
    assert tokenizer.encode_chat([message]).text == "Hi"
    assert tokenizer.encode_chat([message], [tool]).text == "<tool_call>"


THINKING = (
    "{% for m in messages %}{{ m.role }}:{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content | trim }}\n{% endfor %}\n"
    "{% for d in documents or [] %}{{ d.title }}{% endfor %}\n"
    "{% if add_generation_prompt %}A:{% if enable_thinking is false %}</think>{% endif %}{% endif %}"
)
USER, ASSISTANT = (
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes. ", "reasoning_content": "Hm"},
)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return HfTokenizer(write(tmp_path_factory.mktemp("thinking"), byte_level()), chat_template=THINKING)


@pytest.mark.parametrize(
    ("messages", "options", "wanted"),
    [
        ([USER], TemplateOptions(), "user:Hi\nA:"),
        ([USER], TemplateOptions((("enable_thinking", False),)), "user:Hi\nA:</think>"),
        ([USER], TemplateOptions((("documents", [{"title": "D"}]),)), "user:Hi\nDA:"),
        ([USER], TemplateOptions(add_generation_prompt=False), "user:Hi\n"),
        ([USER, ASSISTANT], TemplateOptions((), False, True), "user:Hi\nassistant:<think>Hm</think>Yes."),
    ],
)
def test_a_template_of_an_option_gets_what_the_request_says_in_tokenizer(
    thinking: HfTokenizer, messages: list[dict[str, str]], options: TemplateOptions, wanted: str
) -> None:
    assert thinking.chat_template == THINKING
    assert thinking.encode_chat(messages, (), options).text == wanted


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("a\n{{ messages[0].x.y }}", r"has no attribute 'x' \(line 2 of the template\)"),
        ("{% set x = [][messages[0].content | length] %}{{ x.y }}", "no element"),
        ("\n{{ '{1}'.format('x') }}", r"index (1 )?out of range.* \(line 2 of the template\)"),
        ("{{ [].pop() }}", "unsafe|pop from empty list"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "maximum recursion depth exceeded"),
        ("{{ range(999999999) | list }}", "Range too big"),
        ("{{ messages[0].content.__class__.mro() }}", "is unsafe|not callable|no attribute"),
        ("{{ 1 // 0 }}", "by zero"),
        ("{{ 'x' + 1 }}", "concatenate"),
        ("{{ '%d' | format('x') }}", "is required|requires a real number"),
        ("a\n{{ raise_exception('no') }}", r"no \(line 2 of the template\)"),
    ],
)
def test_a_template_that_fails_names_its_line(tmp_path: Path, template: str, said: str) -> None:
    tokenizer = HfTokenizer(write(tmp_path / "broken", byte_level()), chat_template=template)
    with pytest.raises(InvalidPayload, match=f"'messages': the model's chat template refuses them: .*({said})"):
        tokenizer.encode_chat([USER])


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("a\nb\n{% if %}", r"Expected an expression.* \(line 3 of the template\)"),
        ("{{ 1 | nothing }}", "No filter named"),
    ],
)
def test_a_template_that_fails_on_everything_is_the_models_fault(tmp_path: Path, template: str, said: str) -> None:
    tokenizer = HfTokenizer(write(tmp_path / "broken", byte_level()), chat_template=template)
    with pytest.raises(GenerationFailed, match=f"the model's chat template is broken: {said}"):
        tokenizer.encode_chat([USER])


SHOWN = "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text ~ '!' }}{% endfor %}"


@pytest.mark.parametrize(("form", "wanted"), [("auto", "hello"), ("string", "hello"), ("openai", "hello!")])
def test_an_option_says_the_form_of_a_messages_content(tmp_path: Path, form: str, wanted: str) -> None:
    options = [f"option.chat_template_content_format={form}", "option.llm_engine=vllm"]
    config = EngineConfig(
        read_config(overrides=options, environ={}).checked(), write(tmp_path / form, byte_level(), SHOWN)
    )
    tokenizer = load_tokenizer(config)
    prompt = tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    assert prompt.text == wanted


# -- texts with too many tokens are refused before a tokenizer is busy with them for long ------------------------------


def test_parts_are_counted_as_far_as_they_fit() -> None:
    counted: list[int] = []

    def count(part: str) -> int:
        counted.append(len(part))
        return len(part)

    check_tokens("a" * 100, "inputs", 10, 100, count)
    assert counted == [], "a short one is left to the tokenizer"
    check_tokens("a" * 250, "inputs", 250, 100, count)
    assert counted == [100, 100, 50]
    counted.clear()
    with pytest.raises(PromptTooLong, match="'messages' has at least 252 tokens; the model accepts at most 250"):
        check_tokens("a" * 100_000, "messages", 250, 100, count)
    assert counted == [100, 100, 100], "84 of each are certain, whatever the cuts have added"


class Recorder:
    """A tokenizer, and how much it was given at a time."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.sizes: list[int] = []

    def encode(self, text: str, **more: Any) -> Any:
        self.sizes.append(len(text))
        return self._real.encode(text, **more)


@pytest.mark.model
def test_openvinos_gets_no_long_text_with_too_many_tokens(demo_model: Path) -> None:
    """It holds the GIL: 0.7 s for half a megabyte of one letter."""
    tokenizer = OpenVinoTokenizer(prepare(str(demo_model), EngineConfig()))
    recorder = tokenizer._tokenizer = Recorder(tokenizer._tokenizer)
    with pytest.raises(PromptTooLong, match=r"'inputs' has at least .* at most 8191"):
        tokenizer.encode("a" * 500_000)
    assert set(recorder.sizes) == {openvino_model._PART}
    recorder.sizes.clear()
    assert len(tokenizer.encode("hello " * 8000).ids) == 8001
    assert max(recorder.sizes) == 48_000, "one that fits is given to it whole"


@pytest.fixture
def hugging_faces() -> HfTokenizer:
    fast = Tokenizer(WordLevel({"hello": 0, "?": 1}, unk_token="?"))
    fast.pre_tokenizer = Whitespace()
    tokenizer = HfTokenizer.__new__(HfTokenizer)
    tokenizer._fast, tokenizer.vocabulary = fast, Vocabulary([b"hello", b"?"])
    return tokenizer


def test_hugging_faces_lets_other_threads_run(hugging_faces: HfTokenizer) -> None:
    """No thread is made to let go of the GIL here: the other one counts only while the tokenizer does not hold it."""
    counted, ended = 0, threading.Event()

    def count() -> None:
        nonlocal counted
        while not ended.is_set():
            counted += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    thread = threading.Thread(target=count)
    try:
        thread.start()
        before = counted
        hugging_faces.encode("hello " * 100_000)
        found = counted - before
    finally:
        ended.set()
        sys.setswitchinterval(interval)
        thread.join()
    assert found > 10


def test_hugging_faces_makes_no_more_ids_than_any_engine_takes(
    hugging_faces: HfTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = hugging_faces
    monkeypatch.setattr(hf_tokenizer, "PART", 1000)
    monkeypatch.setattr(hf_tokenizer, "MOST_TOKENS", 5000)
    with pytest.raises(PromptTooLong, match=r"'inputs' has at least .* at most 5000"):
        tokenizer.encode("hello " * 8000)
    assert len(tokenizer.encode("hello " * 4000).ids) == 4000


def test_echo_reads_a_prompt_that_truncate_may_shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(echo, "_MOST_WORDS", 100)
    tokenizer = EchoTokenizer(context=10)
    assert len(tokenizer.encode("a " * 100).ids) == 100
    with pytest.raises(PromptTooLong, match="'inputs' has at least 101 tokens; the model accepts at most 9"):
        tokenizer.encode("a " * 102)
    with pytest.raises(PromptTooLong, match="'messages' has"):
        tokenizer.encode_chat([{"role": "user", "content": "a " * 102}])
    assert len(EchoTokenizer(context=200).encode("a " * 200).ids) == 200
