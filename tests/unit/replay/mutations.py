"""Differences of a recorded answer: each value deleted, emptied, retyped, renamed, repeated, reordered or changed.

The golden files of the dialects are the recorded answers. `python -m tests.unit.replay.mutations` prints the number of
mutants that a replay finds, by operation and class.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from proof.replay.comparison import Class, Seen, class_of, findings, traits
from proof.replay.content import ARGUMENTS, TEXTS, Documents, NotJson, read_documents
from proof.replay.exchange import Request, Response

GOLDEN = Path(__file__).parents[2] / "golden"
DIALECTS = (
    "anthropic", "async", "audio", "chat", "dynamic_batch", "embeddings", "lmi", "mindie", "openai", "rerank",
    "responses", "tei", "tgi", "tgi_compat", "triton", "vllm",
)  # fmt: skip
"""Directories of golden files that contain requests and their answers."""

Place = tuple[Any, ...]
"""The number of a document, and the names and indexes that lead to a value in it."""


class Recorded(NamedTuple):
    request: Request
    answer: Response
    documents: Documents


class Mutant(NamedTuple):
    operation: str
    place: Place
    old: Any
    new: Any
    answer: Response


def recorded(dialect: str) -> Iterator[Recorded]:
    """Yield the recorded answers of a dialect that are JSON."""
    for file in sorted((GOLDEN / dialect).rglob("*.txt")):
        asked, _, rest = file.read_bytes().partition(b"\n< ")
        head, _, content = rest.partition(b"\n")
        status, _, media = head.decode().partition(" ")
        try:
            documents = read_documents(content)
        except NotJson:
            continue
        answer = Response(int(status), media, body(documents.values, documents.glue))
        yield Recorded(Request("1", f"/{dialect}", {}, asked[2:]), answer, documents)


def body(values: list[Any], glue: list[str]) -> bytes:
    texts = [json.dumps(value, ensure_ascii=False, separators=(",", ":")) for value in values]
    return "".join([glue[0], *(part for pair in zip(texts, glue[1:], strict=True) for part in pair)]).encode()


def mutants(one: Recorded, known: set[Any]) -> Iterator[Mutant]:
    """Yield the differences of kinds that are not in `known`, and add the kinds.

    Differences of one kind have the same operation, types, and place but for indexes. Of documents, the first and the
    last are others.
    """
    values, glue = one.documents
    about = (one.answer.status, len(values) > 1)
    for place, value, parent in _walk(values, ()):
        for operation, change, new in _changes(place[-1], value, parent):
            at = (place[0] == 0, place[0] == len(values) - 1) if len(place) == 1 else ()
            kind = (*about, operation, generic(place), type(value), type(new), *at)
            if kind in known:
                continue
            documents = json.loads(json.dumps(values))
            holder = documents
            for name in place[:-1]:
                holder = holder[name]
            change(holder)
            texts = list(glue)
            if len(documents) < len(values):
                del texts[place[0]]
            elif len(documents) > len(values):
                texts.insert(place[0] + 1, glue[1] if len(values) > 1 else "\n")
            changed = one.answer._replace(body=body(documents, texts))
            if documents and changed.body != one.answer.body:
                known.add(kind)
                yield Mutant(operation, place, value, new, changed)


def generic(place: Place) -> str:
    return ".".join("[]" if isinstance(name, int) else name for name in place)


def _walk(value: Any, place: Place) -> Iterator[tuple[Place, Any, Any]]:
    for name, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*place, name), part, value
        if isinstance(part, dict | list):
            yield from _walk(part, (*place, name))


def _changes(name: Any, value: Any, parent: Any) -> Iterator[tuple[str, Callable[[Any], None], Any]]:
    def put(new: Any) -> Callable[[Any], None]:
        return lambda holder: holder.__setitem__(name, new)

    def rename(holder: Any) -> None:
        parts = [(f"{key}_x" if key == name else key, part) for key, part in holder.items()]
        holder.clear()
        holder.update(parts)

    def swap(holder: Any) -> None:
        holder[name], holder[name + 1] = holder[name + 1], holder[name]

    yield "delete", lambda holder: holder.__delitem__(name), None
    if value and isinstance(value, str | list | dict):
        yield "empty", put(type(value)()), type(value)()
    for new in _retyped(value):
        yield "retype", put(new), new
    for new in _changed(value):
        yield "change", put(new), new
    if isinstance(parent, dict):
        yield "rename", rename, None
        yield "add", lambda holder: holder.update(added=1), None
    else:
        yield "repeat", lambda holder: holder.insert(name, holder[name]), None
        if name + 1 < len(parent) and parent[name] != parent[name + 1]:
            yield "reorder", swap, None
    if isinstance(value, list):
        yield "append", lambda holder: holder[name].append("x"), None


def _retyped(value: Any) -> list[Any]:
    if value is None:
        return [0, "", [], {}, False]
    if isinstance(value, bool):
        return [None, int(value), str(value)]
    if isinstance(value, int):
        return [None, float(value), str(value), [value]]
    if isinstance(value, float):
        return [None, str(value)]  # 1 in place of 1.0 is the same number to every client
    if isinstance(value, str):
        return [None, 1, [value], {"text": value}]
    return [
        None,
        "x",
        [value] if isinstance(value, dict) else {"a": 1},
        *(value[:1] if isinstance(value, list) else ()),
    ]


def _changed(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value * 2 + 1]
    return [f"{value}x", value[:-1]] if value and isinstance(value, str) else []


def found(one: Recorded, mutant: Mutant, *, greedy: bool) -> Class:
    return class_of(findings(one.answer, mutant.answer, traits(one.request)._replace(greedy=greedy), Seen()))


# -- why a difference counts as equal ----------------------------------------------------------------------------------


def why_equal(one: Recorded, mutant: Mutant) -> str:
    """Return why a client finds no difference in the mutant of an answer that was decoded greedily, or ""."""
    name = next((part for part in reversed(mutant.place) if isinstance(part, str)), "")
    if one.answer.status >= 400 and name in ("message", "error") and {type(mutant.old), type(mutant.new)} == {str}:
        return "an error's message"
    streams = len(one.documents.values) > 1
    if (
        mutant.operation == "reorder"
        and streams
        and len(mutant.place) == 1
        and _joins(one.documents.values) == _joins(read_documents(mutant.answer.body).values)
    ):
        return "the joined texts are the same, and choices may arrive in any order"
    if mutant.operation == "change" and name in ARGUMENTS and mutant.old.strip() == mutant.new.strip():
        return "white space between the JSON of arguments"
    if (
        mutant.operation == "retype"
        and streams
        and name in TEXTS
        and {repr(mutant.old), repr(mutant.new)} == {"None", "''"}
    ):
        return "no text, as null or as an empty string"
    return ""


def _joins(documents: list[Any]) -> dict[str, list[Any]]:
    """Return the texts of a stream, joined by place and choice, and its other values in order."""
    joined: dict[str, list[Any]] = {}
    for document in documents:
        choices = document.get("choices") if isinstance(document, dict) else None
        of = choices[0] if choices else document
        kind = f"{of.get('type')}{of.get('index')}" if isinstance(of, dict) else ""
        for place, value, _ in _walk([document], ()):
            if not isinstance(value, dict | list):
                joined.setdefault(f"{kind} {generic(place)}", []).append(value)
    return {
        place: ["".join(value or "" for value in values)] if place.rpartition(".")[2] in TEXTS | ARGUMENTS else values
        for place, values in joined.items()
    }


def why_sampled(one: Recorded, mutant: Mutant) -> str:
    """Return why the new type of a value in a sampled answer is no difference, or ""."""
    if {"input", "arguments"} & set(mutant.place[:-1]):
        return "the model's own fields of a call"
    if "top_logprobs" in mutant.place:
        return "a token as a name"
    same = (value for place, value, _ in _walk(one.documents.values, ()) if generic(place) == generic(mutant.place))
    if any(type(value) is type(mutant.new) or (type(mutant.new), type(value)) == (int, float) for value in same):
        return "the same answer has a value of this type at the same place"
    return ""


def main() -> None:
    for greedy in (True, False):
        counts: Counter[tuple[str, str]] = Counter()
        for dialect in DIALECTS:
            for one in recorded(dialect):
                for mutant in mutants(one, set()):
                    cls = found(one, mutant, greedy=greedy)
                    why = (why_equal(one, mutant) if greedy else "sampled") if cls is Class.EQUAL else ""
                    counts[mutant.operation, f"{cls.value}: {why}" if cls is Class.EQUAL else cls.value] += 1
        print("greedy" if greedy else "sampled", sum(counts.values()))
        for (operation, kind), number in sorted(counts.items()):
            print(f"  {operation:8} {kind:40} {number:6}")


if __name__ == "__main__":
    main()
