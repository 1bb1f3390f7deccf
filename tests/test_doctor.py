"""The doctor's findings, each against the thing it speaks of."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from rich.console import Console

import moecomm
from moecomm import backends, checkup, cli, nic, rma_plugin, shims
from moecomm.backends import cuda_driver, lsa

TOPOLOGY = """
\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tPHB\tSYS\t0-15\t0
GPU1\tNV18\t X \tNV4\tSYS\t0-15\t0
GPU2\tPHB\tNV4\t X \tSYS\t16-31\t1
NIC0\tSYS\tSYS\tSYS\t X
Legend:
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def test_every_backend_has_a_verdict_and_a_reason() -> None:
    found = {b.name: b for b in moecomm.doctor().backends}
    assert list(found) == ["host", "lsa", "gin", "nvshmem"]
    assert found["host"].can_run and found["host"].missing == ""
    for name in found:
        assert found[name].missing == backends.load(name).missing()
    if not torch.cuda.is_available():
        assert not found["lsa"].can_run and len(found["lsa"].missing) > 10


def test_a_backend_that_can_run_is_one_that_a_buffer_opens() -> None:
    for backend in moecomm.doctor().backends:
        settings = {"hidden": 64, "num_experts": 2, "topk": 1, "max_tokens": 4, "backend": backend.name}
        if backend.can_run:
            moecomm.Buffer(**settings).close()
        else:
            with pytest.raises(moecomm.Unsupported) as caught:
                moecomm.Buffer(**settings)
            assert backend.missing in str(caught.value)


def verdicts(monkeypatch: pytest.MonkeyPatch, *, rdma: bool, shim: str = "", lacks: str = "") -> dict[str, str]:
    """Each line of the doctor about a backend of GPUs, where all of them lack this or nothing."""
    monkeypatch.setattr(backends, "missing", lambda name: lacks)
    monkeypatch.setattr(nic, "has_rdma", lambda: rdma)
    monkeypatch.setattr(shims, "find", lambda name: shims.Shim(name, Path(), shim))
    lines = str(checkup.doctor()).splitlines()[1:4]
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}


def test_one_true_sentence_for_each_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdicts(monkeypatch, rdma=True) == dict.fromkeys(("lsa", "gin", "nvshmem"), "can run")
    assert verdicts(monkeypatch, rdma=False) == {
        "lsa": "can run",
        "gin": "can run: through moecomm's RMA plugin, because there is no RDMA NIC here",
        "nvshmem": "can run: inside one NVLink domain, because there is no RDMA NIC here",
    }
    assert verdicts(monkeypatch, rdma=True, shim="It was not built.")["nvshmem"] == (
        "can run: Not between domains: It was not built."
    )
    assert verdicts(monkeypatch, rdma=False, lacks="no GPU") == dict.fromkeys(
        ("lsa", "gin", "nvshmem"), "cannot run: no GPU"
    )
    assert verdicts(monkeypatch, rdma=False, lacks="no GPU", shim="No shim.")["gin"] == "cannot run: no GPU  No shim."


def machine(
    monkeypatch: pytest.MonkeyPatch, *, nccl: str = "2.30.7", nvshmem: str = "3.4.5", rdma: bool = False, shim: str = ""
) -> dict[str, str]:
    """The lines of the doctor about backends of GPUs, on a machine with such GPUs and libraries; "": not installed."""
    for package, version in (("nccl", nccl), ("nvshmem", nvshmem)):
        core = ModuleType(f"{package}.core")
        core.__version__, core.LibraryInfo = "0.6.0", object  # type: ignore[attr-defined]
        library = SimpleNamespace(version=Version(version or "0"), path="/lib/libnccl.so.2")
        found = SimpleNamespace(libnccl=library, libnvshmem_version=version)
        core.get_version = lambda found=found: found  # type: ignore[attr-defined]
        outer = ModuleType(package)
        outer.core = core  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, package, outer)
        monkeypatch.setitem(sys.modules, f"{package}.core", core if version else None)
    monkeypatch.setattr(lsa, "missing", lambda: "")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda_driver, "attribute", lambda name, device: 1)
    monkeypatch.setattr(nic, "has_rdma", lambda: rdma)
    monkeypatch.setattr(rma_plugin, "path", lambda: Path("libmoecomm_rma.so"))
    built = {"gin": "NCCL 2.30.7", "gin_proxy": "NCCL 2.30.7", "nvshmem": "NVSHMEM 3.4.5"}
    missing = {shim: f"The {shim} shim was not built."}
    find = lambda name: shims.Shim(name, Path(), missing.get(name, ""), headers=built[name])  # noqa: E731
    monkeypatch.setattr(shims, "find", find)
    lines = str(checkup.doctor()).splitlines()[1:4]
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}


PROXY = "can run: through moecomm's RMA plugin, because there is no RDMA NIC here"
INSIDE = "can run: inside one NVLink domain, because there is no RDMA NIC here"


