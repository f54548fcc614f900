"""Forms: their parts by name, what is too long or broken, and a file that is written piece by piece."""

from __future__ import annotations

import pytest

from handler.core.errors import InvalidPayload
from handler.core.media import Upload
from handler.serving import forms
from handler.serving.forms import FormReader, read_form
from tests.limits import undocumented
from tests.one_test import in_one_test

TYPE = "multipart/form-data; boundary=b"


def part(name: str, value: bytes, *, filename: str | None = None) -> bytes:
    file = "" if filename is None else f'; filename="{filename}"'
    return f'--b\r\ncontent-disposition: form-data; name="{name}"{file}\r\n\r\n'.encode() + value + b"\r\n"


END = b"--b--\r\n"


def test_parts_are_texts_files_and_lists_by_name() -> None:
    parts = (
        part("a", "é".encode()), part("a", b"last"), part("list[]", b"1"), part("list[]", b"2"),
        part("file", b"\xff\x00", filename="x.wav"), part("empty", b""), part("none", b"", filename=""),
    )  # fmt: skip
    assert read_form(b"".join(parts) + END, TYPE) == {
        "a": "last",
        "list[]": ["1", "2"],
        "file": Upload(b"\xff\x00", "x.wav"),
        "empty": "",
        "none": Upload(b"", ""),
    }
    mixed = part("f[]", b"a", filename="a") + part("f[]", b"b")
    assert read_form(mixed + END, TYPE) == {"f[]": Upload(b"a", "a")}


def test_headers_may_be_written_in_any_case() -> None:
    body = part("a", b"1").replace(b"content-disposition", b"X-Other: y\r\nContent-Disposition")
    assert read_form(body + END, TYPE) == {"a": "1"}


@in_one_test(
    ("content_type", "body", "words"),
    [
        ("multipart/form-data", END, "multipart/form-data needs a boundary of 1 to 70 characters"),
        (f"multipart/form-data; boundary={'b' * 71}", END, "needs a boundary of 1 to 70 characters"),
        (TYPE, b"", "the body is not valid multipart/form-data, or is incomplete"),
        (TYPE, part("a", b"1"), "or is incomplete"),
        (TYPE, b"{}", "the body is not valid multipart/form-data"),
        (TYPE, part("", b"1") + END, "a part of the form has no name"),
        (TYPE, part("a", b"\xff") + END, "'a' must be UTF-8 text"),
        (TYPE, part("n" * 70, b"\xff") + END, f"'{'n' * 64}' must be UTF-8 text"),
        (TYPE, part("a", b"x" * ((1 << 20) + 1)) + END, "'a' is longer than 1048576 bytes, the limit for text fields"),
        (TYPE, part("a", b"1") * 65 + END, "the form has more than 64 parts"),
    ],
)
def test_what_is_no_form_or_too_much_is_refused(content_type: str, body: bytes, words: str) -> None:
    with pytest.raises(InvalidPayload) as raised:
        read_form(body, content_type)
    assert words in raised.value.message


def test_a_form_may_be_as_large_as_its_limits() -> None:
    assert read_form(part("a", b"1") * 63 + part("b", b"x" * (1 << 20)) + END, TYPE)["b"] == "x" * (1 << 20)
    long = "b" * 70
    body = (part("a", b"1") + END).replace(b"--b", f"--{long}".encode())
    assert read_form(body, f"multipart/form-data; boundary={long}") == {"a": "1"}
    assert read_form(part("f", b"x" * ((1 << 20) + 1), filename="f") + END, TYPE)["f"] == Upload(
        b"x" * ((1 << 20) + 1), "f"
    )


def test_a_file_is_written_as_it_comes() -> None:
    pieces = list[bytes]()
    form = FormReader(TYPE, lambda data: pieces.append(bytes(data)))
    body = part("purpose", b"batch") + part("file", b"0123456789", filename="f") + END
    for start in range(0, len(body), 7):
        form.feed(body[start : start + 7])
    assert form.end() == {"purpose": "batch", "file": Upload(b"", "f")}
    assert b"".join(pieces) == b"0123456789"
    assert len(pieces) > 1


def test_a_form_that_is_written_has_one_file() -> None:
    form = FormReader(TYPE, lambda data: None)
    with pytest.raises(InvalidPayload, match=r"^the form has more than one file$"):
        form.feed(part("file", b"1", filename="f") + part("other", b"2", filename="g") + END)
    two = part("file", b"1", filename="f") + part("other", b"2", filename="g") + END
    assert read_form(two, TYPE) == {"file": Upload(b"1", "f"), "other": Upload(b"2", "g")}


def test_the_number_of_a_forms_parts_is_documented() -> None:
    assert not undocumented("media.md", f"A form may have at most {forms.MAX_PARTS} parts")
