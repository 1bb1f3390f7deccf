"""The doctor's findings, each against the thing it speaks of."""

from __future__ import annotations

import importlib.metadata
import json
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
from moecomm import backends, rma_plugin, shims
from moecomm.backends import lsa, nic
from moecomm.gpu import cuda_driver, linking
from moecomm.tools import cli, doctor

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

    def inputs(transport: str, arch: str) -> None:
        assert transport in ("gin" if rdma else "gin_proxy", "nvshmem") and arch == "sm_90a"
        if shim:
            raise moecomm.Unsupported(shim)

    monkeypatch.setattr(backends, "missing", lambda name: lacks)
    monkeypatch.setattr(nic, "has_rdma", lambda: rdma)
    monkeypatch.setattr(linking, "inputs", inputs)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    lines = str(doctor.doctor()).splitlines()[1:4]
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}


NIC = "can run: between domains through the NIC; we have not run it"
PROXY = "can run: between domains through moecomm's RMA plugin, because there is no RDMA NIC here"
FAR = "can run: Not between domains: "
FAR_BY_NVSHMEM = "can run: Not between domains that do not share memory: "
INSIDE = "can run: between domains of this host alone, over NVLink, because there is no RDMA NIC here"


def test_one_true_sentence_for_each_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdicts(monkeypatch, rdma=True) == {"lsa": "can run", "gin": NIC, "nvshmem": NIC}
    assert verdicts(monkeypatch, rdma=False) == {"lsa": "can run", "gin": PROXY, "nvshmem": INSIDE}
    unlinked = [far + "It was not built." for far in (FAR, FAR_BY_NVSHMEM)]
    for rdma in (False, True):
        found = verdicts(monkeypatch, rdma=rdma, shim="It was not built.")
        assert found == {"lsa": "can run", "gin": unlinked[0], "nvshmem": unlinked[1]}
        for shim in ("", "No shim."):
            found = verdicts(monkeypatch, rdma=rdma, lacks="no GPU", shim=shim)
            assert found == dict.fromkeys(("lsa", "gin", "nvshmem"), "cannot run: no GPU")


