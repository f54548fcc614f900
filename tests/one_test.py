"""Many small cases as one test: pytest and its workers take 3 ms for each test, more than the case itself does."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

Test = Callable[..., None]


def in_one_test(
    names: str | Sequence[str], cases: Iterable[Any], *, ids: Iterable[Any] | Callable[[Any], Any] | None = None
) -> Callable[[Test], Test]:
    """`pytest.mark.parametrize` as a loop: all cases run, also after one that fails, and those that fail are named.

    It is for cases that share nothing, not even a fixture that one of them changes.
    """
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    values = [(case,) if len(names) == 1 else tuple(case) for case in cases]
    if ids is None or callable(ids):
        labels = ["-".join(str((ids or _short)(part)) for part in value) for value in values]
    else:
        labels = [str(id) for id in ids]
    assert values, "there are no cases"
    assert len(labels) == len(values)
    assert all(len(value) == len(names) for value in values)

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)
        assert set(names) <= set(signature.parameters)

        @functools.wraps(test)
        def run_all(**given: Any) -> None:
            failed: list[tuple[str, BaseException]] = []
            for label, value in zip(labels, values, strict=True):
                try:
                    test(**given, **dict(zip(names, value, strict=True)))
                except (Exception, pytest.fail.Exception) as error:
                    failed.append((label, error))
            if failed:
                told = "\n".join(f"[{label}] {type(error).__name__}: {error}" for label, error in failed)
                raise AssertionError(f"{len(failed)} of {len(values)} cases fail:\n{told}") from failed[0][1]

        kept = [parameter for name, parameter in signature.parameters.items() if name not in names]
        run_all.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return run_all

    return decorate


def _short(value: Any) -> str:
    return text if len(text := str(value)) < 60 else f"{text[:60]}..."
