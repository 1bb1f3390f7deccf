"""Nothing holds up NCCL's thread, and no stranger a rank: the fake driver's calls wait where a real one's may."""

from __future__ import annotations

import pytest

from .conftest import Drive


def test_strangers_hold_nobody_up(drive: Drive) -> None:
    drive("strangers", way="tcp", timeout_ms=5000)


def test_silent_guests_who_fill_the_door_are_shown_out(drive: Drive) -> None:
    drive("full_door", way="tcp")


def test_a_gpu_that_ends_no_copy_holds_up_no_call(drive: Drive) -> None:
    drive("crowded", way="loopback", memory="cuda", queue=256)


@pytest.mark.parametrize("table", [14, 16])
def test_what_is_mapped_is_given_back_beside_nccls_thread(drive: Drive, table: int) -> None:
    """After a registration that failed; those that went well are given back in all of the random tests."""
    drive("half_registered", way="loopback", memory="cuda", ranks=3, timeout_ms=3000, table=table)
