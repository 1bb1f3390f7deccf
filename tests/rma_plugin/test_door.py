"""Strangers at the door of a rank: they hold nobody up, and learn nothing; and a door without descriptors."""

from __future__ import annotations

import pytest

from moecomm import config, rma_plugin
from moecomm.errors import BadInput

from .conftest import Drive


def test_strangers_hold_nobody_up(drive: Drive) -> None:
    drive("strangers", way="tcp", timeout_ms=5000)


@pytest.mark.long
def test_silent_guests_who_fill_the_door_are_shown_out(drive: Drive) -> None:
    drive("full_door", way="tcp")


def test_a_door_without_descriptors_waits_for_one(drive: Drive) -> None:
    drive("no_descriptors", way="tcp", timeout_ms=10000)


def test_a_door_that_never_gets_a_descriptor_says_so(drive: Drive) -> None:
    drive("no_descriptors_ever", way="tcp", timeout_ms=1000)


def test_a_window_that_there_is_no_descriptor_for_is_no_lie(drive: Drive) -> None:
    drive("no_descriptor_for_window", way="loopback", memory="cuda")


def test_who_accepts_proves_nothing_before_the_other_has(drive: Drive) -> None:
    drive("proofs", way="tcp")


def test_a_short_secret_is_refused(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    drive("short_secret")
    for secret in ("fifteen bytes..", ""):
        with pytest.raises(BadInput, match="at least 16 bytes") as caught:
            rma_plugin.environment(secret)
        assert caught.value.argument == "secret" and "fifteen" not in str(caught.value)
    monkeypatch.setenv("MOECOMM_JOB_SECRET", "fifteen bytes..")
    with pytest.raises(BadInput, match=r"MOECOMM_JOB_SECRET.*15 bytes.*at least 16 bytes"):
        config.check_environment()
    for secret in ("sixteen bytes...", ""):  # empty: as if it were not set
        monkeypatch.setenv("MOECOMM_JOB_SECRET", secret)
        config.check_environment()
