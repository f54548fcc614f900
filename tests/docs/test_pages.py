"""The documents: links, language, options, and one version."""

from __future__ import annotations

import json
import os
import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from handler.config.engines import ENGINES
from handler.config.options import SERVER_ENVIRONMENT
from handler.config.options.names import find_option, key_of
from handler.config.options.option import Gone
from tests.docs.options import with_all
from tests.docs.pages import (
    MAX_WORDS,
    ROOT,
    anchors,
    bars,
    lines,
    links,
    options_by_engine,
    outside_assets,
    pages,
    prose,
    section,
    sentences,
    separate,
    slug,
    titled,
)
from tests.one_test import in_one_test
from tests.release import images

# -- links -------------------------------------------------------------------------------------------------------------
# No link of the documents is dead, every page is in the site's navigation, and five tasks are three pages away.


INDEX = "docs/README.md"
TASKS = {
    "move an LMI endpoint": ([INDEX, "docs/migrating/lmi.md"], "Steps", "lmi serve --check"),
    "stream with boto3": ([INDEX, "docs/first-endpoint.md"], "7. Stream", "invoke_endpoint_with_response_stream"),
    "see the metrics": ([INDEX, "docs/monitoring.md"], "Look at the numbers", "/metrics"),
    "set up four GPUs": ([INDEX, "docs/scaling.md"], "Several GPUs", "option.replicas"),
    "write a formatter": ([INDEX, "docs/custom-code.md"], "Write responses", "@output_formatter"),
}
"""A newcomer's task: the pages from the index to its end, the heading there, and what is below it."""
MAX_PAGES = 3

_MENTION = re.compile(r"(?<![\w/.])docs/(?:wire/|migrating/)?[\w-]+\.md(?:#[\w-]+)?")
_OF_OTHERS = {"docs/format.md", "docs/gguf.md"}  # openai/harmony's, ggml's
CODE = ("handler", "deploy", "proof", "examples", "docker", "tests")


def text(page: str) -> str:
    return (ROOT / page).read_text()


def dead(page: str, target: str) -> bool:
    path, _, anchor = target.partition("#")
    whole = (ROOT / page).parent / path if path else ROOT / page
    if not whole.is_file():
        return True
    return bool(anchor) and anchor not in anchors(whole.read_text())


def followed(page: str) -> set[str]:
    """Return the files that a page links to."""
    targets = (target.partition("#")[0] for target in links(text(page)) if ":" not in target)
    return {os.path.normpath(Path(page).parent / target) for target in targets if target}


@in_one_test("page", pages())
def test_links_lead_to_files_and_headings(page: str) -> None:
    targets = [target for target in links(text(page)) if not re.match(r"(https?|mailto):", target)]
    lost = [target for target in targets if dead(page, target)]
    assert not lost, f"no such file or heading: {', '.join(lost)}"


def test_pages_that_the_code_names_exist() -> None:
    files = [ROOT / name for name in ("Makefile", "Dockerfile", "pyproject.toml", "serving.properties", "CHANGELOG.md")]
    files += [path for folder in CODE for path in (ROOT / folder).rglob("*.py")]
    named = {(match[0], str(path)) for path in files for match in _MENTION.finditer(path.read_text())}
    assert {(name, path) for name, path in named if name not in _OF_OTHERS and dead("README.md", name)} == set()


PUBLISHED = False
"""Whether PyPI has the package. Until then, its name would install nothing, or what a stranger registers under it."""
_UNPUBLISHED = "**The package is not on PyPI yet.**"
_INSTALLED = re.compile(r"(?:install|--from) [^`\n|]*lmi-handler[\['\" ]")


@in_one_test("page", [page for page in pages() if page not in ("README.md", "CHANGELOG.md")])
def test_no_page_installs_a_package_that_nobody_owns(page: str) -> None:
    assert PUBLISHED or _INSTALLED.findall(text(page)) == []