class Machine:
    """With such GPUs and libraries; "": not installed."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place, self.patch = place, monkeypatch

    def verdicts(
        self,
        *,
        nccl: str = "2.30.7",
        nvshmem: str = "3.4.5",
        rdma: bool = False,
        shim: str = "",
        capability: tuple[int, int] = (9, 0),
        linker: tuple[int, int] | None = (13, 4),
    ) -> dict[str, str]:
        """The lines of the doctor about backends of GPUs.  `shim`: which was not built."""
        for package, version in (("nccl", nccl), ("nvshmem", nvshmem)):
            core = ModuleType(f"{package}.core")
            core.__version__, core.LibraryInfo = "0.6.0", object  # type: ignore[attr-defined]
            library = SimpleNamespace(version=Version(version or "0"), path="/lib/libnccl.so.2")
            found = SimpleNamespace(libnccl=library, libnvshmem_version=version)
            core.get_version = lambda found=found: found  # type: ignore[attr-defined]
            outer = ModuleType(package)
            outer.core = core  # type: ignore[attr-defined]
            self.patch.setitem(sys.modules, package, outer)
            self.patch.setitem(sys.modules, f"{package}.core", core if version else None)
        self.patch.setattr(lsa, "missing", lambda: "")
        self.patch.setattr(torch.cuda, "current_device", lambda: 0)
        self.patch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        self.patch.setattr(cuda_driver, "attribute", lambda name, device: 1)
        self.patch.setattr(nic, "has_rdma", lambda: rdma)
        self.patch.setattr(rma_plugin, "path", lambda: Path("libmoecomm_rma.so"))
        self._link(nvshmem, shim, linker)
        lines = str(doctor.doctor()).splitlines()[1:4]
        return {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}

    def _link(self, nvshmem: str, not_built: str, linker: tuple[int, int] | None) -> None:
        """Replace what moecomm.gpu.linking finds."""
        headers = {"gin": "NCCL 2.30.7", "gin_proxy": "NCCL 2.30.7", "nvshmem": "NVSHMEM 3.4.5"}
        missing = {not_built: f"The {not_built} shim was not built."}

        def find(name: str) -> shims.Shim:
            return shims.Shim(name, Path(), missing.get(name, ""), "sm_90a", (13, 0), headers[name])

        self.patch.setattr(shims, "find", find)
        library, manifest = self.place / "lib/libnvshmem_device.a", self.place / "include/non_abi/nvshmem_version.h"
        for file in (library, manifest):
            file.parent.mkdir(parents=True, exist_ok=True)
        library.touch()
        parts = zip(("MAJOR", "MINOR", "PATCH"), nvshmem.split("."), strict=False)
        manifest.write_text("".join(f"#define NVSHMEM_VENDOR_{part}_VERSION {number}\n" for part, number in parts))
        self.patch.setattr(linking, "wheels", lambda _: [self.place])
        self.patch.setattr(linking, "nvrtc_version", lambda: (13, 3))
        found = ModuleType("cuda.bindings.nvjitlink")
        found.version = lambda: linker  # type: ignore[attr-defined]
        self.patch.setitem(sys.modules, "cuda.bindings.nvjitlink", found if linker else None)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("here", "gin", "nvshmem"),
    [
        ({}, PROXY, INSIDE),
        ({"rdma": True}, NIC, NIC),
        ({"nccl": ""}, r"cannot run: nccl4py can't be imported \(.*\); pip install 'nccl4py==0\.6\.\*'", INSIDE),
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
            NIC,
        ),
        ({"nvshmem": ""}, PROXY, r"cannot run: nvshmem4py can't be imported \(.*\); pip install nvshmem4py-cu13"),
        (
            {"nvshmem": "3.3.20"},
            PROXY,
            "cannot run: NVSHMEM 3.3.20 is loaded and 3.4.5 is wanted; pip install 'nvidia-nvshmem-cu13>=3.4.5'",
        ),
        ({"shim": "gin_proxy"}, "cannot run: The gin_proxy shim was not built.", INSIDE),
        ({"shim": "gin"}, PROXY, INSIDE),
        ({"shim": "gin", "rdma": True}, "cannot run: The gin shim was not built.", NIC),
        ({"shim": "nvshmem"}, PROXY, FAR_BY_NVSHMEM + "The nvshmem shim was not built."),
        (
            {"nvshmem": "3.5.19"},
            PROXY,
            FAR_BY_NVSHMEM + "The nvshmem shim was compiled for NVSHMEM 3.4.5, and NVSHMEM 3.5.19 is installed: "
            "run python -m moecomm.shims.build, or install that version.",
        ),
        ({"nvshmem": "3.4.7"}, PROXY, INSIDE),
        (
            {"capability": (10, 0)},
            FAR + "The gin_proxy shim was compiled for sm_90a; kernels here are sm_100.",
            FAR_BY_NVSHMEM + "The nvshmem shim was compiled for sm_90a; kernels here are sm_100.",
        ),
        (
            {"linker": None, "rdma": True},
            FAR + r"Kernels with a shim are linked by nvJitLink, which is not installed \(.*\).",
            FAR_BY_NVSHMEM + r"Kernels with a shim are linked by nvJitLink, which is not installed \(.*\).",
        ),
        (
            {"linker": (13, 1)},
            FAR + "nvJitLink 13.1 can't read what NVRTC, for kernels, wrote: that is 13.3; "
            "want nvJitLink 13.3 or a later 13.x.",
            FAR_BY_NVSHMEM + "nvJitLink 13.1 can't read what NVRTC, for kernels, wrote: that is 13.3; "
            "want nvJitLink 13.3 or a later 13.x.",
        ),
    ],
)
def test_what_a_machine_with_gpus_lacks_is_said_of_the_backend_that_wants_it(
    machine: Machine, here: dict[str, Any], gin: str, nvshmem: str
) -> None:
    found = machine.verdicts(**here)
    assert found["lsa"] == "can run"
    assert re.fullmatch(gin, found["gin"]), found
    assert re.fullmatch(nvshmem, found["nvshmem"]), found


def test_wheels_are_those_of_the_cuda_of_torch(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for cuda, wheels in (("12.8", "cu12"), ("13.0", "cu13")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        found = machine.verdicts(nccl="2.28.9", nvshmem="3.3.20")
        assert found["gin"].endswith(f"; pip install 'nvidia-nccl-{wheels}>=2.30.7'")
        assert found["nvshmem"].endswith(f"; pip install 'nvidia-nvshmem-{wheels}>=3.4.5'")
        assert machine.verdicts(nccl="2.30.3")["gin"].endswith(f"; pip install 'nvidia-nccl-{wheels}>=2.30.7'")
        assert machine.verdicts(nvshmem="")["nvshmem"].endswith(f"; pip install nvshmem4py-{wheels}")


def test_a_driver_that_is_too_old_and_a_compiler_that_is_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pathfinder = pytest.importorskip("cuda.pathfinder")
    bindings = pytest.importorskip("cuda.bindings")
    pytest.importorskip("cuda.core")  # which a CUDA build of torch does not bring
    monkeypatch.setattr(lsa, "_missing_gpu", lambda: "")
    monkeypatch.setattr(bindings, "__version__", "13.1.0")
    monkeypatch.setattr(cuda_driver, "call", lambda name: 12090)
    too_old = (
        "the driver is of CUDA 12, too old for cuda-bindings 13.1.0; update the driver or pip install 'moecomm[cu12]'"
    )
    assert lsa.missing() == too_old
    monkeypatch.setattr(cuda_driver, "call", lambda name: 13000)

    def gone(name: str) -> None:
        raise RuntimeError(name)

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", gone)
    for cuda, extra in (("12.8", "cu12"), ("13.0", "cu13")):  # that of torch
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert lsa.missing() == (
            f"libnvrtc, which compiles the kernels, is not installed; pip install 'moecomm[{extra}]'"
        )
    lines = str(doctor.doctor()).splitlines()[1:4]
    assert all("cannot run: libnvrtc, which compiles the kernels, is not installed" in line for line in lines)


def test_versions_are_those_installed() -> None:
    versions = doctor.doctor().versions
    assert versions["Python"] == ".".join(map(str, sys.version_info[:3]))
    assert versions["torch"] == importlib.metadata.version("torch")
    assert versions["torch's CUDA"] == torch.version.cuda
    installed = {d.metadata["Name"].lower() for d in importlib.metadata.distributions()}
    for name, packages in doctor._PACKAGES.items():
        assert (versions[name] is None) == installed.isdisjoint(packages), name


def test_topology() -> None:
    topology = doctor.doctor().topology
    assert topology.cores == len(os.sched_getaffinity(0))
    assert topology.numa_nodes >= 1
    assert len(topology.gpus) == torch.cuda.device_count() == len(topology.links)
    assert all(row[gpu] == "X" for gpu, row in enumerate(topology.links))


def test_nvlinks_are_read_from_the_matrix_of_nvidia_smi() -> None:
    assert doctor.parse_nvlinks(TOPOLOGY) == {(0, 1): "NV18", (1, 0): "NV18", (1, 2): "NV4", (2, 1): "NV4"}
    assert doctor.parse_nvlinks("") == {}


def test_the_cache_is_measured_and_its_privacy_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "kernels"
    monkeypatch.setenv("MOECOMM_CACHE_DIR", str(place))
    assert doctor.doctor().cache == doctor.Cache(place, 0, True)
    place.mkdir(mode=0o700)
    (place / "a").write_bytes(b"x" * 1000)
    (place / "below").mkdir(mode=0o700)
    (place / "below" / "b").write_bytes(b"x" * 234)
    assert doctor.doctor().cache == doctor.Cache(place, 1234, True)
    assert f"kernel cache: {place} (0.0 MiB, private)" in str(doctor.doctor())
    place.chmod(0o755)
    assert not doctor.doctor().cache.private
    assert "NOT private" in str(doctor.doctor())


@pytest.mark.parametrize(
    ("below", "why"), [("", "it is no directory"), ("/kernels", "Not a directory"), ("x" * 300, "File name too long")]
)
def test_a_cache_that_nothing_can_be_kept_in_is_named(
    below: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("a file")
    place = Path(f"{tmp_path}/file{below}")
    monkeypatch.setenv("MOECOMM_CACHE_DIR", str(place))
    assert doctor.doctor().cache == doctor.Cache(place, 0, True, why)
    assert f"kernel cache: {place} (NOT in use, every process compiles: {why})" in str(doctor.doctor())


def test_the_command_says_the_same_without_swallowing_brackets(capfd: pytest.CaptureFixture[str]) -> None:
    report = doctor.Report(
        [doctor.BackendReport("host", ""), doctor.BackendReport("gin", "pip install 'moecomm[cu13]'")],
        {"torch": "2.13.0", "NCCL": None},
        doctor.Topology(2, 1, ["H200", "H200"], [["X", "NV18"], ["NV18", "X"]]),
        doctor.Cache(Path("/c"), 3 << 20, True),
        {"H200": "shipped"},
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
        f"NVLink multicast: {doctor.MULTICAST}",
        "",
        "kernel cache: /c (3.0 MiB, private)",
        "tuning table of H200: shipped",
    ]


def test_json_has_all_that_people_are_shown(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["moecomm", "doctor", "--json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    found, report = json.loads(capfd.readouterr().out), doctor.doctor()
    assert ended.value.code == 0
    assert list(found) == ["backends", "versions", "topology", "cache", "tables", "multicast", "engines"]
    assert found["backends"] == [
        {"name": b.name, "missing": b.missing, "note": b.note, "can_run": b.can_run} for b in report.backends
    ]
    assert found["versions"] == report.versions
    assert found["topology"] == vars(report.topology) and found["multicast"] == report.multicast
    assert found["tables"] == report.tables and set(report.tables) == set(report.topology.gpus)
    assert found["cache"] == {**vars(report.cache), "path": str(report.cache.path)}
