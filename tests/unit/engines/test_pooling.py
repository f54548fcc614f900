"""Requests for vectors: the model's files, texts that are cut, and OpenVINO's numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest

from handler import engines
from handler.config.config import Config
from handler.config.loader import read_config
from handler.config.model_files import find_task, label_names
from handler.core.errors import (
    ConfigError,
    GenerationFailed,
    InvalidParameter,
    InvalidPayload,
    PromptTooLong,
    ServingError,
)
from handler.core.values import Delta, FieldNames, Finish, Pooling, Request, Task, TemplateOptions, Truncation
from handler.engines.base import EngineConfig, EngineInfo, EngineRequest, Output
from handler.engines.echo.engine import EchoTokenizer
from handler.engines.huggingface.pooling import HfPoolingTokenizer, PoolingFiles, encode_pooled, fit, read_pooling
from handler.engines.openvino.pooling import OpenVinoPooling
from handler.engines.process.engine_process import Spec
from handler.engines.process.supervisor import EngineSupervisor
from handler.scheduler.batcher import Batcher
from handler.serving.check import check
from handler.serving.preprocessor import check_task
from tests.one_test import in_one_test
from tests.unit.engines.pooling_models import GOLDEN, MODES, TEXTS, second, write_model

# -- pooling -----------------------------------------------------------------------------------------------------------
# Requests for vectors: the model's files, texts that are cut, numbers of an answer, and echo behind the batcher.


INFO = EngineInfo("able", "1", "none", "none", 8, 4)
FILES = PoolingFiles("mean", normalize=False, most_tokens=None, exclusive=True)


def model(directory: Path, **files: Any) -> Path:
    """Write JSON files; `__` in a name stands for a folder."""
    for name, content in files.items():
        path = directory.joinpath(*name.split("__")).with_suffix(".json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    return directory


def classifier(*labels: str) -> dict[str, Any]:
    return {
        "architectures": ["BertForSequenceClassification"],
        "id2label": {str(index): label for index, label in enumerate(labels)},
    }


@pytest.mark.parametrize(
    ("option", "config", "wanted"),
    [
        ("auto", {"architectures": ["LlamaForCausalLM"]}, "text-generation"),
        ("auto", {"architectures": ["BertModel"]}, "text-embedding"),
        ("auto", {"architectures": ["XLMRobertaForMaskedLM"]}, "text-embedding"),
        ("auto", classifier("a"), "rerank"),
        ("auto", classifier("a", "b"), "text-classification"),
        ("auto", {"architectures": ["BertForSequenceClassification"]}, "text-classification"),
        ("rerank", classifier("a"), "rerank"),
        ("text-embedding", {"architectures": ["LlamaForCausalLM"]}, "text-embedding"),
        ("text-embedding", classifier("a"), "for rerank or text-classification"),
        ("rerank", {"architectures": ["LlamaForCausalLM"]}, "for text-embedding or text-generation"),
        ("auto", {}, "text-generation"),
    ],
)
def test_the_task_is_the_options_or_the_models(tmp_path: Path, option: str, config: Any, wanted: str) -> None:
    model(tmp_path, config=config)
    if wanted.startswith("for "):
        with pytest.raises(ConfigError, match=wanted):
            find_task(option, tmp_path)
    else:
        assert find_task(option, tmp_path) is Task(wanted)


def test_sentence_transformers_files_make_an_embedding_model_of_any(tmp_path: Path) -> None:
    modules = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    model(tmp_path, config={"architectures": ["Qwen3ForCausalLM"]}, modules=modules)
    assert find_task("auto", tmp_path) is Task.EMBEDDING
    assert find_task("text-generation", tmp_path) is Task.GENERATION


def test_labels_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    assert label_names(model(tmp_path, config=classifier(*"abcdefghijkl"))) == tuple("abcdefghijkl")


def test_an_engine_that_only_generates_says_so() -> None:
    with pytest.raises(ConfigError, match=r"option.task=auto: the model is for rerank, but the engine trtllm gen"):
        engines.check_task("trtllm", Task.RERANK, "auto")
    engines.check_task("trtllm", Task.GENERATION, "auto")
    for able in ("openvino", "vllm", "openai", "echo"):
        engines.check_task(able, Task.RERANK, "rerank")


POOLING = "sentence_transformers.models.Pooling"


@pytest.mark.parametrize(
    ("pooling", "wanted"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "cls and mean is not supported"),
        ({"pooling_mode_weightedmean_tokens": True}, "pooling_mode_weightedmean_tokens is not supported"),
    ],
)
def test_the_pooling_module_says_how(tmp_path: Path, pooling: dict[str, Any], wanted: str) -> None:
    model(tmp_path, config={}, modules=[{"type": POOLING, "path": "1_Pooling"}], **{"1_Pooling__config": pooling})
    if " " in wanted:
        with pytest.raises(ConfigError, match=wanted):
            read_pooling(tmp_path)
    else:
        assert read_pooling(tmp_path) == PoolingFiles(wanted, normalize=False, most_tokens=None, exclusive=True)


@pytest.mark.parametrize("flag", ["pooling_mode_mean_tokens", "pooling_mode_weightedmean_tokens"])
def test_an_option_beats_the_pooling_module(tmp_path: Path, flag: str) -> None:
    model(tmp_path, config={}, modules=[{"type": POOLING, "path": "1_Pooling"}], **{"1_Pooling__config": {flag: True}})
    assert read_pooling(tmp_path, "cls").mode == "cls"


def test_an_option_that_vllm_cannot_heed_is_refused_before_the_start() -> None:
    found = check(read_config(overrides=["option.model_id=a/b", "pooling=max"], environ={"OPTION_LLM_ENGINE": "vllm"}))
    assert any(one.message.startswith("option.pooling=max: vLLM does not support pooling=max") for one in found), found
    (problem,) = read_config(overrides=["pooling=weightedmean"], environ={}).problems
    assert problem.message.endswith("must be one of auto, cls, last, lasttoken, mean, max")
    assert read_config(overrides=["pooling=lasttoken"], environ={}).config.pooling == "last"


def test_other_modules_are_named(tmp_path: Path) -> None:
    kinds = ["Transformer", "Normalize"]
    model(tmp_path, config={}, modules=[{"type": f"sentence_transformers.models.{kind}"} for kind in kinds])
    assert read_pooling(tmp_path).normalize
    model(tmp_path, modules=[{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}])
    with pytest.raises(ConfigError, match="the module 'Dense' is not supported"):
        read_pooling(tmp_path)


@pytest.mark.parametrize(
    ("config", "beside", "wanted"),
    [
        ({"max_position_embeddings": 512}, {}, 512),
        ({"max_position_embeddings": 514, "model_type": "xlm-roberta", "pad_token_id": 1}, {}, 512),
        ({"max_position_embeddings": 512}, {"sentence_bert_config": {"max_seq_length": 256}}, 256),
        ({"max_position_embeddings": 512}, {"tokenizer_config": {"model_max_length": 128}}, 128),
        ({}, {"tokenizer_config": {"model_max_length": 10**30}}, None),
    ],
)
def test_the_least_limit_counts(tmp_path: Path, config: Any, beside: dict[str, Any], wanted: int | None) -> None:
    assert read_pooling(model(tmp_path, config=config, **beside)).most_tokens == wanted


@in_one_test(
    ("pooling", "exclusive", "wanted"),
    [
        (Pooling("embed", normalize=False), True, [3.0, 4.0, 12.0]),
        (Pooling("embed"), True, [3 / 13, 4 / 13, 12 / 13]),
        (Pooling("embed", normalize=None), True, [3.0, 4.0, 12.0]),
        (Pooling("embed", dimensions=2), True, [0.6, 0.8]),
        (Pooling("embed", dimensions=2, normalize=False), True, [3.0, 4.0]),
        (Pooling("classify", normalize=False), True, [3.0, 4.0, 12.0]),
        (Pooling("classify"), True, [math.exp(x) / sum(map(math.exp, (3, 4, 12))) for x in (3, 4, 12)]),
        (Pooling("classify"), False, [1 / (1 + math.exp(-x)) for x in (3, 4, 12)]),
    ],
)
def test_numbers_of_an_answer(pooling: Pooling, exclusive: bool, wanted: list[float]) -> None:
    files = FILES._replace(exclusive=exclusive)
    assert files.finish(numpy.array([3, 4, 12], dtype=numpy.float32), pooling) == pytest.approx(wanted)


def test_a_score_of_one_number_is_a_sigmoid_and_a_zero_vector_stays_zero() -> None:
    assert FILES.finish(numpy.array([0.0], numpy.float32), Pooling("score")) == [0.5]
    assert FILES.finish(numpy.array([0.0, 0.0], numpy.float32), Pooling("embed")) == [0.0, 0.0]


@in_one_test(
    ("lengths", "most", "wanted"),
    [([9], 4, [4]), ([2, 9], 6, [2, 4]), ([9, 2], 6, [4, 2]), ([9, 9], 7, [3, 4]), ([9, 5], 7, [4, 3])],
)
def test_the_longer_text_is_cut_first(lengths: list[int], most: int, wanted: list[int]) -> None:
    assert fit(lengths, most) == wanted


TEMPLATE = [("[CLS]", 1), ("[SEP]", 2)]


def write_tokenizer(directory: Path) -> None:
    """Words of one letter; [CLS] a [SEP] b [SEP] as BERT has it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2} | {letter: id for id, letter in enumerate("abcdef", 3)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    pair = "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1"
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair=pair, special_tokens=TEMPLATE)
    made.add_special_tokens(["[CLS]", "[SEP]"])
    made.save(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfPoolingTokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return HfPoolingTokenizer(directory)


@pytest.mark.parametrize(
    ("text", "pair", "truncation", "ids", "second"),
    [
        ("a b", None, None, [1, 3, 4, 2], None),
        ("a b", "c", None, [1, 3, 4, 2, 5, 2], 4),
        ("a b c d", None, Truncation(4, "right"), [1, 3, 4, 2], None),
        ("a b c d", None, Truncation(4, "left"), [1, 5, 6, 2], None),
        ("a b c d e f a b", None, Truncation(side="right"), [1, 3, 4, 5, 6, 7, 8, 2], None),
        ("a", "b c d e f a", Truncation(side="left"), [1, 3, 2, 6, 7, 8, 3, 2], 3),
        ("", None, None, [1, 2], None),
    ],
)
def test_texts_get_the_models_special_tokens(
    tokenizer: HfPoolingTokenizer,
    text: str,
    pair: str | None,
    truncation: Truncation | None,
    ids: list[int],
    second: int | None,
) -> None:
    request, prompt = encode_pooled(
        Request(text, pooling=Pooling("embed"), pair=pair, truncation=truncation), tokenizer, INFO
    )
    assert request.pooling is not None
    assert (list(prompt.ids), request.pooling.second) == (ids, second)


@pytest.mark.parametrize(
    ("inputs", "num_types", "second"),
    [
        (None, None, 4),
        (["input_ids", "token_type_ids", "attention_mask"], 2, 4),
        (["input_ids", "attention_mask"], 2, None),
        (None, 1, None),
        (["input_ids", "token_type_ids", "attention_mask"], 1, None),
    ],
)
def test_the_second_text_is_marked_where_the_model_wants_it(
    tokenizer: HfPoolingTokenizer, tmp_path: Path, inputs: list[str] | None, num_types: int | None, second: int | None
) -> None:
    tokenizer._fast.save(str(tmp_path / "tokenizer.json"))
    model(tmp_path, config={"type_vocab_size": num_types}, tokenizer_config={"model_input_names": inputs})
    assert HfPoolingTokenizer(tmp_path).encode_pooled(["a b", "c"], None, None)[1] == second


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (Request("a b c d e f a", pooling=Pooling("embed")), PromptTooLong, "'inputs' has 9 tokens; .* at most 8"),
        (Request("", pooling=Pooling("embed"), prompt_ids=(1,) * 9), PromptTooLong, "'inputs' has 9 tokens"),
        (Request("", pooling=Pooling("embed"), prompt_ids=(99,)), InvalidParameter, "99 is not in the vocabulary of 9"),
        (Request("", pooling=Pooling("embed"), prompt_ids=()), InvalidPayload, "'inputs' has no tokens"),
        (Request("a", pooling=Pooling("embed", dimensions=5)), InvalidParameter, "dimensions=5: .* have 4 dimensions"),
        (Request("a b", pooling=Pooling("embed"), truncation=Truncation(2, "left")), PromptTooLong, "at most 2"),
    ],
)
def test_what_cannot_be_computed_is_refused(
    tokenizer: HfPoolingTokenizer, request_: Request, error: type[ServingError], words: str
) -> None:
    with pytest.raises(error, match=words):
        encode_pooled(request_, tokenizer, INFO)


