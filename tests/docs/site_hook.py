"""MkDocs's hook: the repository's layout, GitHub's Markdown and anchors, and no asset from another server."""

import logging
from pathlib import Path
from typing import Any

import pages  # beside this file
from mkdocs.structure.files import File


def on_config(config: Any) -> None:
    config.mdx_configs["toc"]["slugify"] = pages.slug


def on_files(files: Any, config: Any) -> None:
    """Name files as in the repository, so that links out of docs/ are links here: below /repository/."""
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    for path in pages.files():
        name = path.relative_to(pages.ROOT).as_posix()
        arguments = (name, str(pages.ROOT), config.site_dir, config.use_directory_urls)
        place = File(*arguments).dest_uri
        place = place.removeprefix("docs/") if name.startswith("docs/") else f"repository/{place}"
        files.append(File(*arguments, dest_uri=place))


def on_page_markdown(markdown: str, **_: Any) -> str:
    return str(pages.separate(markdown))


def on_page_content(html: str, **_: Any) -> str:
    return str(pages.bars(html))


def on_post_build(config: Any) -> None:
    for path in (path for suffix in ("html", "css") for path in sorted(Path(config.site_dir).rglob(f"*.{suffix}"))):
        for asset in pages.outside_assets(path.read_text()):  # a warning fails the strict build
            logging.getLogger("mkdocs.hooks").warning("%s loads %s from another server", path, asset)
