"""A report of the backends that can run here and of what the rest lack: moecomm.doctor() and `moecomm doctor`."""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import stat
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from moecomm import backends, config, shims
from moecomm.backends import gin, nic
from moecomm.errors import Unsupported
from moecomm.gpu import linking, loader, tuning
from moecomm.integrations import doors

BACKENDS = ("host", "lsa", "gin", "nvshmem")
MULTICAST = "off: no kernel of moecomm uses it, and a rank that dies in it takes other ranks with it"
_PACKAGES = {  # name in the report: distributions that provide it; the first installed one counts
    "moecomm": ("moecomm",),
    "torch": ("torch",),
    "NCCL": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    "nccl4py": ("nccl4py",),
    "NVSHMEM": ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12"),
    "nvshmem4py": ("nvshmem4py-cu13", "nvshmem4py-cu12"),
    "cuda.core": ("cuda-core",),
    "cuda.bindings": ("cuda-bindings",),
    "NVRTC": ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
    "nvJitLink": ("nvidia-nvjitlink", "nvidia-nvjitlink-cu12"),
}


@dataclass(frozen=True)
class BackendReport:
    """The state of one backend.

    Attributes:
        name: "host", "lsa", "gin" or "nvshmem".
        missing: the first thing missing, as a sentence a user can act on; empty if the backend can run.
        note: if the backend can run, how it puts to ranks of other domains here, or why it cannot; may be empty.
    """

    name: str
    missing: str
    note: str = ""

    @property
    def can_run(self) -> bool:
        """True if a Buffer can be opened with this backend here."""
        return not self.missing

    @property
    def verdict(self) -> str:
        """The text that follows "can run" or "can't run": the missing thing or the note."""
        said = self.missing or self.note
        return f": {said}" if said else ""


@dataclass(frozen=True)
class Topology:
    """Cores, NUMA nodes and GPUs of this machine.

    `links[i][j]` says how GPU i reaches GPU j: "NV18" (18 NVLinks), "P2P", "-" (not by load and store), "X" (itself).
    """

    cores: int
    numa_nodes: int
    gpus: list[str]
    links: list[list[str]]


@dataclass(frozen=True)
class Cache:
    """The cache of compiled kernels.

    Attributes:
        path: its folder.
        nbytes: size of its files.
        private: true if only this user can access it, also before it exists.
        unusable: why no kernel can be kept there; empty if kernels can.
    """

    path: Path
    nbytes: int
    private: bool
    unusable: str = ""


@dataclass(frozen=True)
class Report:
    """The result of doctor()."""

    backends: list[BackendReport]
    versions: dict[str, str | None]  # None: not installed
    topology: Topology
    cache: Cache
    tables: dict[str, str] = field(default_factory=dict)  # by the name of a GPU: where its tuning table comes from
    multicast: str = MULTICAST  # over NVLink; the same on every machine
    engines: dict[str, str] = field(default_factory=dict)  # by name and version: how moecomm comes into it

    def details(self) -> str:
        """Return all but backends as text."""
        versions = [f"{name:<14} {version or 'not installed'}" for name, version in self.versions.items()]
        place, cache = self.topology, self.cache
        shown = [*versions, "", f"{place.cores} core(s), {place.numa_nodes} NUMA node(s), {len(place.gpus)} GPU(s)"]
        for index, gpu in enumerate(place.gpus):
            shown.append(f"  GPU {index}  {gpu:<24} {' '.join(f'{link:>5}' for link in place.links[index])}")
        shown.append(f"NVLink multicast: {self.multicast}")
        private = "private" if cache.private else f"NOT private: others can reach it; run: chmod -R go-rwx {cache.path}"
        what = f"{cache.nbytes / 2**20:.1f} MiB, {private}"
        if cache.unusable:
            what = f"NOT in use, every process compiles: {cache.unusable}"
        tables = [f"tuning table of {gpu}: {table}" for gpu, table in self.tables.items()]
        engines = [f"moecomm in {engine}: {way}" for engine, way in self.engines.items()]
        shown += ["", f"kernel cache: {cache.path} ({what})", *tables, *engines]
        return "\n".join(shown)

    def json(self) -> str:
        """Return the report as a JSON object."""
        found = asdict(self)
        for entry, backend in zip(found["backends"], self.backends, strict=True):
            entry["can_run"] = backend.can_run
        found["cache"]["path"] = str(self.cache.path)
        return json.dumps(found, indent=1)

    def __str__(self) -> str:
        verdicts = [f"{b.name:<8} {'can run' if b.can_run else 'cannot run'}{b.verdict}" for b in self.backends]
        return "\n".join([*verdicts, "", self.details()])


