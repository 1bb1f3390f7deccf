"""Digests of the source of kernels: what changes them, and what does not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from moecomm_bench import results, sources

CSRC = Path(__file__).parents[2] / "csrc"


def test_a_digest_covers_what_is_included_but_no_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PARTS", {"a": ("a/entry.cuh",), "b": ("b/entry.cpp",)})

    def digest(files: dict[str, str]) -> dict[str, str]:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        return sources.digests(tmp_path)

    files = {
        "a/entry.cuh": '#include "near.cuh"\n#include "c/far.h"\n#include <vector>\nint a; // one\n',
        "a/near.cuh": "#pragma once\nint near;\n",
        "c/far.h": '#include "../a/near.cuh"\nint far();\n',
        "c/far.cpp": '#include "far.h"\nint far() { return 1; }\n',
    }
    before = digest(files)
    assert set(before) == {"a"}, "no digest of a part whose source is not there"
    prose = {"a/entry.cuh": files["a/entry.cuh"].replace("// one", "/* two\n lines */"), "a/other.cuh": "int other;"}
    assert digest(files | prose) == before
    for name in files:
        assert digest(files | {name: files[name] + "int more;"}) != before, name


def test_docstrings_and_comments_of_python_change_nothing() -> None:
    text = "def f(a):\n    return g(a, '# text')\n\n\nclass C:\n    x = 1\n"
    said = (
        '"""Module."""\n\n\ndef f(a):  # why\n    """F.\n\n    More.\n    """\n    return g(a, \'# text\')  # é\n\n\n'
        'class C:\n    """C."""\n\n    # one\n    x = 1\n'
    )
    assert sources.python(said) == sources.python(text) == "".join(text.split())
    assert sources.python(text.replace("1", "2")) != sources.python(text)


def test_every_part_has_its_source_here(tmp_path: Path) -> None:
    found = sources.digests(CSRC)
    assert set(found) == set(sources.PARTS) and len(set(found.values())) == len(found)
    shutil.copytree(CSRC, tmp_path / "csrc")
    with (tmp_path / "csrc" / "protocol" / "args.h").open("a") as shared:
        shared.write("struct More {};\n")
    other = sources.digests(tmp_path / "csrc")
    assert {part for part in other if found[part] != other[part]} >= {"dispatch", "combine", "fused layer", "host"}


@pytest.mark.parametrize("part", ["dispatch", "combine"])
def test_a_kernel_of_one_domain_is_not_older_by_a_change_between_domains(part: str, tmp_path: Path) -> None:
    shutil.copytree(CSRC, tmp_path, dirs_exist_ok=True)
    before = sources.digests(tmp_path)
    for path in (tmp_path / part).glob("scaleout_*"):
        path.write_text(f"{path.read_text()}struct More {{}};\n")
        after = sources.digests(tmp_path)
        assert {name for name in before if before[name] != after[name]} == {f"{part} between domains"}
    with (tmp_path / part / f"{part}.cuh").open("a") as shared:
        shared.write("struct More {};\n")
    assert sources.digests(tmp_path)[part] != before[part]


def test_a_result_has_both() -> None:
    found = results.origin()
    assert found["kernels"] == sources.digests() and found["kernels"].items() <= sources.digests(CSRC).items()
    assert found["commit"] == sources.commit()
