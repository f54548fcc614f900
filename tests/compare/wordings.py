"""Measure wordings of a decision on labelled texts: how often the demo model is right, and how sure it is.

There are two sets of texts. Those about topics are in topics.tsv: 50 sentences on each of four topics. Those about
feelings are VADER's (Hutto and Gilbert, 2014), whose ratings are in the source distribution of vaderSentiment 3.3.2,
under additional_resources/hutto_ICWSM_2014.tar.gz:

    pip download --no-deps --no-binary :all: vaderSentiment==3.3.2
    python -m tests.compare.wordings DIRECTORY [--texts 200]

DIRECTORY is the unpacked archive. The texts with the clearest ratings are drawn, as many positive as negative ones.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Any, NamedTuple

from handler.core.values import Pooling, Request
from handler.engines.base import EngineConfig, EngineRequest
from handler.engines.openvino.engine import make_scorer, prepare
from handler.engines.openvino.model import OpenVinoTokenizer
from handler.protocols.decisions.formulas import Reading
from handler.protocols.decisions.formulas import read as reading_of
from handler.serving.encoder import Encoder
from proof.bench.machine import describe
from proof.bench.report import table

_SOURCES = ("tweets", "amazonReviewSnippets", "movieReviewSnippets")
_CLEAR = 1.5  # lowest absolute rating of a text, on a scale from -4 to 4
_SEED = 7
_BINS = 10  # of the calibration error


class LabelledTexts(NamedTuple):
    """Texts with the index of the right option.

    Attributes:
        question: the question about each text.
        options: the names of the options.
        predicate: a question that is true of the texts with the first of two options, or "".
    """

    question: str
    options: tuple[str, ...]
    texts: Sequence[tuple[str, int]]
    predicate: str = ""


class Prompt(NamedTuple):
    """The end of a prompt, with the label of each option in the order of the options."""

    text: str
    labels: tuple[str, ...]


def _letters(texts: LabelledTexts, order: Sequence[str]) -> Prompt:
    lines = [f"{letter}: {option}" for letter, option in zip(ascii_uppercase, order, strict=False)]
    text = "\n".join([f"Question: {texts.question}", *lines, "Answer with the letter of one option only."])
    return Prompt(text, tuple(ascii_uppercase[order.index(option)] for option in texts.options))


def _listed_names(texts: LabelledTexts, order: Sequence[str]) -> Prompt:
    text = "\n".join([f"Question: {texts.question}", *order, "Answer with the name of one option only."])
    return Prompt(text, texts.options)


def _inline_names(texts: LabelledTexts, order: Sequence[str]) -> Prompt:
    names = f"{', '.join(order[:-1])} or {order[-1]}"
    return Prompt(f"Question: {texts.question}\nAnswer with {names} only.", texts.options)


def _yes_no(texts: LabelledTexts, order: Sequence[str]) -> Prompt:
    return Prompt(f"Question: {texts.predicate}\nyes\nno\nAnswer with yes or no only.", ("yes", "no"))


def _capital_yes_no(texts: LabelledTexts, order: Sequence[str]) -> Prompt:
    return Prompt(f"Question: {texts.predicate}\nAnswer with Yes or No only.", ("Yes", "No"))


BOTH_ORDERS = {
    "letters (version 1)": _letters,
    "names in a list": _listed_names,
    "names in the last line": _inline_names,
}
"""Wordings that are measured with the options in both orders, and with the mean of both probabilities."""

OF_PREDICATES = {"`yes`, `no` (version 1)": _yes_no, "`Yes`, `No`": _capital_yes_no}


def feelings(directory: Path, number: int) -> LabelledTexts:
    rows: tuple[list[str], list[str]] = ([], [])
    for source in _SOURCES:
        for line in (directory / f"{source}_GroundTruth.txt").read_text("utf-8", "replace").splitlines():
            _, rating, text = line.split("\t", 2)
            if abs(float(rating)) >= _CLEAR and 20 < len(text) < 200:
                rows[float(rating) < 0].append(text.strip())
    chosen = random.Random(_SEED)
    texts = [(text, index) for index, part in enumerate(rows) for text in chosen.sample(sorted(part), number // 2)]
    return LabelledTexts(
        "Is the feeling of the text positive or negative?",
        ("positive", "negative"),
        chosen.sample(texts, len(texts)),
        "Does the text express a positive feeling?",
    )


def topics(number: int) -> LabelledTexts:
    lines = Path(__file__).with_name("topics.tsv").read_text("utf-8").splitlines()
    rows = [line.split("\t") for line in lines]
    options = tuple(dict.fromkeys(topic for topic, _ in rows))
    texts = [(text, options.index(topic)) for topic, text in rows]
    return LabelledTexts(
        "What is the text about?", options, random.Random(_SEED).sample(texts, min(number, len(texts)))
    )


def reader() -> Callable[[str, Prompt], Reading]:
    """Return a function that reads the probabilities of a prompt's labels after a text."""
    model = prepare("demo", EngineConfig())
    encoder = Encoder(OpenVinoTokenizer(model), lambda: None, None, None)
    scorer = make_scorer(EngineConfig(model=model))
    scorer.check(0)

    def read(text: str, end: Prompt) -> Reading:
        messages = ({"role": "user", "content": f"{text}\n\n{end.text}"},)
        pooling = Pooling("labels", labels=end.labels, suffix=end.text)
        request, prompt = encoder.encode(Request("", messages=messages, pooling=pooling))
        assert request.pooling is not None
        scorer.add(EngineRequest(1, prompt.ids, request.pooling))
        while (scores := scorer.step(idle=True)) is None:
            pass
        return reading_of([logprob for logprob in scores.logprobs if logprob is not None])

    return read