@pytest.mark.parametrize(
    ("here", "gin", "nvshmem"),
    [
        ({}, PROXY, INSIDE),
        ({"rdma": True}, "can run", "can run"),
        ({"nccl": ""}, r"cannot run: nccl4py can't be imported \(.*\); pip install nccl4py", INSIDE),
        (
            {"nccl": "2.28.9"},
            r"cannot run: NCCL 2.28.9 is loaded \(/lib/libnccl.so.2\) and windows need 2.30; "
            r"pip install 'nvidia-nccl-cu13>=2.30.7'",
            INSIDE,
        ),
        (
            {"nccl": "2.30.3", "rdma": True},
            r"cannot run: NCCL 2.30.3 is loaded \(/lib/libnccl.so.2\) and the shim was compiled for NCCL 2.30.7; "
            r"pip install 'nvidia-nccl-cu13>=2.30.7'",
            "can run",
        ),
        ({"nvshmem": ""}, PROXY, r"cannot run: nvshmem4py can't be imported \(.*\); pip install nvshmem4py-cu13"),
        (
            {"nvshmem": "3.3.20"},
            PROXY,
            "cannot run: NVSHMEM 3.3.20 is loaded and 3.4.5 is wanted; pip install 'nvidia-nvshmem-cu13>=3.4.5'",
        ),
        ({"shim": "gin_proxy"}, "cannot run: The gin_proxy shim was not built.", INSIDE),
        ({"shim": "gin"}, PROXY, INSIDE),
        ({"shim": "gin", "rdma": True}, "cannot run: The gin shim was not built.", "can run"),
        ({"shim": "nvshmem"}, PROXY, "can run: Not between domains: The nvshmem shim was not built."),
    ],
)
def test_what_a_machine_with_gpus_lacks_is_said_of_the_backend_that_wants_it(
    monkeypatch: pytest.MonkeyPatch, here: dict[str, Any], gin: str, nvshmem: str
) -> None:
    found = machine(monkeypatch, **here)
    assert found["lsa"] == "can run"
    assert re.fullmatch(gin, found["gin"]), found
    assert re.fullmatch(nvshmem, found["nvshmem"]), found


def test_a_driver_that_is_too_old_and_a_compiler_that_is_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pathfinder = pytest.importorskip("cuda.pathfinder")
    bindings = pytest.importorskip("cuda.bindings")
    monkeypatch.setattr(lsa, "_missing_gpu", lambda: "")
    monkeypatch.setattr(bindings, "__version__", "13.1.0")
    monkeypatch.setattr(cuda_driver, "call", lambda name: 12090)
    too_old = (
        "the driver is of CUDA 12, too old for cuda-bindings 13.1.0; update the driver or pip install moecomm[cu12]"
    )
    assert lsa.missing() == too_old
    monkeypatch.setattr(cuda_driver, "call", lambda name: 13000)

    def gone(name: str) -> None:
        raise RuntimeError(name)

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", gone)
    assert lsa.missing() == (
        "libnvrtc, which compiles the kernels, is not installed; "
        "pip install moecomm[cu13] (or [cu12] for a driver of CUDA 12)"
    )
    lines = str(checkup.doctor()).splitlines()[1:4]
    assert all("cannot run: libnvrtc, which compiles the kernels, is not installed" in line for line in lines)


def test_versions_are_those_installed() -> None:
    versions = checkup.doctor().versions
    assert versions["Python"] == ".".join(map(str, sys.version_info[:3]))
    assert versions["torch"] == importlib.metadata.version("torch")
    assert versions["torch's CUDA"] == torch.version.cuda
    installed = {d.metadata["Name"].lower() for d in importlib.metadata.distributions()}
    for name, packages in checkup._PACKAGES.items():
        assert (versions[name] is None) == installed.isdisjoint(packages), name


def test_topology() -> None:
    topology = checkup.doctor().topology
    assert topology.cores == len(os.sched_getaffinity(0))
    assert topology.numa_nodes >= 1
    assert len(topology.gpus) == torch.cuda.device_count() == len(topology.links)
    assert all(row[gpu] == "X" for gpu, row in enumerate(topology.links))


def test_nvlinks_are_read_from_the_matrix_of_nvidia_smi() -> None:
    assert checkup.parse_nvlinks(TOPOLOGY) == {(0, 1): "NV18", (1, 0): "NV18", (1, 2): "NV4", (2, 1): "NV4"}
    assert checkup.parse_nvlinks("") == {}


def test_the_cache_is_measured_and_its_privacy_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "kernels"
    monkeypatch.setenv("MOECOMM_CACHE_DIR", str(place))
    assert checkup.doctor().cache == checkup.Cache(place, 0, True)
    place.mkdir(mode=0o700)
    (place / "a").write_bytes(b"x" * 1000)
    (place / "below").mkdir(mode=0o700)
    (place / "below" / "b").write_bytes(b"x" * 234)
    assert checkup.doctor().cache == checkup.Cache(place, 1234, True)
    assert f"kernel cache: {place} (0.0 MiB, private)" in str(checkup.doctor())
    place.chmod(0o755)
    assert not checkup.doctor().cache.private
    assert "NOT private" in str(checkup.doctor())


def test_the_command_says_the_same_without_swallowing_brackets(capfd: pytest.CaptureFixture[str]) -> None:
    report = checkup.Report(
        [checkup.BackendReport("host", ""), checkup.BackendReport("gin", "pip install 'moecomm[cu13]'")],
        {"torch": "2.13.0", "NCCL": None},
        checkup.Topology(2, 1, ["H200", "H200"], [["X", "NV18"], ["NV18", "X"]]),
        checkup.Cache(Path("/c"), 3 << 20, True),
    )
    cli.show_doctor(report, Console())
    assert capfd.readouterr().out.splitlines() == [
        "host     can run",
        "gin      can't run: pip install 'moecomm[cu13]'",
        "",
        "torch          2.13.0",
        "NCCL           not installed",
        "",
        "2 core(s), 1 NUMA node(s), 2 GPU(s)",
        "  GPU 0  H200                         X  NV18",
        "  GPU 1  H200                      NV18     X",
        "",
        "kernel cache: /c (3.0 MiB, private)",
    ]
