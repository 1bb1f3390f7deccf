"""Which ports count as a NIC that GPUs can put through, over folders such as the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from moecomm.backends import nic


@pytest.mark.parametrize(
    ("state", "link", "counts"),
    [
        ("4: ACTIVE\n", "InfiniBand\n", True),
        ("4: ACTIVE\n", "Ethernet\n", True),
        ("1: DOWN\n", "InfiniBand\n", False),
        ("2: INIT\n", "InfiniBand\n", False),
        ("5: ACTIVE_DEFER\n", "Ethernet\n", False),
        ("4: ACTIVE\n", "Unknown\n", False),  # EFA
        ("4: ACTIVE\n", None, False),
        (None, "InfiniBand\n", False),
    ],
)
def test_an_active_port_of_infiniband_or_roce_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str | None, link: str | None, counts: bool
) -> None:
    monkeypatch.setattr(nic, "DEVICES", tmp_path / "infiniband")
    assert not nic.has_rdma()
    down = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1"
    other = tmp_path / "infiniband" / "mlx5_1" / "ports" / "2"
    for port, files in ((down, ("1: DOWN\n", "InfiniBand\n")), (other, (state, link))):
        assert not nic.has_rdma()
        port.mkdir(parents=True)
        for name, text in zip(("state", "link_layer"), files, strict=True):
            if text is not None:
                (port / name).write_text(text)
    assert nic.has_rdma() == counts


def test_a_device_without_ports_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nic, "DEVICES", tmp_path)
    (tmp_path / "mlx5_0").mkdir()
    assert not nic.has_rdma()
