"""MkDocs's hook: the repository's layout, GitHub's Markdown and anchors, and no asset from another server.

It adds a stylesheet, the tables of all options, and a page of options for each engine. For programs that read Markdown,
it adds a copy of each page below `markdown/`, and `llms.txt`, which lists them.

Each version has a directory of its own below build/site, and the theme's switch reads `versions.json` beside them. This
is the layout of mike, without its commits to a branch: whoever hosts the site keeps the directories of older versions.
"""

import json
import logging
from pathlib import Path
from typing import Any

import pages  # beside this file
from mkdocs.structure.files import File, InclusionLevel

from tests.docs.options import with_all  # `python -m mkdocs` finds it in the working directory, and
from tests.release import images  # this

STYLES = "assets/site.css"
OPTIONS = "docs/options.md"
BOOSTS = {
    **dict.fromkeys((OPTIONS, "docs/troubleshooting.md"), 30),  # first for a name or a message
    **dict.fromkeys(("docs/own-model.md", "docs/container.md", "docs/serving.md"), 5),
    **dict.fromkeys(("proof/RESULTS.md", "CHANGELOG.md", "docs/verified.md"), 0.2),
}
"""Factors of pages in a search; 1 for others."""


VERSION = images.version(pages.ROOT)


def on_config(config: Any) -> None:
    if Path(config.site_dir) == pages.ROOT / "build" / "site":  # `mkdocs serve` has a temporary directory
        config.site_dir = str(Path(config.site_dir) / VERSION)
    config.mdx_configs["toc"]["slugify"] = pages.slug
    config.extra_css.append(STYLES)


def on_files(files: Any, config: Any) -> None:
    """Name files as in the repository, so that links out of docs/ are links here: below /repository/."""
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    for path in pages.files():
        name = path.relative_to(pages.ROOT).as_posix()
        arguments = (name, str(pages.ROOT), config.site_dir, config.use_directory_urls)
        files.append(File(*arguments, dest_uri=pages.place(File(*arguments).dest_uri)))
    files.append(File.generated(config, STYLES, content=Path(__file__).with_name("site.css").read_text()))
    for engine, text in pages.options_by_engine(with_all((pages.ROOT / OPTIONS).read_text())).items():
        page = File.generated(config, f"docs/options-{engine}.md", content=text, inclusion=InclusionLevel.NOT_IN_NAV)
        page.dest_uri = page.dest_uri.removeprefix("docs/")
        files.append(page)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri in BOOSTS:
        page.meta["search"] = {"boost": BOOSTS[page.file.src_uri]}
    if page.file.src_uri == OPTIONS:
        markdown = with_all(markdown)
        engines = pages.options_by_engine(markdown)
        links = ", ".join(f"[{engine}](options-{engine}.md)" for engine in engines)
        markdown = markdown.replace("<!-- tables: begin -->", f"All options of one engine, to print: {links}.\n", 1)
    if not page.file.src_uri.startswith("docs/options-"):  # which is no file
        markdown = pages.titled(markdown, page.file.src_uri)
    return str(pages.separate(markdown))


def on_page_content(html: str, page: Any, **_: Any) -> str:
    html = pages.bars(html)
    return f'<div class="options">{html}</div>' if page.file.src_uri.startswith(OPTIONS.removesuffix(".md")) else html


def on_post_build(config: Any) -> None:
    site = Path(config.site_dir)
    (site / "markdown").mkdir()
    for page in pages.pages():
        text = (pages.ROOT / page).read_text()
        text = pages.copy(with_all(text) if page == OPTIONS else text, page)
        (site / "markdown" / pages.copy_name(page)).write_text(text)
    (site / "llms.txt").write_text(pages.llms_txt(config.nav, config.site_name, config.site_description))
    if site.name == VERSION:
        _write_versions(site.parent)
    for path in (path for suffix in ("html", "css") for path in sorted(Path(config.site_dir).rglob(f"*.{suffix}"))):
        for asset in pages.outside_assets(path.read_text()):  # a warning fails the strict build
            logging.getLogger("mkdocs.hooks").warning("%s loads %s from another server", path, asset)


def _write_versions(site: Path) -> None:
    """Write what the theme's switch reads, and a page that leads to the newest version."""
    versions = pages.versions(path.name for path in site.iterdir())
    (site / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")
    newest = versions[0]["version"]
    (site / "index.html").write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={newest}/">\n')
