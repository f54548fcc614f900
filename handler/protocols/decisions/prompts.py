"""The wording of the prompts for decisions, and the labels that stand for the options of a question.

A question is a chat with one user message: the state, a blank line, the question with one line for each option, and
an instruction to reply with the label of one option. The model's next token is then one of the labels.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from types import MappingProxyType
from typing import NamedTuple

from handler.core.text import Vocabulary
from handler.protocols.decisions.values import Kind, Question

PROMPT_VERSIONS = (1, 2)
"""Supported versions of the prompt. The first is the default. Any change to a prompt requires a new version, because it
changes the probabilities. In version 2, a choice's labels are its option names if each name is a single token."""


class Wording(NamedTuple):
    """The texts around the parts of a question.

    Attributes:
        heading: the line with the question's instructions, which a question without instructions omits.
        option: the line of an option, with its label and its name.
        described: the line of an option that has a description.
        yes_no: the labels for true and false.
        bare: the line for true or false without a criterion.
        criterion: the line for true or false with a criterion.
        ending: the last line, which asks for a label.
        endings: the label in this line, by form of question.
    """

    heading: str = "Question: {}"
    option: str = "{}: {}"
    described: str = "{}: {} - {}"
    yes_no: tuple[str, str] = ("yes", "no")
    bare: str = "{}"
    criterion: str = "{}: {}"
    ending: str = "Answer with {} only."
    endings: Mapping[Kind, str] = MappingProxyType(
        {Kind.NOUL: "yes or no", Kind.CHOICE: "the letter of one option", Kind.SCORE: "the number of one level"}
    )


WORDING = Wording()


class Labels(NamedTuple):
    """The labels of a question's options.

    Attributes:
        are_names: whether each label is the name of its option.
    """

    texts: tuple[str, ...]
    are_names: bool = False


def question_text(question: Question, labels: Labels, wording: Wording = WORDING) -> str:
    """Return the end of a prompt: the question, its options, and the instruction to reply with a label."""
    lines = [wording.heading.format(question.instructions)] if question.instructions else []
    if labels.are_names:
        described = zip(labels.texts, question.options, strict=True)
        lines += [
            wording.criterion.format(name, option.description) for name, option in described if option.description
        ]
        return "\n".join([*lines, wording.ending.format(_alternatives(labels.texts))])
    for label, option in zip(labels.texts, question.options, strict=True):
        if question.form is Kind.NOUL:
            form = wording.criterion if option.description else wording.bare
            lines.append(form.format(label, option.description))
        elif option.description:
            lines.append(wording.described.format(label, option.name, option.description))
        else:
            lines.append(wording.option.format(label, option.name))
    return "\n".join([*lines, wording.ending.format(wording.endings[question.form])])


def _alternatives(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def labels_for(
    question: Question, vocabulary: Vocabulary | None, version: int = PROMPT_VERSIONS[0], wording: Wording = WORDING
) -> Labels:
    """Return a label for each option of a question: yes and no, the numbers of levels, names, or letters.

    Args:
        vocabulary: the model's vocabulary, or None if it depends on the prompt.
        version: the version of the prompt.

    Returns:
        The labels. There are fewer than options if the vocabulary has too few pairs of letters.
    """
    number = len(question.options)
    if question.form is Kind.NOUL:
        return Labels(wording.yes_no)
    if question.form is Kind.SCORE:
        return Labels(tuple(map(str, range(number))))
    if version > 1 and question.kind is Kind.CHOICE and vocabulary is not None:
        names = question.choices
        if len({*names}) == number and _pieces(vocabulary).issuperset(name.encode() for name in names):
            return Labels(names, are_names=True)
    if number <= len(ascii_uppercase):
        return Labels(tuple(ascii_uppercase[:number]))
    return Labels(_letter_pairs(vocabulary)[:number])


@functools.lru_cache(4)
def _pieces(vocabulary: Vocabulary) -> frozenset[bytes]:
    return frozenset(vocabulary.pieces)


_PAIRS = tuple(first + second for first in ascii_uppercase for second in ascii_uppercase)


@functools.lru_cache(4)
def _letter_pairs(vocabulary: Vocabulary | None) -> tuple[str, ...]:
    """Return the pairs of capital letters that are tokens of the vocabulary.

    Pairs that are tokens only with a space before them come last, because they are single tokens only after a prompt
    to whose end a tokenizer adds a space.
    """
    if vocabulary is None:
        return _PAIRS
    pieces = {piece for piece in vocabulary.pieces if len(piece) <= 3}
    plain = [pair for pair in _PAIRS if pair.encode() in pieces]
    spaced = [pair for pair in _PAIRS if f" {pair}".encode() in pieces]
    return tuple(dict.fromkeys([*plain, *spaced]))