def test_the_readme_says_whether_the_package_is_published() -> None:
    assert bool(_INSTALLED.search(text("README.md"))) is PUBLISHED
    assert (_UNPUBLISHED in text("README.md")) is not PUBLISHED


def test_every_page_is_in_the_navigation_once() -> None:
    entries: list[str] = []

    def collect(value: object) -> None:
        if isinstance(value, str):
            entries.append(value)
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            collect(item)

    collect(yaml.safe_load(text("mkdocs.yml"))["nav"])
    assert sorted(entries) == sorted(set(entries)), "a page stands in mkdocs.yml twice"
    missing, gone = sorted({*pages()} - {*entries}), sorted({*entries} - {*pages()})
    assert not missing, f"add to `nav` of mkdocs.yml: {', '.join(missing)}"
    assert not gone, f"remove from `nav` of mkdocs.yml: {', '.join(gone)}"


def test_every_page_of_docs_is_two_clicks_from_the_index() -> None:
    near = followed(INDEX)
    near |= {page for folder in near if folder.endswith("/README.md") for page in followed(folder)}
    far = {page for page in pages() if page.startswith("docs/")} - near - {INDEX}
    assert not far, f"link from {INDEX}, or from the README.md of their folder: {', '.join(sorted(far))}"


@in_one_test("page", pages())
def test_tables_have_empty_lines_around_them(page: str) -> None:
    """GitHub reads a line below a table as its next row, and a second table's head too."""
    kinds = [(line.text, line.kind == "text" and line.text.startswith("|")) for line in lines(text(page))]
    below = [row for (_, above), (row, inside) in pairwise(kinds) if above and not inside and row.strip()]
    assert [row for row in below if not row.startswith("<!--")] == []
    heads = [row for (row, inside), (line, _) in pairwise(kinds[1:]) if inside and re.fullmatch(r"\|(:?-+:?\|)+", line)]
    above = [(before, row) for (before, table), (row, _) in pairwise(kinds) if table and row in heads]
    assert above == []


@in_one_test("task", TASKS)
def test_a_newcomer_finds(task: str) -> None:
    path, heading, words = TASKS[task]
    assert len(path) <= MAX_PAGES
    assert all(following in followed(page) for page, following in pairwise(path))
    assert words in section(text(path[-1]), heading)


@in_one_test(
    ("heading", "anchor"),
    [
        ("Metrics, logs and traces", "metrics-logs-and-traces"),
        ("0.28 with `option.rolling_batch=trtllm`", "028-with-optionrolling_batchtrtllm"),
        ("Where does it go?", "where-does-it-go"),
        ("Clients' schemas and grammars", "clients-schemas-and-grammars"),
        ("A – B", "a--b"),
    ],
)
def test_anchors_are_those_of_github(heading: str, anchor: str) -> None:
    assert slug(heading) == anchor


@in_one_test(
    ("page", "expected"),
    [
        ("A list:\n* one\n  more\n* two", "A list:\n\n* one\n  more\n* two"),
        ("Steps:\n1. one\n2. two", "Steps:\n\n1. one\n2. two"),
        ("A table:\n| a |\n|---|\n| b |", "A table:\n\n| a |\n|---|\n| b |"),
        ("| a |\n|---|\n## Next\ntext", "| a |\n|---|\n\n## Next\ntext"),
        ("# Title\n<!-- server: echo -->\ntext\n\n```\n<!-- code -->\n```", "# Title\ntext\n\n```\n<!-- code -->\n```"),
        ("text\n```sh\n# no heading\n* no list\n```\nmore", "text\n\n```sh\n# no heading\n* no list\n```\n\nmore"),
    ],
)
def test_blocks_are_separated_as_python_markdown_needs_them(page: str, expected: str) -> None:
    assert separate(page) == expected


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("[own-model.md](own-model.md)", "[Serve your own model](own-model.md)"),
        ("[own-model.md](own-model.md#from-s3)", "[From S3](own-model.md#from-s3)"),
        ("[wire/](wire/README.md)", "[APIs: every route, field and error](wire/README.md)"),
        ("[a name](own-model.md)", "[a name](own-model.md)"),
        ("[lmi.service](../examples/hosting/lmi.service)", "[lmi.service](../examples/hosting/lmi.service)"),
        ("```sh\n[own-model.md](own-model.md)\n```", "```sh\n[own-model.md](own-model.md)\n```"),
    ],
)
def test_links_that_read_as_names_of_pages_get_titles_on_the_site(link: str, expected: str) -> None:
    assert titled(link, INDEX) == expected


