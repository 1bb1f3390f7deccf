from __future__ import annotations

import errno
import itertools
import os
import secrets
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from moecomm import _native

from ..few import few
from ..live import FAR_S, ROOM_S
from .processes import children, open_fds

NONCE = bytes(range(16))
MAGIC, VERSION = 0x4D6F4566, 1


def open_exchanges(ranks: int, nonces: list[bytes] | None = None) -> tuple[list[_native.Exchange], list[bytes]]:
    opened = [_native.Exchange(rank, ranks, nonces[rank] if nonces else NONCE) for rank in range(ranks)]
    return opened, [exchange.address for exchange in opened]


def share_all(exchanges: list[_native.Exchange], fds: list[int], timeout_s: float = FAR_S) -> list[list[int]]:
    addresses = [exchange.address for exchange in exchanges]
    with ThreadPoolExecutor(len(exchanges)) as pool:
        return list(pool.map(lambda exchange, fd: exchange.share(fd, addresses, timeout_s), exchanges, fds))


def close_all(fds: list[int]) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)


def first_word(fd: int) -> int:
    return int.from_bytes(os.pread(fd, 4, 0), "little")


def marked_windows(ranks: int) -> list[_native.HostWindow]:
    """Windows whose first word is the rank + 1."""
    windows = [_native.HostWindow(4096) for _ in range(ranks)]
    for rank, window in enumerate(windows):
        _native.set_abort(window.address, 0, rank)
    return windows


@pytest.mark.parametrize("ranks", [2, 4])
def test_between_processes(ranks: int) -> None:
    with children("exchange", *((rank, ranks, NONCE.hex()) for rank in range(ranks))) as started:
        addresses = [child.hear() for child in started]
        assert len(set(addresses)) == ranks
        for child in started:
            child.say(addresses)
        assert [child.hear() for child in started] == [list(range(1, ranks + 1))] * ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 16])
def test_between_threads(ranks: int) -> None:
    windows = marked_windows(ranks)
    exchanges, addresses = open_exchanges(ranks)
    assert all(len(address) <= 64 for address in addresses)
    got = share_all(exchanges, [window.fd for window in windows])
    for rank, fds in enumerate(got):
        assert fds[rank] == -1
        assert [first_word(fd) for fd in fds if fd >= 0] == [peer + 1 for peer in range(ranks) if peer != rank]
        assert not any(os.get_inheritable(fd) for fd in fds if fd >= 0)
        close_all(fds)


def test_again_and_again_without_a_barrier() -> None:
    """A fast rank's next descriptor may come before a slow rank has finished."""
    rounds, ranks = 50, 3
    windows = marked_windows(rounds * ranks)
    exchanges, addresses = open_exchanges(ranks)

    def work(rank: int) -> list[list[int]]:
        seen = []
        for turn in range(rounds):
            fds = exchanges[rank].share(windows[turn * ranks + rank].fd, addresses, 20)
            seen.append([first_word(fd) for fd in fds if fd >= 0])
            close_all(fds)
        return seen

    with ThreadPoolExecutor(ranks) as pool:
        got = list(pool.map(work, range(ranks)))
    for rank in range(ranks):
        assert got[rank] == [[turn * ranks + p + 1 for p in range(ranks) if p != rank] for turn in range(rounds)]


def test_nothing_leaks() -> None:
    window = _native.HostWindow(4096)
    before = open_fds()
    for _ in range(100):
        exchanges, _addresses = open_exchanges(3)
        for fds in share_all(exchanges, [window.fd] * 3):
            close_all(fds)
        for exchange in exchanges:
            exchange.close()
            exchange.close()
    assert open_fds() == before
    assert not [name for name in os.listdir("/dev/shm") if "moecomm" in name]


def test_a_killed_process_leaves_nothing() -> None:
    with children("hold", ()) as (child,):
        address = child.hear()
        assert address in Path("/proc/net/unix").read_text()
        child.process.kill()
        child.process.wait()
        assert address not in Path("/proc/net/unix").read_text()
        assert not [name for name in os.listdir("/dev/shm") if "moecomm" in name]


