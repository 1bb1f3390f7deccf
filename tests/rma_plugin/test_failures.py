"""Broken, silent, absent and lying peers: a named error, at once or after the timeout, and no hang or stray byte."""

from __future__ import annotations

import pytest

from ..few import few
from .conftest import Drive

WAYS = ("loopback", "tcp")
LIES = {
    "magic": "PeerLied: rank 1 sends what is no frame",
    "header": "BadChecksum: a header from rank 1 is damaged",
    "payload": "BadChecksum: a payload from rank 1 is damaged",
    "length": "PeerLied: rank 1 sends a frame of an impossible length",
    "offset": "PeerLied: rank 1 puts beyond the end of a region",
    "wrap": "PeerLied: rank 1 puts beyond the end of a region",
    "region": "PeerLied: rank 1 puts into a region that is not registered",
    "type": "PeerLied: rank 1 sends an unknown frame",
    "order": "PeerLied: rank 1 sends frames out of their order",
    "signal": "PeerLied: rank 1 signals a word that is not in any registered region",
    "signal-region": "PeerLied: rank 1 signals a word that is not in any registered region",
    "signal-half": "PeerLied: rank 1 signals a word that is not in any registered region",
    "ack": "PeerLied: rank 1 confirms operations that it can't have seen",
    "data": "PeerLied: rank 1 sends data that nobody asked for",
    "get": "PeerLied: rank 1 gets beyond the end of a region",
    "get-flood": "PeerLied: rank 1 gets more at once than was agreed",
    "half": "PeerLost: the connection to rank 1 was closed",
    "noise": "PeerLied: rank 1 sends what is no frame",
}
LIES_BY_MAIL = {
    "mail-count": "PeerLied: rank 1 has posted more mail than there is room for",
    "mail-signal": "PeerLied: rank 1 signals a word that is not in any registered region",
}
LIES_IN_CARDS = {
    "card-magic": "PeerLied: registering memory with rank 1: rank 1 sends no card of a region",
    "card-check": "PeerLied: registering memory with rank 1: rank 1 sends no card of a region",
    "card-order": "PeerLied: registering memory with rank 1: rank 1 registers region 5 where this rank registers 4",
    "card-no-window": "PeerLied: registering memory with rank 1: rank 1 gives a window that is none",
    "card-beyond": "PeerLied: registering memory with rank 1: rank 1 gives a window that is none",
}


@pytest.mark.parametrize("memory", few(["host", "cuda"], "host"))
@pytest.mark.parametrize("way", WAYS)
def test_a_peer_that_is_killed_is_lost(drive: Drive, way: str, memory: str) -> None:
    drive("killed", way=way, memory=memory)


def test_all_survivors_of_a_killed_peer_say_so(drive: Drive) -> None:
    drive("killed", way="tcp", ranks=4)


@pytest.mark.parametrize("memory", few(["host", "cuda"], "host"))
@pytest.mark.parametrize("way", WAYS)
def test_the_others_go_on_where_somebody_watches(drive: Drive, way: str, memory: str) -> None:
    """Puts to the lost peer end without effect: NCCL's thread would stop for all at the first error."""
    drive("killed_while_watched", way=way, memory=memory, ranks=4)


@pytest.mark.parametrize("memory", few(["host", "cuda"], "host"))
@pytest.mark.parametrize("way", WAYS)
def test_a_peer_that_never_polls_is_silent(drive: Drive, way: str, memory: str) -> None:
    drive("silent", way=way, memory=memory, timeout_ms=700)


@pytest.mark.parametrize("way", WAYS)
def test_a_peer_that_leaves_is_no_error_until_it_is_wanted(drive: Drive, way: str) -> None:
    drive("left", way=way)


@pytest.mark.parametrize("way", WAYS)
def test_a_peer_that_does_not_come_is_named(drive: Drive, way: str) -> None:
    drive("absent", way=way, timeout_ms=500)


def test_another_secret_is_refused_on_both_sides(drive: Drive) -> None:
    drive("wrong_secret", way="tcp", timeout_ms=1000)


@pytest.mark.parametrize("table", few([14, 16], 16))
@pytest.mark.parametrize("way", WAYS)
def test_a_caller_who_asks_for_nonsense_is_refused(drive: Drive, way: str, table: int) -> None:
    drive("misuse", way=way, memory="cuda", table=table)


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_named_and_not_stored(drive: Drive, lie: str) -> None:
    assert LIES[lie] in drive(f"liar-{lie}", way="tcp")


@pytest.mark.parametrize("lie", LIES_BY_MAIL)
def test_a_lie_by_mail_is_named_and_not_stored(drive: Drive, lie: str) -> None:
    assert LIES_BY_MAIL[lie] in drive(f"liar-{lie}", way="loopback", memory="cuda")


@pytest.mark.parametrize("lie", LIES_IN_CARDS)
def test_a_lie_about_a_window_is_named(drive: Drive, lie: str) -> None:
    assert LIES_IN_CARDS[lie] in drive(f"liar-{lie}", way="loopback", memory="cuda")


def test_a_lie_does_not_reach_the_memory_of_a_gpu(drive: Drive) -> None:
    assert LIES["offset"] in drive("liar-offset", way="tcp", memory="cuda")
