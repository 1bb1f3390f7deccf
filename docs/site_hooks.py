"""Hooks of mkdocs: pages that are files of the repository, and links to files that are not on the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
# Page on the site: the file of the repository that it shows.
SHOWN = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the shown files, and the pictures outside of docs/ that pages refer to."""
    for page, source in SHOWN.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for page in (ROOT / "docs").rglob("*.md"):
        for mark, _text, target in _LINK.findall(page.read_text()):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(str(page.relative_to(ROOT))), target))
            if mark and not path.startswith("docs/") and files.get_file_from_path(path) is None:
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any, **_: Any) -> str:
    """Point links at pages of the site; a link to another file of the repository becomes the name of the file."""
    name = page.file.src_uri
    source = SHOWN.get(name, f"docs/{name}")
    here = posixpath.dirname(name)
    pages = {shown: page for page, shown in SHOWN.items()}

    def replaced(link: re.Match[str]) -> str:
        mark, text, target = link.groups()
        if re.match(r"[a-z]+:|#", target):
            return link[0]
        path, _, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if not (ROOT / path).exists():
            return link[0]  # a broken link: mkdocs says so
        site = pages.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else path)
        if files.get_file_from_path(site) is not None:
            return f"{mark}[{text}]({posixpath.relpath(site, here or '.')}{'#' + anchor if anchor else ''})"
        return text if path in text or "`" in text else f"{text} (`{path}`)"

    return _LINK.sub(replaced, markdown)
