"""How moecomm comes into vLLM: where DeepEP's place is free, or where it is asked to."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch

import moecomm
from moecomm.compat import deep_ep, nixl_ep
from tests.integrations import vllm_stub as stub


@pytest.mark.parametrize(
    ("wanted", "there", "taken"),
    [("", False, True), ("", True, False), ("always", True, True), ("never", False, False)],
)
def test_the_place_of_deepep_is_taken_where_it_is_free_or_asked_for(
    batches: Any, monkeypatch: pytest.MonkeyPatch, wanted: str, there: bool, taken: bool
) -> None:
    from moecomm.integrations import vllm

    if wanted:
        monkeypatch.setenv("MOECOMM_VLLM", wanted)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if there else None)
    for _ in range(2):
        vllm.register()
    all2all = sys.modules["vllm.distributed.device_communicators.all2all"]
    places = sys.modules[f"{stub.MOE}.all2all_utils"]
    assert (all2all.DeepEPHTAll2AllManager is not stub.DeepEPHTAll2AllManager) is taken
    assert (all2all.DeepEPLLAll2AllManager is not stub.DeepEPLLAll2AllManager) is taken
    assert hasattr(places, "DeepEPHTPrepareAndFinalize") is taken
    assert (sys.modules.get("deep_ep") is deep_ep) is taken  # which deepep_v2 imports
    assert (sys.modules.get("nixl_ep") is nixl_ep) is taken
    if taken:
        group = moecomm.local_ranks(1)[0]
        for kind, name, more in (
            ("standard", "DeepEPHTAll2AllManager", {"dp_size": 1, "rank_expert_offset": 0}),
            ("batched", "DeepEPLLAll2AllManager", {"max_tokens_per_rank": 4, "use_fp8_dispatch": False}),
        ):
            manager = getattr(all2all, name)(group, None)
            made = places.maybe_make_prepare_finalize(kind, buffer=manager.get_handle({}), num_dispatchers=1, **more)
            assert made.num_dispatchers() == 1 and made.output_is_reduced() and made.supports_async()
            assert made.topk_indices_dtype() is torch.int64
            assert made.max_num_tokens_per_rank() == more.get("max_tokens_per_rank")
            assert (
                made.activation_format
                is stub.FusedMoEActivationFormat[{"standard": "Standard", "batched": "BatchedExperts"}[kind]]
            )
        assert places.DEEPEP_QUANT_BLOCK_SHAPE == [128, 128]


def test_on_cpus_each_backend_has_its_manager(batches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A communicator on CPUs makes an AgRsAll2AllManager, whatever was asked for."""
    from moecomm.integrations import vllm

    class Theirs:
        def __init__(self, cpu_group: Any, tcp_store_group: Any = None) -> None:
            self.group = cpu_group

    monkeypatch.setenv("MOECOMM_VLLM", "always")
    all2all = sys.modules["vllm.distributed.device_communicators.all2all"]
    monkeypatch.setattr(all2all, "AgRsAll2AllManager", Theirs, raising=False)
    monkeypatch.setattr(sys.modules["vllm.platforms"].current_platform, "is_cpu", lambda: True)
    for _ in range(2):
        vllm.register()
    from moecomm.integrations.vllm.managers import BatchedManager, StandardManager

    group = moecomm.local_ranks(1)[0]
    parallel = sys.modules["vllm.config"].parallel
    for asked, kind in {
        "deepep_high_throughput": StandardManager,
        "deepep_low_latency": BatchedManager,
        "allgather_reducescatter": Theirs,
    }.items():
        monkeypatch.setattr(parallel, "all2all_backend", asked, raising=False)
        assert type(all2all.AgRsAll2AllManager(group)) is kind


def test_a_vllm_without_the_place_is_told_from_one_that_is_asked(
    batches: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from moecomm.integrations import vllm

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    all2all = sys.modules["vllm.distributed.device_communicators.all2all"]
    del all2all.DeepEPLLAll2AllManager
    vllm.register()
    assert "DeepEPLLAll2AllManager" in caplog.text and all2all.DeepEPHTAll2AllManager is stub.DeepEPHTAll2AllManager
    monkeypatch.setenv("MOECOMM_VLLM", "always")
    with pytest.raises(moecomm.Unsupported, match="DeepEPLLAll2AllManager"):
        vllm.register()


def test_vllm_finds_the_plugin() -> None:
    from importlib.metadata import entry_points
    from pathlib import Path

    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]\nmoecomm = "moecomm.integrations.vllm:register"' in text
    for point in entry_points(group="vllm.general_plugins", name="moecomm"):  # where moecomm is installed
        assert point.value == "moecomm.integrations.vllm:register"