def test_bars_in_the_code_of_tables_are_plain() -> None:
    assert bars(r"<td><code>a\|b</code></td><pre>c\|d</pre>") == r"<td><code>a|b</code></td><pre>c\|d</pre>"


@pytest.mark.parametrize(
    ("built", "number"),
    [
        ('<script src="https://example.com/a.js"></script>', 1),
        ('<link rel="stylesheet" href="//example.com/a.css">', 1),
        ("body { background: url(https://example.com/a.png) }", 1),
        ('<a href="https://example.com/">out</a> <script src="../assets/a.js"></script>', 0),
    ],
)
def test_assets_of_other_servers_are_found(built: str, number: int) -> None:
    assert len(outside_assets(built)) == number


# -- the documents' language: no word that riddles, no sentence above 20 words -----------------------------------------


BANNED = {
    r"\bdoors?\b": "a metaphor: name the thing",
    r"\bhouse\b": "a metaphor: name the thing",
    r"\battics?\b": "a metaphor: name the thing",
    r"\bworn\b": "a metaphor: name the thing",
    r"\bpassed over\b": "ignored",
    r"\bwas not had\b": "not tested",
    r"\bno good to\b": "unused",
    r"\b(the|a|each|no) (found|said|asked|told|made|shown|taken)\b(?=[.,:;)]| (is|are|of|and|or)\b)": "no noun",
    r"\bseed 0\d\d\b": "state the fact, with its public source",
    r"(?<!here) is no (json|whole number|directory|number|report|command|regular)\b": "is not a",
    r"\brefused,? but for\b": "refused, except for",
    r"\bcontract [a-z_/]+\.md\b": "state the fact, with its public source",
}
"""Expressions, and what to write in their place."""

OF_PAGES = {
    r"\bheed(s|ed)?\b": "use, apply",
    r"\bamid\b": "among, during",
    r"\bfor ever\b": "forever",
    r"\bin company\b": "beside others",
    r"\bwithout a word\b": "silently",
    r"\blies?\b(?! (on|to)\b)": "is, are",
    r"\bcomes? again\b": "retry",
    r"\bas ever\b": "as before",
    r"\bnobody asked\b": "unrequested",
    r"\bat hand\b": "available",
    r"\bwhoever\b": "anybody who",
    r"\bstands? (there|here|twice)\b": "is there, is duplicate",
    r"\b(is|are) no (json|object|number|directory|vulnerability|plain|whole|block|item|tool|text)\b": "is not a",
    r"\bdialects?\b": "API: a dialect is in the code",
    r"\b(which|what) nobody\b": "turn the sentence around",
}
"""Expressions of pages alone, which the code's comments and messages may have."""
ABOUT_CODE = ("docs/structure.md", "docs/glossary.md", "CONTRIBUTING.md", "CHANGELOG.md")
"""Pages whose words are the code's, or of the past."""

WORDS_CODE = ("handler", "deploy")

_RIDDLE = re.compile(r"(What|Which|Whose|Whoever) [^?]*$")  # "What an engine lacks is refused."


