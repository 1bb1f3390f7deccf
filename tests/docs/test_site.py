"""The site: every public name is in the reference, links lead somewhere, pictures are current, and mkdocs builds it."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import moecomm

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
CSS = (DOCS / "site.css").read_text()
DECISIONS = DOCS / "maintainers" / "decisions.md"
FIGURES = sorted(DOCS.glob("figures/*.svg"))
BASES = r"Bases: (.*?)</p>"
GENERATED = (
    "measurements",
    *(f"maintainers/{name}" for name in ("wide_ep", "dlrm", "measured_calls", "measured_checks")),
)
# Written elsewhere: mkdocs shows files of the repository under these names.
SHOWN = {"contributing.md", "changelog.md"}
PUBLIC = [
    "",
    "ops",
    "nn",
    "fused",
    "overlap",
    "transfer",
    "compat",
    "compat.deep_ep",
    "metrics",
    "routing",
    "balance",
    "testing",
]
PUBLIC += [f"integrations.{framework}" for framework in ("megatron", "vllm", "sglang")]


def names(package: str) -> set[str]:
    """Everything in `__all__` of a package or module, which is not imported."""
    place = ROOT.joinpath("moecomm", *filter(None, package.split(".")))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return {".".join(filter(None, ("moecomm", package, name))) for name in ast.literal_eval(node.value)}
    raise AssertionError(f"{file} has no __all__")


def documented() -> set[str]:
    return {
        name for page in DOCS.glob("api/*.md") for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    }


@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_name_is_in_the_reference(package: str) -> None:
    assert names(package) - documented() == set()


def public(kind: type) -> set[str]:
    """Return the public names of a class, inherited ones included."""
    return {name for of in kind.__mro__[:-1] for name in vars(of) if not name.startswith("_")}


@pytest.mark.parametrize("kind", [moecomm.Buffer, moecomm.Window])
def test_every_public_call_is_in_the_reference(kind: type) -> None:
    """Other attributes of an instance are for the modules of moecomm, but for those of its docstring."""
    text = (DOCS / "api/moecomm.md").read_text()
    (options,) = re.findall(rf"^::: moecomm\.{kind.__name__}\n +options:\n((?: +.*\n)+)", text, re.M)
    listed = {name: set(names.split(", ")) for name, names in re.findall(r" (\w+): \[(.*)\]", options)}
    assert public(kind) == listed["members"]
    assert public(kind) == {name for name in vars(kind) if not name.startswith("_")}


def test_every_error_is_on_the_page_of_failures() -> None:
    text = (DOCS / "failures.md").read_text()
    errors = {
        name
        for name in moecomm.__all__
        if isinstance(found := getattr(moecomm, name), type) and issubclass(found, Exception)
    }
    assert {name for name in errors if f"`{name}`" not in text and f"moecomm.{name}`" not in text} == set()


def test_every_variable_is_on_the_page_of_the_environment() -> None:
    from moecomm import config

    rows = [line for line in (config.__doc__ or "").splitlines() if line.startswith("|")]
    assert len(rows) > 5 and "\n".join(rows) in (DOCS / "api/environment.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_lead_somewhere(page: Path) -> None:
    nav = (ROOT / "mkdocs.yml").read_text()
    assert f" {page.relative_to(DOCS)}\n" in nav
    links = [link for link in re.findall(r"\]\(([^)#]+)", page.read_text()) if not link.startswith("http")]
    lost = [link for link in links if not (page.parent / link).exists()]
    # Pages that mkdocs makes, and pages of the navigation.
    assert [link for link in lost if (page.parent / link).resolve().relative_to(DOCS).name not in SHOWN] == []


@pytest.mark.parametrize(
    "page", [*PAGES, *ROOT.glob("*.md"), *ROOT.glob("bench/*.md")], ids=lambda page: str(page.relative_to(ROOT))
)
def test_no_table_is_split(page: Path) -> None:
    """Every run of lines with bars is a heading, a rule and rows with as many cells."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for run in re.findall(r"(?:^[ \t]*\|.*\n)+", text, re.MULTILINE):
        heads, rule, *rows = [line.strip() for line in (*run.splitlines(), "")]
        assert re.fullmatch(r"\|( *:?-+:? *\|)+", rule), f"no rule below: {heads}"
        for row in rows[:-1]:
            assert len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", row))) == rule.count("|"), row


