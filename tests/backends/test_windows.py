"""Which kind of window a Buffer gets, and who is told what when none works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moecomm import config
from moecomm.backends import windows
from moecomm.backends.windows import local, nccl, vmm
from moecomm.errors import Mismatch, Unsupported
from moecomm.gpu import cuda_driver
from moecomm.ranks.collective import NoRoom, all_or_none
from moecomm.ranks.rendezvous import LocalRank
from tests.backends.conftest import run_ranks

HERE, AWAY = b"h" * 32, b"a" * 32


def opened(kind: str, error: Exception | None = None) -> Callable[..., str]:
    def open_window(ranks: LocalRank, *_: Any, resident: int = 0, fabric: bool | None = None, more: int = 0) -> str:
        with all_or_none(ranks):
            if error is not None and ranks.rank == 1:
                raise error
        return kind if fabric is None else f"{kind} fabric={fabric}"

    return open_window


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Every kind of window works, and the GPU has no FABRIC handles."""
    monkeypatch.setattr(nccl, "missing", lambda: "")
    monkeypatch.setattr(nccl, "open_window", opened("nccl"))
    monkeypatch.setattr(vmm, "open_window", opened("vmm"))
    monkeypatch.setattr(local, "open_window", opened("local"))
    monkeypatch.setattr(windows, "attribute", lambda name, device: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    return monkeypatch


def choose(
    wanted: str | None = None, hosts: tuple[bytes, ...] = (HERE, HERE), gpus: tuple[bytes, ...] = (b"0", b"1")
) -> list[Any]:
    peers = [windows.Peer(host, gpu, wanted) for host, gpu in zip(hosts, gpus, strict=True)]

    def body(group: LocalRank) -> Any:
        group.in_process = False  # type: ignore[misc]
        return windows.open_window(group, peers, 100, torch.device("cuda", group.rank), 20.0, resident=1)

    return run_ranks(2, body)


def test_vmm_on_one_host_and_nccl_on_several_where_it_can(kinds: pytest.MonkeyPatch) -> None:
    assert choose() == choose("vmm") == ["vmm fabric=False"] * 2
    assert choose("nccl") == ["nccl", "nccl"]
    kinds.setattr(windows, "attribute", lambda name, device: int(name == "HANDLE_TYPE_FABRIC_SUPPORTED"))
    away = (HERE, AWAY)
    assert choose(hosts=away) == ["nccl", "nccl"]
    assert choose(hosts=away, gpus=(b"0", b"0")) == ["vmm fabric=True"] * 2, "NCCL refuses two ranks on one GPU"
    kinds.setattr(nccl, "open_window", opened("nccl", RuntimeError("no")))
    assert choose(hosts=away) == ["vmm fabric=True"] * 2
    kinds.setattr(nccl, "missing", lambda: "nccl4py is too old")
    assert choose(hosts=away) == ["vmm fabric=True"] * 2


def test_what_was_asked_for_is_not_replaced(kinds: pytest.MonkeyPatch) -> None:
    kinds.setattr(nccl, "missing", lambda: "nccl4py is too old")
    found = choose("nccl")
    assert [type(error) for error in found] == [Unsupported] * 2 and str(found[0]) == "nccl4py is too old"


def test_no_other_kind_is_tried_when_memory_is_out(kinds: pytest.MonkeyPatch) -> None:
    kinds.setattr(nccl, "open_window", opened("nccl", NoRoom("full")))
    assert [type(error) for error in choose(hosts=(HERE, AWAY))] == [NoRoom] * 2


def test_other_hosts_need_fabric_handles(kinds: pytest.MonkeyPatch) -> None:
    found = choose("vmm", hosts=(HERE, AWAY))
    assert [type(error) for error in found] == [Unsupported] * 2
    assert str(found[0]) == (
        "rank 1 runs on another host or in another container, where file descriptors can't be passed, "
        "and the driver has no FABRIC memory handles for NVIDIA H200"
    )
    assert "rank 0 runs on another host" in str(found[1])
    kinds.setattr(windows, "attribute", lambda name, device: int(name == "HANDLE_TYPE_FABRIC_SUPPORTED"))
    assert choose("vmm", hosts=(HERE, AWAY)) == ["vmm fabric=True"] * 2


def test_ranks_of_one_process_share_addresses(kinds: pytest.MonkeyPatch) -> None:
    peers = [windows.Peer(HERE, b"0", "nccl")] * 2
    found = run_ranks(
        2, lambda group: windows.open_window(group, peers, 100, torch.device("cuda", 0), 20.0, resident=1)
    )
    assert found == ["local", "local"]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """GPUs 0 to 2 are visible; 0 and 2 do not reach each other."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(cuda_driver, "uuid", lambda device: bytes([device]) * 16)
    monkeypatch.setattr(windows, "uuid", lambda device: bytes([device]) * 16)
    monkeypatch.setattr(cuda_driver, "call", lambda name, one, other: int({one, other} != {0, 2}))
    return monkeypatch


def test_gpus_without_peer_access_are_named(gpus: pytest.MonkeyPatch) -> None:
    def meet(group: LocalRank, devices: list[int]) -> Any:
        return windows.meet(group, torch.device("cuda", devices[group.rank]))

    peers = run_ranks(3, lambda group: meet(group, [0, 1, 1]))[0]
    assert [peer.gpu[0] for peer in peers] == [0, 1, 1] and len({peer.host for peer in peers}) == 1
    found = run_ranks(3, lambda group: meet(group, [1, 0, 2]))
    assert [type(error) for error in found] == [Unsupported] * 3
    assert str(found[0]) == "rank 1: GPU 0 can't load from and store to GPU 2 of rank 2: no peer access between them"


def test_ranks_must_agree_on_the_kind(gpus: pytest.MonkeyPatch) -> None:
    wanted = iter([None, "vmm"])
    gpus.setattr(config, "window_kind", lambda: next(wanted))
    found = run_ranks(2, lambda group: windows.meet(group, torch.device("cuda", 0)))
    assert [type(error) for error in found] == [Mismatch] * 2 and "MOECOMM_WINDOW" in str(found[0])
