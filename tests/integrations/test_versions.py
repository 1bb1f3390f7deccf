"""The command that checks versions of frameworks: its list, and what it installs from an index of two versions."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.integrations import versions
from tests.integrations.versions import FRAMEWORKS, Framework

PAGE = (versions.ROOT / "docs" / "maintainers" / "testing.md").read_text()
FAKE = Framework("moecomm-fake", "1.0", "1.5", "", tests=("given",))


def wheel(folder: Path, version: str) -> None:
    about = f"moecomm_fake-{version}.dist-info"
    with zipfile.ZipFile(folder / f"moecomm_fake-{version}-py3-none-any.whl", "w") as file:
        file.writestr("moecomm_fake.py", f"VERSION = {version!r}")
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: moecomm-fake\nVersion: {version}\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")


def test_the_oldest_and_the_newest_of_an_index_are_installed_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in ("1.0", "1.5", "2.0"):
        wheel(tmp_path, version)
    for name, value in {"CONFIG_FILE": "/dev/null", "NO_INDEX": "1", "FIND_LINKS": str(tmp_path)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    seen = []

    def run(place: versions.Place, *arguments: str) -> str:
        code = "import moecomm_fake, pytest; print(moecomm_fake.VERSION)"  # pytest: of the running environment
        printed = subprocess.run([place.python, "-c", code], check=True, capture_output=True, text=True)
        seen.append(printed.stdout.strip())
        return "1 passed"

    monkeypatch.setattr(versions.Place, "run", run)
    assert versions.check_all(FAKE, newest_only=False)
    assert seen == ["1.0", "2.0"]
    assert "the newest is 2.0 here, and 1.5 in docs/maintainers/testing.md" in capsys.readouterr().out


def test_a_version_that_the_index_lacks_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checked = []
    monkeypatch.setattr(versions, "check", lambda framework, version: checked.append(version))
    monkeypatch.setattr(versions, "pip", lambda *arguments: "moecomm-fake (1.5)\nAvailable versions: 1.5, 1.2\n")
    assert versions.check_all(FAKE, newest_only=False)
    assert checked == ["1.5"] and "moecomm-fake 1.0: not on the index" in capsys.readouterr().out


def test_a_framework_of_which_the_index_has_nothing_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: str) -> str:
        raise RuntimeError("No matching distribution found")

    monkeypatch.setattr(versions, "pip", fail)
    assert not versions.check_all(FAKE, newest_only=True)


def test_a_test_that_skips_is_no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.Place, "install", lambda place, framework, version: None)
    monkeypatch.setattr(versions.Place, "run", lambda place, *arguments: "1 skipped in 0.1s")
    with pytest.raises(RuntimeError, match="skipped"):
        versions.check(FAKE._replace(tests=(), whole=("given",)), "1.5")


def test_the_page_has_the_list() -> None:
    rows = [[cell.strip().strip("`") for cell in line.split("|")[1:-1]] for line in PAGE.splitlines()]
    found = {row[0]: row[1:] for row in rows if len(row) == 6 and row[0] in FRAMEWORKS}
    assert found.keys() == FRAMEWORKS.keys()
    for name, (package, oldest, newest, beside, before) in found.items():
        framework = FRAMEWORKS[name]
        assert (package, oldest, newest, before.replace("`", "")) == (
            framework.package,
            framework.oldest,
            framework.newest,
            framework.before.replace("`", ""),
        )
        assert [item for item in framework.beside if item not in beside] == []