def texts() -> dict[str, str]:
    names = [
        path.relative_to(ROOT).as_posix() for folder in WORDS_CODE for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    return {name: (ROOT / name).read_text() for name in (*pages(), *names, "deploy/data/causes.yaml")}


@in_one_test("word", BANNED)
def test_no_page_comment_or_message_has_a_banned_word(word: str) -> None:
    expression = re.compile(word, re.IGNORECASE)
    places = {
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for name, text in texts().items()
        for match in expression.finditer(text)
    }
    assert places == set(), BANNED[word]


@in_one_test("word", OF_PAGES)
def test_no_page_for_users_reads_like_a_translation(word: str) -> None:
    places = {
        f"{name}: {match[0]}"
        for name in pages()
        if name not in ABOUT_CODE and not name.startswith("handler/")
        for match in re.finditer(word, prose((ROOT / name).read_text()), re.IGNORECASE)
    }
    assert places == set(), OF_PAGES[word]


@in_one_test("page", pages())
def test_sentences_are_short_and_begin_with_their_subject(page: str) -> None:
    text = (ROOT / page).read_text()
    faults = [f"{fault(words)}: {sentence}" for sentence, words in sentences(text) if is_hard(sentence, words)]
    assert not faults, "\n".join(faults)


def test_the_glossary_is_in_the_order_of_the_alphabet() -> None:
    terms = re.findall(r"^\*\*([^*:]+):?\*\*", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert len(terms) > 30
    assert terms == sorted(set(terms), key=str.casefold)


def fault(words: int) -> str:
    return (
        f"split it, {words} words are over {MAX_WORDS}"
        if words > MAX_WORDS
        else "begin with the subject, not with a clause"
    )


def is_hard(sentence: str, words: int) -> bool:
    return words > MAX_WORDS or bool(_RIDDLE.match(sentence))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Run `lmi serve`, then open the page. It answers.", [6, 2]),
        ("* **Keys:** set `a`, `b` and `c`.\n  Then restart.", [2, 2]),
        ("# A heading\n| a | table |\n```sh\nsome code\n```\nA [link to a page](x.md).", [5]),
        ("vLLM is fast. vLLM 0.32 is newer, e.g. here.", [3, 6]),
    ],
)
def test_sentences_are_counted_without_code_tables_and_labels(text: str, expected: list[int]) -> None:
    assert [words for _, words in sentences(text)] == expected


def test_hard_sentences_are_found() -> None:
    assert is_hard("What an engine lacks is refused by name.", 8)
    assert not is_hard("What does it cost?", 4)
    assert is_hard("word " * (MAX_WORDS + 1), MAX_WORDS + 1)


# -- the documents' options: those that a page names exist, and docs/tuning.md has their defaults ----------------------


EXCEPTIONS = {
    "option.entryPoint": "DJL Serving reads it; the embedded server takes a few values",
    "option.cluster_size": "LMI's, as an example of a refused one",
    **dict.fromkeys(
        ("option.sessions_s3url", "option.bedrock_compat", "option.q_format"),
        "LMI's, named as refused",
    ),
    "option.max_model_length": "misspelt, to show the message",
    "option.max_rolling_batch": "a mistake of public notebooks, which adopt.md shows as one",
    **dict.fromkeys(("option.key", "option.x", "option.x_y", "x_y"), "stands for any option"),
}
"""Names in the documents that are no options here, and why they are there."""

_OPTION = re.compile(r"(?<![\w.])option\.\w+")
_VARIABLE = re.compile(r"\b(?:OPTION|SERVING)_[A-Z][A-Z0-9_]+\b")
_TABLE = re.compile(r"<!-- (options|variables|arguments): begin -->.*?<!-- \1: end -->", re.DOTALL)
"""A table of the names of LMI, TGI or vLLM, which other tests hold to the code."""

_DEFAULT = re.compile(r"^\| `([\w.]+)` \| ([\d,]+)(?: s)? \|", re.MULTILINE)


def named(text: str) -> set[str]:
    """Return the options that a text names, also by their variables."""
    text = _TABLE.sub("", text)
    return {*_OPTION.findall(text), *map(key_of, _VARIABLE.findall(text))}


def is_option(key: str) -> bool:
    """Whether the server, DJL Serving or an engine has it: ours, or as an argument of the engine's own."""
    options = [option for engine in ENGINES if (option := find_option(key, engine)) is not None]
    return key in SERVER_ENVIRONMENT or any(not isinstance(option.parse, Gone) for option in options)