@pytest.mark.parametrize("bad", [(0, 0, NONCE), (2, 2, NONCE), (-1, 2, NONCE), (0, 2, b"short"), (0, 2, bytes(17))])
def test_arguments(bad: tuple[int, int, bytes]) -> None:
    with pytest.raises(ValueError, match=r"rank must lie|nonce must have 16 bytes"):
        _native.Exchange(*bad)


def test_arguments_of_share() -> None:
    exchange = _native.Exchange(0, 2, NONCE)
    with pytest.raises(ValueError, match="one address a rank"):
        exchange.share(0, [b"a"], 1)
    with pytest.raises(ValueError, match="1 to 64 bytes"):
        exchange.share(0, [b"", b""], 1)
    for timeout in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="timeout_s"):
            exchange.share(0, [b"a", b"b"], timeout)


def test_timeout_names_who_is_missing() -> None:
    before = open_fds()
    exchanges, addresses = open_exchanges(4)
    start = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(exchanges[rank].share, 0, addresses, 0.3) for rank in (0, 1)]
        for wait, rank in zip(waits, (0, 1), strict=True):
            with pytest.raises(TimeoutError, match=f"rank {rank} waited .* nothing came from ranks 2, 3") as caught:
                wait.result()
            assert caught.value.errno == errno.ETIMEDOUT
    assert 0.3 <= time.monotonic() - start < ROOM_S
    for exchange in exchanges:
        exchange.close()
    assert open_fds() == before


def test_wrong_nonce() -> None:
    exchanges, addresses = open_exchanges(2, [NONCE, secrets.token_bytes(16)])
    before = open_fds()
    with ThreadPoolExecutor(2) as pool:
        for wait in [pool.submit(exchange.share, 0, addresses, 1.0) for exchange in exchanges]:
            with pytest.raises(TimeoutError, match="1 connections refused, the last one: wrong nonce"):
                wait.result()
    assert open_fds() == before


def test_a_rank_that_is_gone() -> None:
    before = open_fds()
    exchanges, addresses = open_exchanges(2)
    exchanges[1].close()
    start = time.monotonic()
    with pytest.raises(ConnectionRefusedError, match="rank 1 cannot be reached"):
        exchanges[0].share(0, addresses, FAR_S)
    assert time.monotonic() - start < ROOM_S
    exchanges[0].close()
    assert open_fds() == before


def test_close_ends_a_share() -> None:
    exchanges, addresses = open_exchanges(2)
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        exchanges[0].share(0, addresses, FAR_S)

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(wait)
        waiting.wait()
        start = time.monotonic()
        exchanges[0].close()
        with pytest.raises(OSError, match="closed") as caught:
            result.result()
        assert caught.value.errno == errno.ECANCELED
        assert time.monotonic() - start < ROOM_S


def message(**changed: Any) -> bytes:
    fields: dict[str, Any] = {"magic": MAGIC, "version": VERSION, "from": 1, "to": 0, "sequence": 0, "nonce": NONCE}
    fields.update(changed)
    return struct.pack(
        "<IIiiII16s", *(fields[k] for k in ("magic", "version", "from", "to", "sequence")), 0, fields["nonce"]
    )


