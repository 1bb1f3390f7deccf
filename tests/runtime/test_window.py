from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
from collections.abc import Callable

import pytest

from moecomm import _native

from .processes import open_fds

SEALED = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW


def test_memory_is_zeroed_and_shared() -> None:
    mine = _native.HostWindow(8192)
    theirs = _native.HostWindow.attach(os.dup(mine.fd), 8192)
    assert mine.address != theirs.address
    assert [_native.read_word(theirs.address + at) for at in (0, 4096, 8188)] == [0, 0, 0]
    assert _native.set_abort(mine.address + 4096, 3, 5)
    assert _native.read_word(theirs.address + 4096) == (3 << 16) + 6
    mine.close()
    assert _native.read_word(theirs.address + 4096) == (3 << 16) + 6


@pytest.mark.parametrize("nbytes", [0, 4095, 4097, 1 << 20])
def test_nobody_can_change_the_size(nbytes: int) -> None:
    window = _native.HostWindow(4096)
    assert fcntl.fcntl(window.fd, fcntl.F_GET_SEALS) & SEALED == SEALED
    with pytest.raises(PermissionError):
        os.ftruncate(window.fd, nbytes)
    assert os.fstat(window.fd).st_size == 4096


def test_no_seal_can_be_added() -> None:
    window = _native.HostWindow(4096)
    with pytest.raises(PermissionError):
        fcntl.fcntl(window.fd, fcntl.F_ADD_SEALS, 0x8)  # F_SEAL_WRITE


def test_descriptor_is_not_inherited() -> None:
    assert not os.get_inheritable(_native.HostWindow(4096).fd)


def test_close_twice() -> None:
    before = open_fds()
    window = _native.HostWindow(4096)
    window.close()
    window.close()
    assert (window.fd, window.address, window.nbytes) == (-1, 0, 4096)
    assert open_fds() == before


def plain_memory(nbytes: int, seals: int) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def a_file() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(4096)
        return os.dup(file.fileno())


REFUSED: dict[str, tuple[Callable[[], int], str]] = {
    "shorter": (lambda: plain_memory(4095, SEALED), "4095 bytes instead of 4096"),
    "longer": (lambda: plain_memory(8192, SEALED), "8192 bytes instead of 4096"),
    "may shrink": (lambda: plain_memory(4096, SEALED & ~0x2), "not sealed"),
    "may grow": (lambda: plain_memory(4096, SEALED & ~0x4), "not sealed"),
    "may be sealed": (lambda: plain_memory(4096, SEALED & ~0x1), "not sealed"),
    "not sealed": (lambda: plain_memory(4096, 0), "not sealed"),
    "a file": (a_file, "not that of a window|not sealed"),
    "a device": (lambda: os.open("/dev/null", os.O_RDWR), "not that of a window"),
    "a pipe": (lambda: os.dup(os.pipe()[0]), "not that of a window"),
    "nothing": (lambda: -1, "not that of a window"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_attach_refuses(kind: str) -> None:
    make, why = REFUSED[kind]
    fd = make()
    with pytest.raises(ValueError, match=why):
        _native.HostWindow.attach(fd, 4096)
    if fd >= 0:
        with pytest.raises(OSError, match="Bad file descriptor"):  # it was taken all the same
            os.fstat(fd)


def test_read_only_memory_is_an_os_error() -> None:
    fd = plain_memory(4096, SEALED | 0x8)
    with pytest.raises(PermissionError):
        _native.HostWindow.attach(fd, 4096)


def test_sizes() -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        _native.HostWindow(0)
    with pytest.raises(OSError, match="1152921504606846976 bytes") as caught:
        _native.HostWindow(1 << 60)
    assert caught.value.errno in (errno.ENOMEM, errno.EFBIG)
    odd = _native.HostWindow(mmap.PAGESIZE + 1)
    assert os.fstat(odd.fd).st_size == mmap.PAGESIZE + 1


def test_released_memory_is_free_reads_as_zeros_and_can_be_written_again() -> None:
    page = mmap.PAGESIZE
    mine = _native.HostWindow(64 * page)
    theirs = _native.HostWindow.attach(os.dup(mine.fd), mine.nbytes)
    for at in range(0, mine.nbytes, page):
        _native.store_word(mine.address + at, 7)
    assert os.fstat(mine.fd).st_blocks * 512 == 64 * page
    assert mine.release(page + 1) == 2 * page
    assert os.fstat(mine.fd).st_blocks * 512 == 2 * page and os.fstat(mine.fd).st_size == mine.nbytes
    assert [_native.read_word(theirs.address + at * page) for at in (0, 1, 2, 63)] == [7, 7, 0, 0]
    _native.store_word(theirs.address + 63 * page, 9)
    assert _native.read_word(mine.address + 63 * page) == 9
    assert mine.release(mine.nbytes) == mine.nbytes
    for offset in (mine.nbytes + 1, 1 << 63):
        with pytest.raises(ValueError, match="outside of the window"):
            mine.release(offset)
    mine.close()
    with pytest.raises(ValueError, match="closed"):
        mine.release(0)


def test_nothing_leaks() -> None:
    def maps() -> int:
        with open("/proc/self/maps") as file:
            return sum("memfd:moecomm" in line for line in file)

    fds, mapped = open_fds(), maps()
    for _ in range(100):
        window = _native.HostWindow(1 << 16)
        _native.HostWindow.attach(os.dup(window.fd), 1 << 16)
    del window
    assert (open_fds(), maps()) == (fds, mapped)
