"""A Whisper with random weights, made by transformers' own classes, and what it answers; needs torch and optimum-intel.

`python -m tests.checkpoints.whisper DIRECTORY` writes it in OpenVINO's form, and its answers, which are in
tests/golden/engines/whisper/. optimum-intel 2.2 with transformers 4.57 made them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from handler.core.media import SAMPLE_RATE, MediaSource, Medium
from handler.core.text import Prompt
from handler.core.values import Finish, Heard, Request, Sampling, TemplateOptions
from handler.engines.base import EngineConfig, EngineRequest, Output, Tokenizer
from handler.engines.process.engine_process import Spec
from handler.engines.process.supervisor import EngineSupervisor, State
from handler.scheduler.engine import join
from handler.serving.media.loader import place_media
from tests.checkpoints.audio import clip

GAP = 0.04
NUM_TOKENS = 12
SEED = 1
_SPECIAL = (
    "<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>",
    "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
)  # fmt: skip


class Case(NamedTuple):
    """A clip, and what is asked for."""

    clip: Medium
    language: str
    task: str
    prompt: str = ""


CASES = (
    Case(clip(2.0, 1), "en", "transcribe"),
    Case(clip(2.0, 1), "de", "transcribe"),
    Case(clip(2.0, 1), "de", "translate"),
    Case(clip(3.7, 2), "en", "transcribe"),
    Case(clip(2.0, 1), "en", "transcribe", "hello world"),
)


def write_model(directory: Path, seed: int = SEED) -> Path:
    """Write a Hugging Face directory."""
    import torch
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    from tests.random_models import byte_tokenizer

    tokenizer = byte_tokenizer([*_SPECIAL])
    tokenizer.add_tokens([f"<|{number * 0.02:.2f}|>" for number in range(1501)])
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.bos_token = "<|endoftext|>"
    ids = dict(zip(_SPECIAL, tokenizer.convert_tokens_to_ids([*_SPECIAL]), strict=True))
    end, start = ids["<|endoftext|>"], ids["<|startoftranscript|>"]
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in _SIZES.items()}
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        num_mel_bins=80,
        d_model=64,
        decoder_start_token_id=start,
        pad_token_id=end,
        bos_token_id=end,
        eos_token_id=end,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **sizes,
    )
    torch.manual_seed(seed)
    model = WhisperForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("decoder.layer_norm.weight"):
                weight.fill_(10)  # logits further apart
            elif "decoder.embed_positions" in name:
                weight.normal_(0, 0.3)
            elif weight.dim() > 1 and "embed_positions" not in name:  # wide enough that clips and words matter
                wide = 4 if "encoder_attn" in name else 1
                weight.normal_(0, 0.12 if "embed_tokens" in name else wide / weight[0].numel() ** 0.5)
    made = model.generation_config
    made._from_model_config = False  # else optimum leaves out what follows
    made.is_multilingual = True
    made.lang_to_id = {name: ids[name] for name in ("<|en|>", "<|de|>")}
    made.task_to_id = {name: ids[f"<|{name}|>"] for name in ("transcribe", "translate")}
    made.no_timestamps_token_id = ids["<|notimestamps|>"]
    made.prev_sot_token_id = ids["<|startofprev|>"]
    made.return_timestamps = False
    made.max_initial_timestamp_index = 50
    made.max_length = 448
    made.suppress_tokens = list(range(end, len(tokenizer)))  # an answer has words alone
    made.begin_suppress_tokens = [end]
    model.float().save_pretrained(directory)
    WhisperFeatureExtractor(feature_size=80).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


_SIZES = {"layers": 2, "attention_heads": 2, "ffn_dim": 128}


class Answer(NamedTuple):
    """Greedy ids, and the least difference of the first two logits."""

    ids: list[int]
    gap: float


class Reference:
    """transformers in fp32; the logits of each step are computed anew."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoTokenizer, WhisperFeatureExtractor, WhisperForConditionalGeneration

        self._torch = torch
        self._model = WhisperForConditionalGeneration.from_pretrained(model).eval()
        self._extractor = WhisperFeatureExtractor.from_pretrained(model)
        self._tokenizer = AutoTokenizer.from_pretrained(model)

    def language(self, medium: Medium) -> str:
        """Return the language that a clip is taken for."""
        import numpy

        samples, languages = numpy.frombuffer(medium.data, numpy.float32), self._model.generation_config.lang_to_id
        features = self._extractor(samples, sampling_rate=SAMPLE_RATE, return_tensors="pt").input_features
        start = self._torch.tensor([[self._model.generation_config.decoder_start_token_id]])
        with self._torch.no_grad():
            logits = self._model(features, decoder_input_ids=start).logits[0, -1]
        best: str = max(languages, key=lambda name: float(logits[languages[name]]))
        return best.strip("<|>")

    def answer(self, case: Case, *, timed: bool = False) -> Answer:
        """Answer a case of up to 30 s; `timed` with the tokens of times, after a first one."""
        import numpy

        torch, config = self._torch, self._model.generation_config
        samples = numpy.frombuffer(case.clip.data, numpy.float32)
        features = self._extractor(samples, sampling_rate=SAMPLE_RATE, return_tensors="pt").input_features
        named = [f"<|{name}|>" for name in ("startoftranscript", case.language, case.task)]
        ids = [*self._tokenizer.convert_tokens_to_ids(named), config.no_timestamps_token_id + timed]
        if case.prompt:
            words = self._tokenizer.encode(" " + case.prompt, add_special_tokens=False)
            ids = [config.prev_sot_token_id, *words, *ids]
        with torch.no_grad():
            heard = self._model.get_encoder()(features)
        found: list[int] = []
        gaps: list[float] = []
        for _ in range(NUM_TOKENS):
            with torch.no_grad():
                given = torch.tensor([[*ids, *found]])
                logits = self._model(encoder_outputs=heard, decoder_input_ids=given).logits[0, -1]
            logits[config.suppress_tokens] = float("-inf")
            best = logits.topk(2)
            found.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
        return Answer(found, min(gaps))


