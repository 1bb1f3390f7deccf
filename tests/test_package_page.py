"""The page of the package on an index: no link to a file that is not there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

import moecomm

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))

import package_page  # noqa: E402 - of the root

README = (ROOT / "README.md").read_text()
LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)]+)\)")


def test_links_are_absolute_where_the_repository_is_known() -> None:
    page = package_page.description(README, "https://host.example/owner/name/", moecomm.__version__)
    files = f"https://host.example/owner/name/blob/v{moecomm.__version__}/"
    pictures = files.replace("/blob/", "/raw/")
    before, links = LINK.findall(README), LINK.findall(page)
    assert len(links) == len(before) > 30 and any(picture for picture, _ in links)
    for (picture, path), (_, link) in zip(before, links, strict=True):
        assert link == (path if "://" in path else (pictures if picture else files) + path)
    urls = package_page.urls("https://host.example/owner/name", moecomm.__version__)
    assert urls["Source"] == "https://host.example/owner/name"
    for name in ("Documentation", "Changelog"):
        assert urls[name].startswith(files) and (ROOT / urls[name].removeprefix(files)).is_file()


def test_no_link_is_made_up_where_it_is_not() -> None:
    page = package_page.description(README, "", moecomm.__version__)
    assert all("://" in link for _, link in LINK.findall(page)) and package_page.urls("", "1") == {}
    assert "![" not in page and "DeepEP" in page and len(page) > len(README) / 2


@pytest.mark.parametrize("kept", ["[a](https://b)", "[a](#part)", "`x[1](y z)`"])
def test_other_links_and_code_stay(kept: str) -> None:
    assert package_page.description(kept, "", "1") == kept


def test_wheels_are_built_with_the_address() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "wheels.yml").read_text())
    assert list(workflow["env"]) == ["MOECOMM_REPOSITORY"]
    (passed,) = [step["env"] for step in workflow["jobs"]["wheels"]["steps"] if "env" in step]
    assert passed["CIBW_ENVIRONMENT_PASS_LINUX"] == "MOECOMM_REPOSITORY"
