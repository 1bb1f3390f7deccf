"""Digests of the source of kernels: what changes them, and what does not."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from moecomm import kernel_loader
from moecomm.bench import results, sources


def digest(files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr(sources, "PARTS", {"a": ("a/entry.cuh",), "b": ("b/entry.cpp",)})
    return sources.digests(files.get)


def test_a_digest_covers_what_is_included_but_no_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "a/entry.cuh": '#include "near.cuh"\n#include "c/far.h"\n#include <vector>\nint a; // one\n',
        "a/near.cuh": "#pragma once\nint near;\n",
        "c/far.h": '#include "../a/near.cuh"\nint far();\n',
        "c/far.cpp": '#include "far.h"\nint far() { return 1; }\n',
    }
    before = digest(files, monkeypatch)
    assert set(before) == {"a"}, "no digest of a part whose source is not there"
    prose = {"a/entry.cuh": files["a/entry.cuh"].replace("// one", "/* two\n lines */"), "a/other.cuh": "int other;"}
    assert digest(files | prose, monkeypatch) == before
    for name in files:
        assert digest(files | {name: files[name] + "int more;"}, monkeypatch) != before, name


def test_every_part_has_its_source_here() -> None:
    found = sources.digests()
    assert set(found) == set(sources.PARTS) and len(set(found.values())) == len(found)
    shared = "protocol/args.h"  # a change there is one of every round

    def changed(name: str) -> str | None:
        path = kernel_loader.headers() / name
        return path.read_text() + "int more;" * (name == shared) if path.is_file() else None

    other = sources.digests(changed)
    assert {part for part in found if found[part] != other[part]} >= {"dispatch", "combine", "fused layer", "host"}


def test_the_commit_is_empty_where_there_is_no_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "__file__", str(tmp_path / "sources.py"))
    assert sources.commit() == ""
    for words in (["init", "-q"], ["-c", "user.name=a", "-c", "user.email=a", "commit", "-qm", "a", "--allow-empty"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    assert len(sources.commit()) >= 8
    monkeypatch.setenv("PATH", "")
    assert sources.commit() == "", "no git"


def test_a_result_has_both() -> None:
    assert results.origin()["kernels"] == sources.digests() and "commit" in results.origin()