@in_one_test("page", pages())
def test_the_options_of_a_page_exist(page: str) -> None:
    keys = named((ROOT / page).read_text()) - EXCEPTIONS.keys()
    assert {key for key in keys if not is_option(key)} == set()


def test_each_exception_is_needed() -> None:
    keys = set().union(*(named((ROOT / page).read_text()) for page in pages()))
    assert EXCEPTIONS.keys() - keys == set()
    assert {key for key in EXCEPTIONS if is_option(key)} == set()


def test_names_that_are_no_options_are_found() -> None:
    text = "`option.job_queue_size`, SERVING_JOB_QUEUE_SIZE, OPTION_MAX_MODEL_LEN=1, `option.seed`; an option. Next"
    assert {key for key in named(text) if not is_option(key)} == {"option.job_queue_size"}


def test_the_defaults_are_the_codes() -> None:
    defaults = dict(_DEFAULT.findall((ROOT / "docs" / "tuning.md").read_text()))
    assert len(defaults) == 3
    for name, value in defaults.items():
        option = find_option(name, "vllm")
        assert option is not None
        assert option.default == float(value.replace(",", "")), name


def test_the_site_has_a_page_of_options_for_each_engine() -> None:
    found = options_by_engine(with_all((ROOT / "docs" / "options.md").read_text()))
    assert found.keys() == ENGINES.keys()
    assert all("(options.md#where-options-come-from)" in page for page in found.values())
    names = {engine: re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE) for engine, page in found.items()}
    for engine, here in names.items():
        assert len(here) == len(set(here)) > 70
        options = [find_option(name, engine) for name in here]
        assert all(option is not None and not isinstance(option.parse, Gone) for option in options)
    assert "option.enforce_eager" in names["vllm"]
    assert "option.enforce_eager" not in names["trtllm"]
    assert {"option.guide_timeout", "job_queue_size"} <= {*names["openvino"]}


# -- the version is one: `pyproject.toml` has it, and the changelog and the documents' images name the same ------------


VERSION = images.version(ROOT)
MOST_WORDS = 500
"""Of a version's summary: two minutes, at 250 words a minute."""


def test_the_changelog_has_the_version_with_a_summary_of_two_minutes() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## \[(.+?)\](?: - (.+))?$", text, re.MULTILINE)
    assert [name for name, _ in headings[:2]] == ["Unreleased", VERSION]
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", headings[1][1])
    summary = text.partition(f"## [{VERSION}]")[2].partition("\n### ")[0]
    assert 100 < len(summary.split()) <= MOST_WORDS


MAX_OF_PAGE = {"README.md": 700, "CHANGELOG.md": 5_800}
"""Maximum number of words of a page that every reader opens first."""


@in_one_test("page", MAX_OF_PAGE)
def test_first_pages_are_short(page: str) -> None:
    number = len(text(page).split())
    assert number <= MAX_OF_PAGE[page], f"{number} words"


def test_images_have_the_version_where_documents_and_examples_name_them() -> None:
    paths = [path for path in images.pages(ROOT) if images.REFERENCE.search(path.read_text())]
    assert len(paths) > 5
    outdated = [path.relative_to(ROOT) for path in paths if images.named(ROOT, path) != path.read_text()]
    assert outdated == [], "`python -m tests.release.images` writes them anew"


def test_a_release_s_digests_are_written_where_its_images_are_run(tmp_path: Path) -> None:
    for name in ("docs", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    digest = f"sha256:{'0' * 64}"
    (tmp_path / "images.json").write_text(json.dumps({"lmi-handler-cpu": digest}))
    images.main(str(tmp_path / "images.json"), root=tmp_path)
    compose = (tmp_path / "examples" / "hosting" / "compose.yaml").read_text()
    assert f"image: lmi-handler-cpu:{VERSION}@{digest}\n" in compose
    assert (tmp_path / "docs" / "container.md").read_text() == (ROOT / "docs" / "container.md").read_text()
    assert images.version(tmp_path) == VERSION
