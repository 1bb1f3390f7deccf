"""README and links of the package's page on an index, which has no other files: relative links would lead nowhere.

MOECOMM_REPOSITORY at build time is the address of the repository on a host with GitHub's paths, which wheels.yml sets.
Without it the page has no such links, and no picture.
"""

from __future__ import annotations

import re

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")


def description(readme: str, repository: str, version: str) -> str:
    """Return README with links to files of the repository at the tag of this version, or without links to files."""

    def absolute(link: re.Match[str]) -> str:
        picture, text, path = link.groups()
        if not repository:
            return "" if picture else text
        kind = "raw" if picture else "blob"
        return f"{picture}[{text}]({repository.rstrip('/')}/{kind}/v{version}/{path})"

    return re.sub(r"\n{3,}", "\n\n", _LINK.sub(absolute, readme))


def urls(repository: str, version: str) -> dict[str, str]:
    """Return the links of the page, by name."""
    if not repository:
        return {}
    root = repository.rstrip("/")
    files = "/".join((root, "blob", f"v{version}"))
    pages = {"Documentation": "docs/index.md", "Changelog": "CHANGELOG.md"}
    return {"Source": root, "Issues": f"{root}/issues"} | {name: f"{files}/{path}" for name, path in pages.items()}