TURNS = """{{ bos_token }}{% for message in messages %}{{ message.content }} [SEP]{% endfor %}"""


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json", "option.chat_template"])
def test_a_chats_template_adds_its_special_tokens(tmp_path: Path, file: str) -> None:
    write_tokenizer(tmp_path)
    names: dict[str, Any] = {"bos_token": "[CLS]"}
    template = TURNS + "{% if add_generation_prompt %} f{% endif %}"
    if file == "chat_template.jinja":
        (tmp_path / file).write_text("\ufeff" + template)
    elif file == "tokenizer_config.json":
        names["chat_template"] = [{"name": "other", "template": "a"}, {"name": "default", "template": template}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    made = HfPoolingTokenizer(tmp_path, template if file == "option.chat_template" else None)
    messages = ({"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"})

    def ids(truncation: Truncation | None = None, *, prompts: bool = False, continues: bool = False) -> list[int]:
        shaping = TemplateOptions(add_generation_prompt=prompts, continue_final_message=continues)
        chat = Request("", pooling=Pooling("embed"), messages=messages, template=shaping, truncation=truncation)
        return list(encode_pooled(chat, made, INFO)[1].ids)

    assert ids() == [1, 3, 4, 2, 5, 2]
    assert ids(prompts=True) == [1, 3, 4, 2, 5, 2, 8]
    assert ids(continues=True) == [1, 3, 4, 2, 5]
    assert ids(Truncation(2, "right")) == [1, 3]


@pytest.mark.parametrize(
    ("template", "error", "words"),
    [
        (None, InvalidPayload, "'messages': the model has no chat template; send a text as 'input'"),
        ("{{ raise_exception('no chats') }}", InvalidPayload, "refuses them: no chats"),
        ("{% if %}", GenerationFailed, "the model's chat template is broken"),
        ("{{ messages[0].content * 9 }}", PromptTooLong, "'messages' has 9 tokens; .* at most 8"),
    ],
)
def test_a_chat_without_a_text_is_refused(
    tmp_path: Path, template: str | None, error: type[ServingError], words: str
) -> None:
    write_tokenizer(tmp_path)
    names = FieldNames(prompt="messages")
    chat = Request("", pooling=Pooling("embed"), messages=({"role": "user", "content": "a "},), names=names)
    with pytest.raises(error, match=words):
        encode_pooled(chat, HfPoolingTokenizer(tmp_path, template), INFO)


@pytest.mark.parametrize(("side", "kept"), [("left", (4, 5)), ("right", (3, 4))])
def test_ids_are_cut_as_they_are(tokenizer: HfPoolingTokenizer, side: str, kept: tuple[int, ...]) -> None:
    ids = Request("", pooling=Pooling("embed"), prompt_ids=(3, 4, 5), truncation=Truncation(2, side))
    assert tuple(encode_pooled(ids, tokenizer, INFO)[1].ids) == kept


@in_one_test("task", Task)
@in_one_test("kind", [None, "embed", "score", "classify"])
def test_a_server_answers_its_own_task_only(task: Task, kind: str | None) -> None:
    wanted = {None: Task.GENERATION, "embed": Task.EMBEDDING, "score": Task.RERANK, "classify": Task.CLASSIFICATION}
    request = Request("a", pooling=Pooling(kind) if kind else None)
    if wanted[kind] is task:
        check_task(request, task)
    else:
        with pytest.raises(InvalidPayload, match=rf"this server is for {task.value} \(option.task\)"):
            check_task(request, task)


def computed(requests: list[Request], task: Task) -> list[Delta]:
    """Compute requests together by echo behind a batcher."""
    engine = EngineSupervisor(Spec("echo", EngineConfig(task=task)), isolated=False)
    batcher, found = Batcher(engine), dict[int, Delta]()
    try:
        while not engine.ready:
            batcher.step(0.1)
        ids = [batcher.submit(*encode_pooled(request, EchoTokenizer(), engine.info)) for request in requests]
        while len(found) < len(ids):
            found |= {delta.id: delta for delta in batcher.step(0.1)}
        assert batcher.idle
    finally:
        engine.close()
    return [found[id] for id in ids]


def vectors(deltas: list[Delta]) -> list[Sequence[float]]:
    return [delta.extras.vector or () for delta in deltas if delta.extras]


def test_echo_computes_the_same_of_the_same_text() -> None:
    ask = Pooling("embed")
    texts = ["one two", "two one", "one two", "three"]
    deltas = computed([Request(text, pooling=ask) for text in texts], Task.EMBEDDING)
    assert all(delta.finish is Finish.EOS and not delta.tokens for delta in deltas)
    first, swapped, again, other = (tuple(vector) for vector in vectors(deltas))
    assert len(first) == 8
    assert first == again
    assert len({first, swapped, other}) == 3
    assert math.hypot(*first) == pytest.approx(1)


def test_echo_scores_pairs() -> None:
    pairs = [("one", "two three"), ("one two", "three"), ("one", "two three")]
    deltas = computed([Request(text, pooling=Pooling("score"), pair=pair) for text, pair in pairs], Task.RERANK)
    (first,), (other,), (again,) = vectors(deltas)
    assert 0 < first == again < 1
    assert first != other


# -- OpenVINO's vectors are those of transformers' own classes, alone and in company (golden) --------------------------


WANTED = json.loads(GOLDEN.read_text())
KINDS = {"bert classifier": Task.CLASSIFICATION, "bert reranker": Task.RERANK, "xlm-roberta reranker": Task.RERANK}


def load(model: Path, task: Task, **options: Any) -> Any:
    return engines.load("openvino", EngineConfig(Config(dtype="fp32", **options), model, task=task))


def run(engine: Any) -> list[Output]:
    found: list[Output] = []
    while step := engine.step().others:
        found += step
    return found


def openvino_computed(engine: Any, requests: Iterable[tuple[int, list[int], Pooling]]) -> dict[int, Any]:
    for key, ids, pooling in requests:
        engine.add(EngineRequest(key, ids, pooling))
    outputs = run(engine)
    assert all(output.finish is Finish.EOS and not output.ids for output in outputs)
    return {output.key: output.extras.vector for output in outputs if output.extras}


@pytest.mark.parametrize(
    ("name", "mode"),
    [*zip(["bert", "bert", "xlm-roberta", "xlm-roberta"], MODES, strict=True), *((name, "logits") for name in KINDS)],
)
def test_numbers_are_those_of_transformers_alone_and_in_company_in_engines(
    tmp_path: Path, name: str, mode: str
) -> None:
    kind = {Task.CLASSIFICATION: "classify", Task.RERANK: "score"}.get(KINDS.get(name, Task.EMBEDDING), "embed")
    pairs = name == "bert reranker"
    requests = [
        (key, ids, Pooling(kind, normalize=False, second=second(ids) if pairs else None))
        for key, ids in enumerate(TEXTS, 1)
    ]
    engine = load(write_model(tmp_path, name, mode), KINDS.get(name, Task.EMBEDDING))
    together = openvino_computed(engine, requests)
    assert [len(run(engine)) for _ in range(2)] == [0, 0]
    alone = {key: vector for request in requests for key, vector in openvino_computed(engine, [request]).items()}
    for found in (together, alone):
        rows = numpy.array([found[key] for key in sorted(found)])
        numpy.testing.assert_allclose(rows, WANTED[name][mode], atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_an_option_chooses_how_tokens_become_a_texts_vector(tmp_path: Path, mode: str) -> None:
    engine = load(write_model(tmp_path, "bert", "mean"), Task.EMBEDDING, pooling=mode)
    found = openvino_computed(engine, [(1, TEXTS[0], Pooling("embed", normalize=False))])
    numpy.testing.assert_allclose(found[1], WANTED["bert"][mode][0], atol=1e-4)


def test_texts_of_like_length_share_a_step(tmp_path: Path) -> None:
    engine = load(write_model(tmp_path, "bert"), Task.EMBEDDING, max_num_batched_tokens=40, max_rolling_batch_size=3)
    assert (engine.info.dimensions, engine.info.max_total_tokens) == (64, 40)
    lengths = [10, 30, 11, 9, 10, 31, 40]
    for key, length in enumerate(lengths):
        engine.add(EngineRequest(key, [5] * length, Pooling("embed")))
    engine.cancel(4)
    steps = []
    while outputs := engine.step().others:
        steps.append([lengths[output.key] for output in outputs])
    assert steps == [[10, 11, 9], [30], [31], [40]]


def test_the_graph_has_to_be_for_the_task(tmp_path: Path) -> None:
    model = write_model(tmp_path, "bert")
    with pytest.raises(ConfigError, match=r"for option\.task=rerank the graph must return logits; it has last"):
        load(model, Task.RERANK)


def test_a_directory_of_openvinos_serves_too(tmp_path: Path) -> None:
    import openvino

    from handler.engines.openvino.pooling import bert_graph

    model = write_model(tmp_path, "bert")
    openvino.save_model(bert_graph(model), model / "openvino_model.xml", compress_to_fp16=False)
    (model / "model.safetensors").unlink()
    assert engines.prepare("openvino", str(model), EngineConfig(Config(dtype="fp32"), task=Task.EMBEDDING)) == model
    found = openvino_computed(load(model, Task.EMBEDDING), [(1, TEXTS[0], Pooling("embed", normalize=False))])
    numpy.testing.assert_allclose(found[1], WANTED["bert"]["mean"][0], atol=1e-4)


def test_other_families_need_the_converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "model", "bert")
    assert engines.prepare("openvino", str(model), EngineConfig(task=Task.EMBEDDING)) == model
    (model / "config.json").write_text(json.dumps({"model_type": "mpnet", "architectures": ["MPNetModel"]}))
    monkeypatch.setenv("LMI_CACHE", str(tmp_path / "cache"))
    with pytest.raises(
        ConfigError, match=r"must be converted with optimum-intel, because .* Run: pip install .*\[convert\]"
    ):
        engines.check("openvino", str(model), EngineConfig(task=Task.EMBEDDING))
    (model / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        engines.check("openvino", str(model), EngineConfig(task=Task.EMBEDDING))


def test_the_demo_model_generates_text() -> None:
    for model in (None, "demo"):
        with pytest.raises(ConfigError, match=r"option\.task=rerank: the demo model only generates text"):
            engines.check("openvino", model, EngineConfig(task=Task.RERANK))


def test_the_tokenizer_is_the_models(tmp_path: Path) -> None:
    config = EngineConfig(model=write_model(tmp_path, "bert"), task=Task.EMBEDDING)
    tokenizer = engines.load_tokenizer("openvino", config)
    assert isinstance(tokenizer, HfPoolingTokenizer)
    assert tokenizer.encode("w7 w8").ids == [2, 7, 8, 3]
    assert OpenVinoPooling is type(engines.load("openvino", config))


def test_old_names_of_tensors_are_known(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    file = write_model(tmp_path, "bert") / "model.safetensors"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = {f"bert.{name}": value for name, value in load_file(str(file)).items()}
    for new, before in old.items():
        tensors = {name.replace(new, before): value for name, value in tensors.items()}
    save_file(tensors, str(file))
    found = openvino_computed(load(tmp_path, Task.EMBEDDING), [(1, TEXTS[0], Pooling("embed", normalize=False))])
    numpy.testing.assert_allclose(found[1], WANTED["bert"]["mean"][0], atol=1e-4)
    save_file({"embeddings.word_embeddings.weight": numpy.zeros((2, 2), numpy.float32)}, str(file))
    with pytest.raises(ConfigError, match=r"have no tensor embeddings\.position_embeddings\.weight"):
        load(tmp_path, Task.EMBEDDING)
