"""Nothing holds up NCCL's thread: the fake driver's calls wait where real ones may.  No signal outlives its memory."""

from __future__ import annotations

import pytest

from .conftest import Drive


def test_a_gpu_that_ends_no_copy_holds_up_no_call(drive: Drive) -> None:
    drive("crowded", way="loopback", memory="cuda", queue=256)


@pytest.mark.parametrize("table", [14, 16])
@pytest.mark.long
def test_what_is_mapped_is_given_back_beside_nccls_thread(drive: Drive, table: int) -> None:
    """After a registration that failed; those that went well are given back in all of the random tests."""
    drive("half_registered", way="loopback", memory="cuda", ranks=3, timeout_ms=3000, table=table)


@pytest.mark.parametrize(
    ("where", "way"), [("unread", "loopback"), ("unread", "tcp"), ("held", "tcp"), ("own", "loopback"), ("own", "tcp")]
)
def test_a_signal_whose_memory_is_given_back_while_it_waits_is_dropped(drive: Drive, where: str, way: str) -> None:
    drive(f"late-{where}", way=way, memory="cuda")
