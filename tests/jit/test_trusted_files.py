"""Files are read only where no other user can have written them, and up to a bound."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moecomm.base import trusted_files
from moecomm.base.trusted_files import Access
from moecomm.errors import BadInput


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "directory" / "file"
    trusted_files.write(path, Access.PRIVATE, b"content")
    return path


def is_read(path: Path, access: Access) -> bool:
    try:
        return trusted_files.read(path, access, 7) == b"content"
    except PermissionError:
        return False


def test_what_is_written_is_private(path: Path) -> None:
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert is_read(path, Access.PRIVATE) and is_read(path, Access.READ_ONLY)
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("place", ["file", "directory"])
@pytest.mark.parametrize(
    ("more", "private", "read_only"), [(0, 1, 1), (0o044, 0, 1), (0o011, 0, 1), (0o020, 0, 0), (0o002, 0, 0)]
)
def test_permissions_of_others(path: Path, place: str, more: int, private: bool, read_only: bool) -> None:
    changed = path if place == "file" else path.parent
    changed.chmod(changed.stat().st_mode & 0o777 | more)
    assert is_read(path, Access.PRIVATE) == private
    assert is_read(path, Access.READ_ONLY) == read_only


@pytest.mark.parametrize("place", ["file", "directory"])
@pytest.mark.parametrize("owner", ["root", "another"])
def test_owners(path: Path, place: str, owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As this user sees it: everything else is ours."""
    theirs = (path if place == "file" else path.parent).stat().st_ino
    real = os.fstat

    def fstat(descriptor: int) -> os.stat_result:
        status = real(descriptor)
        fields = list(status)
        fields[4] = (0 if owner == "root" else 1001) if status.st_ino == theirs else 1000
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", fstat)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert not is_read(path, Access.PRIVATE)
    assert is_read(path, Access.READ_ONLY) == (owner == "root")


def test_no_more_is_read_than_is_allowed(path: Path) -> None:
    with pytest.raises(OSError, match="7 bytes, at most 6"):
        trusted_files.read(path, Access.PRIVATE, 6)


def test_a_file_that_is_not_there_is_told_from_one_that_is_doubtful(path: Path) -> None:
    for missing in (path.with_name("other"), path.parent / "no directory" / "file"):
        with pytest.raises(FileNotFoundError):
            trusted_files.read(missing, Access.PRIVATE, 7)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(OSError, match="not a regular file"):
        trusted_files.read(path, Access.PRIVATE, 7)


def test_a_folder_for_outputs_is_made_for_this_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "deeper" / "folder"
    trusted_files.prepare_directory("folder", folder)
    trusted_files.prepare_directory("folder", folder)
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("wrong", ["open to others", "a file", "a null character"])
def test_a_folder_for_outputs_that_is_not_safe_is_bad_input(wrong: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder\0" if wrong == "a null character" else tmp_path / "folder"
    if wrong == "open to others":
        folder.mkdir()
        folder.chmod(0o770)
    elif wrong == "a file":
        folder.touch()
    with pytest.raises(BadInput, match=r"MOECOMM_TOP_DIR.*only this user can write to"):
        trusted_files.prepare_directory("MOECOMM_TOP_DIR", folder)