def figure(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"figure_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_are_what_their_code_draws() -> None:
    drawn = {
        file: picture
        for path in DOCS.glob("figures/*.py")
        if "def drawn(" in path.read_text()
        for file, picture in figure(path).drawn().items()
    }
    assert set(drawn) == set(FIGURES)
    for file, picture in drawn.items():
        assert file.read_text() == picture, f"run the code that draws {file.name}"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """As CI does, which installs mkdocs."""
    pytest.importorskip("mkdocs", reason='needs the extra docs: pip install ".[docs]"')
    mkdocs = Path(sys.executable).with_name("mkdocs")  # not -m: this folder may not be built
    command = [str(mkdocs), "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert built.returncode == 0, built.stderr
    reference = (tmp_path / "api/moecomm/index.html").read_text()
    shown = set(re.findall(r'id="moecomm\.Buffer\.(\w+)"', reference))
    assert {"shrink", "grow", "joining", "mask", "unmask", "compile_for"} < shown == public(moecomm.Buffer)
    for attribute in ("rank", "num_ranks", "domain_ranks"):
        assert f'title="moecomm.Buffer.{attribute}"' in reference, "the docstring has no such attribute"
    for page in tmp_path.glob("api/*/index.html"):
        shown = page.read_text()
        rows = re.findall(r'<tr class="doc-section-item">(.*?)</tr>', shown, re.DOTALL)
        untyped = [row for row in rows if ">required<" in row and "<code>" not in row.partition("</td>")[2]]
        assert untyped == [], "an argument that the signature does not have"
        assert re.findall(r'id="moecomm[.\w]*\.__\w+__"', shown) == [] and "**options" not in shown
    bases = [base for page in tmp_path.glob("api/*/index.html") for base in re.findall(BASES, page.read_text(), re.S)]
    assert bases and [base for base in bases if not re.search(r"moecomm\.errors|RuntimeError|ValueError", base)] == []
    assert (tmp_path / "site.css").read_text() == (DOCS / "site.css").read_text() and "site.css" in reference
    loaded = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?://[^"]+)"', reference)
    assert loaded == [], "a page loads something from another host"


def test_tables_are_readable_on_a_telephone() -> None:
    """Tables scroll, with cells of prose as wide as a few words; arguments in the reference are below each other."""
    (narrow,) = re.findall(
        r"^@media screen and \(max-width: (44\.984375em)\) {\n(.*?)^}", CSS, re.MULTILINE | re.DOTALL
    )
    rules = {
        selector: set(re.findall(r"([\w-]+: .+);", body))
        for selectors, body in re.findall(r"^  ([^{}/]+?) {\n(.*?)^  }", narrow[1], re.MULTILINE | re.DOTALL)
        for selector in re.split(r",\s+", selectors)
    }
    cell = ".md-typeset table:not([class]) tr.doc-section-item[class] > td"
    prose = '.md-typeset table:not([class]) td:not(:first-child):not([style*="right"])'
    assert "min-width: 11rem" in rules[prose]
    assert "display: none" in rules[".md-typeset table:has(tr.doc-section-item) thead"]
    for stacked in (".md-typeset tr.doc-section-item", cell):
        assert {"display: block", "min-width: 0"} <= rules[stacked]
    classes = re.compile(r"\.[\w-]+|\[.*?\]|:first-child")
    assert len(classes.findall(cell)) >= len(classes.findall(prose)), "the later rule must win"


def test_the_site_formats_signatures_by_the_pinned_formatter() -> None:
    """mkdocstrings leaves signatures as they are where it finds no formatter."""
    docs, test = re.findall(r'"ruff==([\d.]+)"', (ROOT / "pyproject.toml").read_text())  # of both extras
    assert docs == test


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page not in (DECISIONS, *(DOCS / f"{name}.md" for name in GENERATED))],
    ids=lambda page: str(page.relative_to(DOCS)),
)
def test_figures_of_measurements_are_not_typed_into_pages(page: Path) -> None:
    """They are in README.md and the pages of GENERATED, which are written from JSON.  decisions.md
    keeps those of experiments that are over, and that no JSON has any more.
    """
    figures = r"\d+(?:\.\d+)? ?(?:[mnuµ]s|GB/s|TFLOP/s|times|x as fast)\b"
    assert re.findall(figures, page.read_text()) == []


def sections(nav: list[dict[str, Any]], above: str = "") -> dict[str, list[str]]:
    """Return the pages of each section, by its path; a page beside sections counts to their own."""
    found: dict[str, list[str]] = {}
    for entry in nav:
        for name, content in entry.items():
            if isinstance(content, list):
                found |= sections(content, f"{above}/{name}")
            else:
                found.setdefault(above, []).append(content)
    return found


def test_records_for_maintainers_are_apart_from_pages_for_users() -> None:
    found = sections(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    for name, pages in found.items():
        apart = [page.startswith("maintainers/") or page == "contributing.md" for page in pages]
        assert apart == [name.startswith("/For maintainers/")] * len(pages), name
