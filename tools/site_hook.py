"""A hook of mkdocs: links that leave docs/, and tables that are made from the sources.

Documents link to each other by paths in the repository, so that links work where the files are read. On the site a file
outside of docs/ lies in the folder `repository`: a document is a page there, any other file a copy. A link to a file
that does not exist is left as it is, and mkdocs refuses it.
"""

from __future__ import annotations

import json
import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
OUTSIDE = "repository"
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the documents outside of docs/ that the navigation names, and every file that a document links to."""
    named = [name for name in _names(config.nav) if name.startswith(f"{OUTSIDE}/")]
    pending = [ROOT / name.removeprefix(f"{OUTSIDE}/") for name in named]
    pending += [Path(str(f.abs_src_path)) for f in files.documentation_pages()]
    seen: set[Path] = set()
    while pending:
        path = pending.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        uri = _uri(path)
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, abs_src_path=str(path)))
        if path.suffix == ".md":
            pending += [target for _, target in _targets(path.read_text(), path)]
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turns links into links of the site, and fills the tables that a marker stands for."""
    source = Path(str(page.file.abs_src_path))
    targets = dict(_targets(markdown, source))
    here = posixpath.dirname(page.file.src_uri)

    def link(found: re.Match[str]) -> str:
        before, target, anchor, after = found.groups(default="")
        if target not in targets:
            return found[0]
        return before + posixpath.relpath(_uri(targets[target]), here or ".") + anchor + after

    markdown = LINK.sub(link, markdown)
    if "<!-- table:" in markdown:
        done = subprocess.run(
            [sys.executable, str(ROOT / "tools/site_tables.py"), "--json"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        for name, table in json.loads(done.stdout).items():
            markdown = markdown.replace(f"<!-- table:{name} -->", table)
    return markdown


def _names(nav: Any) -> Iterator[str]:
    """Every file that a navigation names."""
    if isinstance(nav, str):
        yield nav
    elif nav:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from _names(entry)


def _targets(text: str, document: Path) -> Iterator[tuple[str, Path]]:
    """What a document links to, as it stands there, and the file of the repository that this is."""
    for _, target, _, _ in LINK.findall(text):
        path = (document.parent / target).resolve()
        if "://" not in target and path.is_file() and path.is_relative_to(ROOT):
            yield target, path


def _uri(path: Path) -> str:
    """Where a file of the repository lies among the sources of the site."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return f"{OUTSIDE}/{path.relative_to(ROOT).as_posix()}"