def send(address: bytes, body: bytes, fds: list[int]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(b"\0" + address)
        socket.send_fds(connection, [body], fds)


HOSTILE: dict[str, tuple[Callable[[], bytes], int, str]] = {
    "nothing": (lambda: b"", 0, "not a message"),
    "short": (lambda: message()[:-1], 1, "not a message"),
    "long": (lambda: message() + b"x", 1, "not exactly one"),
    "other magic": (lambda: message(magic=1), 1, "not a message"),
    "other version": (lambda: message(version=2), 1, "another version"),
    "wrong nonce": (lambda: message(nonce=bytes(16)), 1, "wrong nonce"),
    "no descriptor": (message, 0, "not exactly one"),
    "two descriptors": (message, 2, "not exactly one"),
    "truncated control data": (message, 50, "not exactly one"),
    "for another rank": (lambda: message(to=1), 1, "meant for another rank"),
    "from ourselves": (lambda: message(**{"from": 0}), 1, "from no rank"),
    "from a negative rank": (lambda: message(**{"from": -1}), 1, "from no rank"),
    "from a rank too high": (lambda: message(**{"from": 3}), 1, "from no rank"),
    "from a far future": (lambda: message(sequence=2), 1, "from another call"),
}


@pytest.mark.parametrize("kind", few(HOSTILE, "wrong nonce", "long", "from a rank too high", "two descriptors"))
def test_hostile_messages(kind: str) -> None:
    make, fds, why = HOSTILE[kind]
    exchanges, addresses = open_exchanges(3)
    with tempfile.TemporaryFile() as file:
        before = open_fds()
        send(addresses[0], make(), [file.fileno()] * fds)
        with pytest.raises(
            TimeoutError, match=f"nothing came from ranks 1, 2; 1 connections refused, the last one: {why}"
        ):
            exchanges[0].share(file.fileno(), addresses, 0.1)
        assert open_fds() == before


def test_replay_is_refused() -> None:
    exchanges, addresses = open_exchanges(3)
    with tempfile.TemporaryFile() as file:
        before = open_fds()
        for _ in range(2):
            send(addresses[0], message(), [file.fileno()])
        with pytest.raises(
            TimeoutError, match="nothing came from ranks 2; 1 connections refused, the last one: sent twice"
        ):
            exchanges[0].share(file.fileno(), addresses, 0.1)
        assert open_fds() == before


def test_strangers_do_not_spoil_an_exchange() -> None:
    windows = marked_windows(2)
    exchanges, addresses = open_exchanges(2)
    before = open_fds()
    for make, count, _ in HOSTILE.values():
        for address in addresses:
            send(address, make(), [windows[0].fd] * count)
    got = share_all(exchanges, [window.fd for window in windows])
    assert [first_word(got[0][1]), first_word(got[1][0])] == [2, 1]
    for fds in got:
        close_all(fds)
    assert open_fds() == before


def test_a_silent_connection_does_not_hold_up() -> None:
    windows = marked_windows(2)
    exchanges, addresses = open_exchanges(2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(b"\0" + addresses[0])
        start = time.monotonic()
        for fds in share_all(exchanges, [window.fd for window in windows]):
            close_all(fds)
        assert time.monotonic() - start < ROOM_S


if os.geteuid() == 0:

    def as_nobody(body: Callable[[], None]) -> None:
        """Runs `body` in a process of another user, until it is done."""
        pid = os.fork()
        if pid == 0:
            try:
                os.setresuid(65534, 65534, 65534)
                body()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0

    def test_another_user_is_refused() -> None:
        exchanges, addresses = open_exchanges(2)
        before = open_fds()
        as_nobody(lambda: send(addresses[0], message(), [0]))
        with pytest.raises(
            TimeoutError, match="nothing came from ranks 1; 1 connections refused, the last one: another user"
        ):
            exchanges[0].share(0, addresses, 0.1)
        assert open_fds() == before

    def test_another_user_gets_nothing() -> None:
        """Somebody else listens at a peer's address: neither nonce nor descriptor is sent."""
        ours = _native.Exchange(0, 2, NONCE)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            name = b"moecomm-test-" + secrets.token_hex(8).encode()
            listener.bind(b"\0" + name)
            as_nobody(lambda: listener.listen())  # the credentials are those of listen()
            with pytest.raises(PermissionError, match="another user listens at the address of rank 1"):
                ours.share(0, [ours.address, name], 5)
            connection, _ = listener.accept()
            with connection:
                assert connection.recv(64) == b""


def test_a_check_that_raises_ends_the_wait() -> None:
    exchanges, addresses = open_exchanges(2)
    calls = []

    def check() -> None:
        calls.append(time.monotonic())
        if len(calls) == 3:
            raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        exchanges[0].share(0, addresses, 20, check)
    assert all(later - earlier < 1 for earlier, later in itertools.pairwise(calls))