def doctor() -> Report:
    """Report which backends can run here. Changes nothing and runs no kernel."""
    topology = _topology()
    return Report(
        [_backend(name) for name in BACKENDS],
        _versions(),
        topology,
        _cache(config.cache_dir()),
        {gpu: tuning.source(gpu) for gpu in sorted(set(topology.gpus))},
        engines=doors.ways(),
    )


def _backend(name: str) -> BackendReport:
    missing = backends.missing(name)
    return BackendReport(name, missing, _between_domains(name) if name in shims.NAMES and not missing else "")


def _between_domains(name: str) -> str:
    """Say how a backend that can run here puts to ranks of other domains.

    Inside one domain the backend runs the kernels of lsa, which need no linking. A link failure therefore rules out
    only multi-domain Buffers.
    """
    arch = loader.architecture(torch.cuda.get_device_capability())
    try:
        linking.inputs(gin.wanted_shim() if name == "gin" else name, arch)
    except Unsupported as error:
        # NVSHMEM's ranks that share memory take the kernels of lsa between domains, too.
        return f"Not between domains{'' if name == 'gin' else ' that do not share memory'}: {error}"
    if nic.has_rdma():
        return "between domains through the NIC; we have not run it"
    if name == "gin":
        return "between domains through moecomm's RMA plugin, because there is no RDMA NIC here"
    return "between domains of this host alone, over NVLink, because there is no RDMA NIC here"


def _versions() -> dict[str, str | None]:
    return {
        "Python": platform.python_version(),
        **{name: installed(name) for name in _PACKAGES},
        "torch's CUDA": torch.version.cuda,
        "NVIDIA driver": _driver(),
    }


def installed(name: str) -> str | None:
    """Return the version of a package, by its name in the report; None if it is missing. Imports nothing."""
    for package in _PACKAGES[name]:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return None


def _driver() -> str | None:
    """Read the driver version from /proc; without that file (WSL) only the presence of libcuda is known."""
    proc = Path("/proc/driver/nvidia/version")
    if proc.exists() and (match := re.search(r"\b(\d{3,}\.\d+(\.\d+)?)\b", proc.read_text())):
        return match[1]
    return "there, version unknown" if ctypes.util.find_library("cuda") else None


def _topology() -> Topology:
    nodes = [p for p in Path("/sys/devices/system/node").glob("node*") if p.name[4:].isdigit()]
    count = torch.cuda.device_count()
    gpus = [torch.cuda.get_device_properties(gpu).name for gpu in range(count)]
    return Topology(len(os.sched_getaffinity(0)), max(1, len(nodes)), gpus, _links(count))


def _links(count: int) -> list[list[str]]:
    nvlinks = _nvlinks() if count > 1 else {}

    def link(a: int, b: int) -> str:
        if a == b:
            return "X"
        if not torch.cuda.can_device_access_peer(a, b):
            return "-"
        return nvlinks.get((a, b), "P2P")

    return [[link(a, b) for b in range(count)] for a in range(count)]


def _nvlinks() -> dict[tuple[int, int], str]:
    """Return the NVLinks between GPUs in nvidia-smi's numbering (ignores CUDA_VISIBLE_DEVICES); empty on failure."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    try:
        asked = subprocess.run([program, "topo", "-m"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_nvlinks(asked.stdout)


def parse_nvlinks(matrix: str) -> dict[tuple[int, int], str]:
    """Parse the output of `nvidia-smi topo -m` to {(0, 1): "NV18", ...}."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", matrix)
    links = {}
    for row in re.finditer(r"^\s*GPU(\d+)\s+(.*)$", plain, re.MULTILINE):
        if row[2].lstrip().startswith("GPU"):
            continue  # the header line
        for column, cell in enumerate(row[2].split()):
            if re.fullmatch(r"NV\d+", cell):
                links[int(row[1]), column] = cell
    return links


def _cache(path: Path) -> Cache:
    try:
        unusable = "" if stat.S_ISDIR(path.stat().st_mode) else "it is no directory"
    except FileNotFoundError:
        return Cache(path, 0, True)
    except OSError as error:
        unusable = error.strerror or str(error)
    if unusable:
        return Cache(path, 0, True, unusable)
    states = []
    for file in [path, *path.rglob("*")]:
        with contextlib.suppress(FileNotFoundError):  # another process is compiling
            states.append(file.lstat())
    private = all(s.st_uid == os.geteuid() and not (stat.S_ISDIR(s.st_mode) and s.st_mode & 0o077) for s in states)
    return Cache(path, sum(s.st_size for s in states if stat.S_ISREG(s.st_mode)), private)