def write_timed(model: Path, directory: Path) -> Path:
    """Write a model of which times are not suppressed."""
    shutil.copytree(model, directory)
    made = json.loads((directory / "generation_config.json").read_text())
    made["suppress_tokens"] = [id for id in made["suppress_tokens"] if id <= made["no_timestamps_token_id"]]
    (directory / "generation_config.json").write_text(json.dumps(made))
    return directory


def prompt(tokenizer: Tokenizer, case: Case, *, timed: bool = False) -> Prompt:
    """Make a case's prompt, as the server does."""
    messages = ({"role": "user", "content": [{"type": "audio"}]},)
    asked = {"language": case.language, "task": case.task, "prompt": case.prompt, "timestamps": timed}
    template = TemplateOptions(arguments=tuple(asked.items()))
    request = Request("", messages=messages, media=(MediaSource("audio", b"", "", "file"),), template=template)
    encoded = tokenizer.encode_chat(messages, options=template)
    return place_media(request, encoded, (case.clip,), tokenizer.media_tokens)


class Transcript:
    """What an engine has said of a clip."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.pieces: list[tuple[int, Heard]] = []
        self.steps = 0
        self.finish: Finish | None = None
        self.error: str | None = None

    def take(self, output: Output) -> None:
        if output.extras is not None and output.extras.heard is not None:
            self.pieces.append((len(self.ids), output.extras.heard))
        self.ids += output.ids
        self.steps += bool(output.ids)
        self.finish, self.error = output.finish, output.error


def start(name: str, config: EngineConfig) -> EngineSupervisor:
    """Load an engine in a process of its own."""
    engine = EngineSupervisor(Spec(name, config), load_timeout=600)
    while engine.state is State.LOADING:
        engine.step(timeout=1)
    assert engine.state is State.READY
    return engine


def transcribe(engine: EngineSupervisor, prompts: Sequence[Prompt]) -> list[Transcript]:
    """Have an engine transcribe clips at a time."""
    for key, one in enumerate(prompts, 1):
        assert one.media is not None
        engine.add(EngineRequest(key, one.ids, Sampling(max_new_tokens=1 << 20), media=one.media.file))
    found = {key: Transcript() for key in range(1, len(prompts) + 1)}
    while any(one.finish is None for one in found.values()):
        for output in join(engine.step(timeout=1)).others:
            if output.key in found:  # one that is cancelled may have been on its way
                found[output.key].take(output)
    return [*found.values()]


def main(directory: Path) -> None:
    source = write_model(directory / "checkpoint")
    reference = Reference(source)
    answers: list[dict[str, Any]] = [reference.answer(case)._asdict() for case in CASES]
    (directory / "answers.json").write_text(json.dumps(answers) + "\n")
    assert min(answer["gap"] for answer in answers) >= GAP, answers
    command = Path(sys.executable).with_name("optimum-cli")
    task = ("--task", "automatic-speech-recognition-with-past", "--weight-format", "fp32")
    subprocess.run([command, "export", "openvino", "-m", source, *task, directory / "openvino"], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
