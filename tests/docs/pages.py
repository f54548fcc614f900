"""The documents as text: pages, links, anchors, sentences, generated tables. Pure; MkDocs's hook reads it too."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

ROOT = Path(__file__).parents[2]
OUTSIDE = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "AGENTS.md", "LICENSE"),
    *("Dockerfile", "serving.properties", "examples/**/*.*", "handler/*/README.md", "proof/RESULTS.md"),
)
"""Files outside of docs/ that belong to the documents."""

MAX_WORDS = 20
"""Of a sentence."""

_FENCE = re.compile(r"( *)(`{3,}|~{3,})(.*)")
_CODE = re.compile(r"(`+)(?:(?!\1).)+\1")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_HEADING = re.compile(r"^#{1,6} +(.+)", re.MULTILINE)
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_LINK_TEXT = re.compile(r"!?\[([^\[\]]*)\]\([^()\s]*\)")
_BLOCK = re.compile(r"(#{1,6} )|(\|)|([*-] |1\. )|(```)")
_AFTER_FENCE = 5
_ITEM = re.compile(r" *(?:[*-]|\d+\.) +")
_SENTENCE_END = re.compile(r"(?<!e\.g\.)(?<!i\.e\.)(?<=[.!?])[\"')]*\s+")
_LABEL = re.compile(r"^(\*\*[^*]+:\*\*|\*\*[^*]+\*\*[^.:*]{0,30}:|\[[^\[\]]*\]\([^()\s]*\):) ")
_CODE_LIST = re.compile(r"Code(?:,? (?:and |or )?Code)+")
_WORD = re.compile(r"[^\W_][\w'’.,/-]*")
_CELL = re.compile(r"<td>.*?</td>", re.DOTALL)
_ASSET = re.compile(
    r"""<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^>]*|url\(["']?(?:https?:)?//[^)]*"""
)


class Sentence(NamedTuple):
    text: str
    words: int


class Line(NamedTuple):
    """A page's line, and what it is to a block of code.

    Attributes:
        fence: indentation, marks and language of the fence that begins the block; None outside.
    """

    text: str
    kind: Literal["text", "begin", "code", "end"]
    fence: re.Match[str] | None


def files() -> list[Path]:
    """Return the documents and what belongs to them; of `docs/` all files."""
    paths = {*ROOT.glob("docs/**/*.*"), *(path for pattern in OUTSIDE for path in ROOT.glob(pattern))}
    return sorted(path for path in paths if path.is_file() and path.suffix != ".pyc")


def pages() -> list[str]:
    """Return the Markdown files among them, relative to the repository."""
    return [path.relative_to(ROOT).as_posix() for path in files() if path.suffix == ".md"]


def slug(heading: str, separator: str = "-") -> str:
    """Return a heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def lines(text: str) -> Iterator[Line]:
    fence: re.Match[str] | None = None
    for line in text.split("\n"):
        if fence is None:
            fence = _FENCE.fullmatch(line)
            yield Line(line, "begin" if fence else "text", fence)
        elif line.strip() != fence[2]:
            yield Line(line, "code", fence)
        else:
            yield Line(line, "end", fence)
            fence = None


def without_code(text: str) -> str:
    """Return a page without comments, and with an empty line for each line of code."""
    return _COMMENT.sub("", "\n".join("" if line.fence else line.text for line in lines(text)))


def headings(text: str) -> list[str]:
    return _HEADING.findall(without_code(text))


def section(text: str, heading: str) -> str:
    """Return what is below a heading, or its anchor, up to the next heading; "" where there is none."""
    below: list[str] = []
    inside = False
    for line in lines(text):
        match = None if line.fence else _HEADING.match(line.text)
        inside = slug(match[1]) == slug(heading) if match else inside
        below += [line.text] * inside
    return "\n".join(below)


_WHERE = "See [where options come from](options.md#where-options-come-from)."


def options_by_engine(text: str) -> dict[str, str]:
    """Return a page for each engine, of docs/options.md with all tables: that of all engines, then its own."""
    tables = {"": text.partition("<!-- tables: begin -->")[2].partition("\n## ")[0]}
    for heading in headings(text):
        if heading.startswith("Only with "):
            tables[heading.removeprefix("Only with ")] = section(text, heading)
    rows = {name: "\n".join(line for line in part.split("\n") if line.startswith("|")) for name, part in tables.items()}
    found: dict[str, list[str]] = {}
    for name in rows:
        for engine in re.findall(r"\w+", name.replace(" and ", " ")):
            found.setdefault(engine, [rows[""]]).append(rows[name])
    wide = "---\nhide: [navigation, toc]\nsearch: {exclude: true}\n---\n"
    return {
        engine: "\n\n".join([f"{wide}# All options of {engine}", _WHERE, *parts]) + "\n"
        for engine, parts in sorted(found.items())
    }


def prose(text: str) -> str:
    """Return a page without its code, comments and the targets of its links."""
    return _COMMENT.sub("", _LINK_TEXT.sub(r"\1", _CODE.sub("", without_code(text))))


def anchors(text: str) -> set[str]:
    """Return a page's anchors; a heading's second one has `-1`, as on GitHub."""
    found: dict[str, int] = {}
    names = set()
    for heading in headings(text):
        name = slug(_LINK_TEXT.sub(r"\1", heading))
        number = found[name] = found.get(name, -1) + 1
        names.add(f"{name}-{number}" if number else name)
    return names


def links(text: str) -> list[str]:
    """Return the targets of a page's links and images, without those in code."""
    return _LINK.findall(_CODE.sub("", without_code(text)))


def sentences(text: str) -> Iterator[Sentence]:
    """Yield the sentences of paragraphs and lists, without an item's label. A list of code counts as a word."""
    paragraphs = [""]
    for line in without_code(text).split("\n"):
        if not line.strip() or line.lstrip().startswith("|") or _HEADING.match(line):
            paragraphs.append("")
        elif _ITEM.match(line):
            paragraphs.append(_LABEL.sub("", _ITEM.sub("", line, count=1), count=1))
        else:
            paragraphs[-1] += " " + line.strip()
    for paragraph in paragraphs:
        plain = _LINK_TEXT.sub(r"\1", _CODE.sub("Code", paragraph)).replace("*", "")
        plain = _CODE_LIST.sub("Code", plain)
        for sentence in _SENTENCE_END.split(plain):
            if words := len(_WORD.findall(sentence)):
                yield Sentence(sentence.strip(), words)


_FILE_LINK = re.compile(r"(?<![!`])\[[\w./-]+(?:\.md|/)\]\(([^()\s#]+\.md)(#[^()\s]+)?\)")


def titled(markdown: str, path: str) -> str:
    """Return a page whose links read as the titles of pages and sections, where they read as names of files.

    Args:
        path: the page's, relative to the repository.
    """

    def title(link: re.Match[str]) -> str:
        target = (ROOT / path).parent.joinpath(link[1])
        found = headings(target.read_text())
        section = (one for one in found if "#" + slug(_LINK_TEXT.sub(r"\1", one)) == link[2])
        text = _LINK_TEXT.sub(r"\1", next(section, found[0]))
        return f"[{text}]({link[1]}{link[2] or ''})"

    return "\n".join(line if fence else _FILE_LINK.sub(title, line) for line, _, fence in lines(markdown))


def separate(markdown: str) -> str:
    """Put an empty line around each heading, list, table and fence: Python-Markdown needs it, GitHub does not.

    A line that is a comment goes: Python-Markdown would make a paragraph of it.
    """
    separated: list[str] = []
    above = 0  # the group of _BLOCK that the line above belongs to
    for line, kind, _ in lines(markdown):
        if kind == "text" and _COMMENT.fullmatch(line.strip()):
            continue
        match = _BLOCK.match(line) if kind in ("text", "begin") else None
        block = match.lastindex or 0 if match else 0
        begins = block not in (0, above) or above == _AFTER_FENCE
        if begins and line.strip() and separated and separated[-1].strip():
            separated.append("")
        if kind == "end" and not line.startswith(" "):
            above = _AFTER_FENCE
        else:
            above = (block or above % _AFTER_FENCE) if line.strip() else 0
        separated.append(line)
    return "\n".join(separated)


_CODE_OR_LINK = re.compile(rf"{_CODE.pattern}|(?<=\]\()([^()\s]+)(?=\))")


def place(path: str) -> str:
    """Return where a file of the repository is on the site, relative to its root. Pages have other names there."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


def copy_name(page: str) -> str:
    """Return the name of a page's copy in the directory `markdown` of the site, such as `docs-wire-openai.md`."""
    return page.replace("/", "-")


def copy(markdown: str, page: str) -> str:
    """Return a page as plain Markdown without comments, whose links lead to other copies and to files of the site.

    Args:
        page: its path, relative to the repository.
    """

    def target(match: re.Match[str]) -> str:
        path, anchor, name = (match[2] or "").partition("#")
        if not path or ":" in path:
            return match[0]
        other = (ROOT / page).parent.joinpath(path).resolve().relative_to(ROOT).as_posix()
        return (copy_name(other) if other.endswith(".md") else f"../{place(other)}") + anchor + name

    plain = separate(markdown).strip()
    return "\n".join(line.text if line.fence else _CODE_OR_LINK.sub(target, line.text) for line in lines(plain)) + "\n"


def first_line(markdown: str) -> str:
    """Return the first line of a page's text below its title, without the targets of its links."""
    texts = (line.strip() for line in _COMMENT.sub("", without_code(markdown)).split("\n"))
    return next((_LINK_TEXT.sub(r"\1", line) for line in texts if line and line[0] not in "#|!<"), "").replace("**", "")


def llms_txt(navigation: Iterable[dict[str, list[str | dict[str, str]]]], name: str, description: str) -> str:
    """Return the site's `llms.txt` (llmstxt.org): each page of the navigation in its order, with its first line.

    Args:
        navigation: `nav` of mkdocs.yml.
        name: the site's.
        description: the site's, in a line.
    """
    found = [f"# {name}", f"> {description}"]
    for part in navigation:
        for heading, entries in part.items():
            named = [
                (entry, "") if isinstance(entry, str) else next((path, title) for title, path in entry.items())
                for entry in entries
            ]
            texts = [(path, title, (ROOT / path).read_text()) for path, title in named]
            found.append(f"## {heading}")
            found.append(
                "\n".join(
                    f"- [{title or headings(text)[0]}](markdown/{copy_name(path)}): {first_line(text)}"
                    for path, title, text in texts
                )
            )
    return "\n\n".join(found) + "\n"


def versions(names: Iterable[str]) -> list[dict[str, Any]]:
    """Return the versions among the names of directories as the theme's switch reads them, newest first."""
    found = [name for name in names if re.fullmatch(r"\d+\.\d+\.\d+", name)]
    found.sort(key=lambda name: [*map(int, name.split("."))], reverse=True)
    return [{"version": name, "title": name, "aliases": ["latest"] * (name == found[0])} for name in found]


def bars(html: str) -> str:
    """Return a built page with `|` for the `\\|` that Python-Markdown leaves in the code of tables."""
    return _CELL.sub(lambda cell: cell[0].replace("\\|", "|"), html)


def outside_assets(text: str) -> list[str]:
    """Return what a built page or stylesheet would load from another server."""
    return _ASSET.findall(text)


def fill(text: str, name: str, part: str) -> str:
    """Return a page with another generated part between `<!-- NAME: begin -->` and `<!-- NAME: end -->`."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    for line in (begin, end):
        assert line in text, f"the page lacks the line {line.strip()}"
    start = text.index(begin) + len(begin)
    return text[:start] + part + text[text.index(end, start) :]


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    first, *others = (f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in (head, *rows))
    return "".join([first, f"|{'---|' * len(head)}\n", *others])
