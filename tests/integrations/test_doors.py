"""How moecomm comes into engines, as `moecomm doctor` and the log say."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from moecomm.integrations import doors, sglang


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Both engines, as packages without a module that could be imported."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("vllm", "sglang", "deep_ep", "nixl_ep")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    for package, version in (("vllm", "0.99.0"), ("sglang", "0.98.0")):
        about = tmp_path / f"{package}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise ImportError")
    importlib.invalidate_caches()
    return tmp_path


def test_the_way_into_each_engine_is_known_without_importing_it(engines: Path) -> None:
    assert doors.ways() == {"vLLM 0.99.0": doors.VLLM, "SGLang 0.98.0": doors.SGLANG}
    folder = engines / "vllm/model_executor/layers/fused_moe"
    folder.mkdir(parents=True)
    (folder / "all2all_utils.py").write_text("def register_moe_prepare_finalize_factory(factory): ...")
    assert "has a registry" in doors.ways()["vLLM 0.99.0"]


def test_an_engine_that_uses_another_is_told_of(engines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (engines / "deep_ep.py").write_text("raise ImportError")
    importlib.invalidate_caches()
    assert doors.ways()["SGLang 0.98.0"] == "not in use: deep_ep is installed; MOECOMM_SGLANG=always takes its place"
    monkeypatch.setenv("MOECOMM_SGLANG", "always")
    monkeypatch.setenv("MOECOMM_VLLM", "never")
    assert doors.ways() == {"vLLM 0.99.0": "not in use: MOECOMM_VLLM=never", "SGLang 0.98.0": doors.SGLANG}


def test_the_log_says_which_way_is_in_use(
    batches: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from moecomm.integrations import vllm

    caplog.set_level(logging.INFO, "moecomm")
    monkeypatch.setenv("MOECOMM_VLLM", "always")
    vllm.register()
    sglang.register()
    lines = [record.getMessage() for record in caplog.records if record.name == "moecomm"]
    assert lines == [
        f"moecomm is vLLM's deepep_high_throughput and deepep_low_latency, {doors.VLLM}",
        f"moecomm is SGLang's deep_ep, {doors.SGLANG}",
    ]
