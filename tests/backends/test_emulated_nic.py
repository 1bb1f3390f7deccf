"""The figures of an emulated NIC: as they are asked for, and as kernels read them."""

from __future__ import annotations

import re

import pytest
import torch

from moecomm.backends import emulated_nic
from moecomm.backends.emulated_nic import Nic, parse
from moecomm.errors import BadInput
from moecomm.gpu import loader


@pytest.mark.parametrize(
    ("text", "nic"),
    [("50,3,10", Nic()), ("25", Nic(25.0, 3.0, 10.0)), ("100,1.5", Nic(100.0, 1.5, 10.0)), ("1,0,2.5", Nic(1, 0, 2.5))],
)
def test_figures_left_out_are_the_defaults(text: str, nic: Nic) -> None:
    assert parse("nic", text) == nic


@pytest.mark.parametrize("text", ["", "x", "50,", "0,3,10", "50,-1,10", "50,3,0", "nan", "inf", "50,3,10,1"])
def test_other_figures_are_refused(text: str) -> None:
    with pytest.raises(BadInput, match="MOECOMM_NIC"):
        parse("MOECOMM_NIC", text)


def test_the_environment_asks_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOECOMM_NIC", raising=False)
    assert emulated_nic.asked() is None
    monkeypatch.setenv("MOECOMM_NIC", "25,5")
    assert emulated_nic.asked() == Nic(25.0, 5.0, 10.0)


def test_what_kernels_read() -> None:
    """Windows; ps a byte and a message, ns of latency; when processor and wire are free; what each channel sent."""
    cpu = torch.device("cpu")
    assert emulated_nic.link(None, [7, 8, 9], cpu).tolist() == [7, 8, 9]
    words = emulated_nic.link(Nic(), [7, 8, 9], cpu)
    assert words.dtype is torch.int64 and words.tolist() == [7, 8, 9, 20, 100_000, 3000, 0, 0, *[0] * 16 * 3]
    found = re.search(r"kNicChannels = (\d+);", (loader.headers() / "transport/nic.cuh").read_text())
    assert found is not None and int(found.group(1)) == emulated_nic._CHANNELS