class Probabilities(NamedTuple):
    """The probabilities that a wording gave to the options of each text."""

    name: str
    rows: Sequence[Sequence[float]]
    label_mass: float


def measured(name: str, ends: Prompt, texts: LabelledTexts, read: Callable[[str, Prompt], Reading]) -> Probabilities:
    readings = [read(text, ends) for text, _ in texts.texts]
    mass = statistics.mean(reading.label_mass for reading in readings)
    return Probabilities(name, [reading.probabilities for reading in readings], mass)


def mean_of(name: str, first: Probabilities, second: Probabilities) -> Probabilities:
    rows = [
        [statistics.mean(pair) for pair in zip(*both, strict=True)]
        for both in zip(first.rows, second.rows, strict=True)
    ]
    return Probabilities(name, rows, statistics.mean([first.label_mass, second.label_mass]))


def all_of(texts: LabelledTexts, read: Callable[[str, Prompt], Reading]) -> list[Probabilities]:
    rows = []
    for name, wording in OF_PREDICATES.items() if texts.predicate else ():
        rows.append(measured(name, wording(texts, texts.options), texts, read))
    for name, wording in BOTH_ORDERS.items():
        forward = measured(name, wording(texts, texts.options), texts, read)
        backward = measured(f"{name}, in reverse", wording(texts, texts.options[::-1]), texts, read)
        rows += [forward, backward, mean_of(f"{name}, mean of both orders", forward, backward)]
    return rows


def summary(probabilities: Probabilities, texts: LabelledTexts) -> dict[str, Any]:
    right = [index for _, index in texts.texts]
    rows = probabilities.rows
    best = [max(range(len(row)), key=row.__getitem__) for row in rows]
    areas = [_area([row[option] for row in rows], [index == option for index in right]) for option in set(right)]
    squares = (
        sum((value - (option == index)) ** 2 for option, value in enumerate(row)) / 2
        for row, index in zip(rows, right, strict=True)
    )
    correct = [chosen == index for chosen, index in zip(best, right, strict=True)]
    return {
        "wording": probabilities.name,
        "accuracy": round(statistics.mean(correct), 2),
        "ranking (AUC)": round(statistics.mean(areas), 2),
        "Brier": round(statistics.mean(squares), 3),
        "calibration error": round(_calibration_error([max(row) for row in rows], correct), 2),
        "label mass": round(probabilities.label_mass, 3),
        "most frequent choice": round(max(Counter(best).values()) / len(best), 2),
    }


def _area(values: Sequence[float], positive: Sequence[bool]) -> float:
    """Return the probability that a positive text has a higher value than a negative one."""
    above = [value for value, is_positive in zip(values, positive, strict=True) if is_positive]
    below = [value for value, is_positive in zip(values, positive, strict=True) if not is_positive]
    return statistics.mean((high > low) + 0.5 * (high == low) for high in above for low in below)


def _calibration_error(values: Sequence[float], correct: Sequence[bool]) -> float:
    """Return the expected calibration error: the mean distance of the probability from the accuracy, by bins."""
    bins: dict[int, list[tuple[float, bool]]] = {}
    for value, is_correct in zip(values, correct, strict=True):
        bins.setdefault(min(int(value * _BINS), _BINS - 1), []).append((value, is_correct))
    distances = (abs(sum(value - is_correct for value, is_correct in part)) for part in bins.values())
    return math.fsum(distances) / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="the unpacked archive with the ratings")
    parser.add_argument("--texts", type=int, default=200, help="number of texts of each set (default: %(default)s)")
    arguments = parser.parse_args()
    read = reader()
    result = {}
    for name, texts in (
        ("feelings", feelings(arguments.directory, arguments.texts)),
        ("topics", topics(arguments.texts)),
    ):
        rows = [summary(probabilities, texts) for probabilities in all_of(texts, read)]
        print(f"{name}\n{table([*rows[0]], [[str(value) for value in row.values()] for row in rows])}", flush=True)
        result[name] = rows
    print(json.dumps({**result, **describe()}))


if __name__ == "__main__":
    main()
