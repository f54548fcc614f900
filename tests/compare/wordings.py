"""Measure wordings of a decision on labelled texts: how often the demo model is right, and how sure it is.

The texts are those of VADER (Hutto and Gilbert, 2014), whose ratings of sentiment are in the source distribution of
vaderSentiment 3.3.2, under additional_resources/hutto_ICWSM_2014.tar.gz:

    pip download --no-deps --no-binary :all: vaderSentiment==3.3.2
    python -m tests.compare.wordings DIRECTORY [--texts 150]

DIRECTORY is the unpacked archive. The texts with the clearest ratings are drawn, as many positive as negative ones.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from handler.core.values import Pooling, Request
from handler.engines.base import EngineConfig, EngineRequest
from handler.engines.openvino.engine import make_scorer, prepare
from handler.engines.openvino.model import OpenVinoTokenizer
from handler.serving.encoder import Encoder
from proof.bench.machine import describe
from proof.bench.report import table

_SOURCES = ("tweets", "amazonReviewSnippets", "movieReviewSnippets")
_CLEAR = 1.5  # lowest absolute rating of a text, on a scale from -4 to 4
_SEED = 7


class Wording(NamedTuple):
    """A question about a text, with the labels for positive and negative."""

    question: str
    labels: tuple[str, str]


_POSITIVE = "Question: Does the text express a positive feeling?"
_WHICH = "Question: Is the feeling of the text positive or negative?"
WORDINGS = {
    "yes, no (served)": Wording(f"{_POSITIVE}\nyes\nno\nAnswer with yes or no only.", ("yes", "no")),
    "letters (served)": Wording(
        f"{_WHICH}\nA: positive\nB: negative\nAnswer with the letter of one option only.", ("A", "B")
    ),
    "letters, other order": Wording(
        f"{_WHICH}\nA: negative\nB: positive\nAnswer with the letter of one option only.", ("B", "A")
    ),
    "Yes, No": Wording(f"{_POSITIVE}\nReply with Yes or No only.", ("Yes", "No")),
    "names of the options": Wording(f"{_WHICH}\nReply with positive or negative only.", ("positive", "negative")),
}


def texts(directory: Path, number: int) -> list[tuple[str, bool]]:
    """Return texts with whether they are positive."""
    rows: dict[bool, list[str]] = {True: [], False: []}
    for source in _SOURCES:
        for line in (directory / f"{source}_GroundTruth.txt").read_text("utf-8", "replace").splitlines():
            _, rating, text = line.split("\t", 2)
            if abs(float(rating)) >= _CLEAR and 20 < len(text) < 200:
                rows[float(rating) > 0].append(text.strip())
    chosen = random.Random(_SEED)
    half = [(text, positive) for positive in rows for text in chosen.sample(sorted(rows[positive]), number // 2)]
    return chosen.sample(half, len(half))


def reader() -> Callable[[str, Wording], list[float]]:
    """Return a function that reads the log-probabilities of a wording's labels after a text, and the highest one."""
    model = prepare("demo", EngineConfig())
    encoder = Encoder(OpenVinoTokenizer(model), lambda: None, None, None)
    scorer = make_scorer(EngineConfig(model=model))
    scorer.check(0)

    def read(text: str, wording: Wording) -> list[float]:
        messages = ({"role": "user", "content": f"{text}\n\n{wording.question}"},)
        pooling = Pooling("labels", labels=wording.labels, suffix=wording.question)
        request, prompt = encoder.encode(Request("", messages=messages, pooling=pooling))
        assert request.pooling is not None
        scorer.add(EngineRequest(1, prompt.ids, request.pooling))
        while (scores := scorer.step(idle=True)) is None:
            pass
        return [logprob for logprob in scores.logprobs if logprob is not None]

    return read


def row(name: str, readings: list[tuple[list[float], bool]]) -> dict[str, Any]:
    probabilities = [(1 / (1 + math.exp(no - yes)), positive) for (yes, no, _), positive in readings]
    positives = [probability for probability, positive in probabilities if positive]
    negatives = [probability for probability, positive in probabilities if not positive]
    pairs = [(above > below) + 0.5 * (above == below) for above in positives for below in negatives]
    return {
        "wording": name,
        "accuracy": round(statistics.mean((value > 0.5) == positive for value, positive in probabilities), 2),
        "ranking (AUC)": round(statistics.mean(pairs), 2),
        "Brier": round(statistics.mean((value - positive) ** 2 for value, positive in probabilities), 3),
        "label mass": round(statistics.mean(math.exp(yes) + math.exp(no) for (yes, no, _), _ in readings), 3),
        "said positive": round(statistics.mean(value > 0.5 for value, _ in probabilities), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="the unpacked archive with the ratings")
    parser.add_argument("--texts", type=int, default=150, help="number of texts (default: %(default)s)")
    arguments = parser.parse_args()
    chosen, read = texts(arguments.directory, arguments.texts), reader()
    rows = []
    for name, wording in WORDINGS.items():
        rows.append(row(name, [(read(text, wording), positive) for text, positive in chosen]))
    print(table([*rows[0]], [[str(value) for value in row.values()] for row in rows]))
    print(json.dumps({"rows": rows, **describe()}))


if __name__ == "__main__":
    main()
