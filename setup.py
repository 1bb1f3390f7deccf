"""The native module, the RMA plugin, the device shims and the headers of the package; the rest is in pyproject.toml."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import ClassVar

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import Command, Extension, find_packages, setup
from setuptools.command.build import build

ROOT = Path(__file__).parent

# Headers that kernels are compiled from at run time.  They live in csrc/ and are installed as moecomm/csrc/.
HEADERS = [f"moecomm.csrc.{folder}" for folder in ("protocol", "device", "dispatch", "combine", "shims", "bench")]


PLUGIN = "moecomm.libmoecomm_rma"


def sources(*patterns: str) -> list[str]:
    """Translation units in csrc/, relative to the root as setuptools wants them."""
    return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in (ROOT / "csrc").glob(pattern))


native = Pybind11Extension(
    "moecomm._native",
    sources("bindings*.cpp", "runtime/*.cpp", "host/*.cpp"),
    include_dirs=["csrc"],
    cxx_std=17,
    # No contraction of a * b + c: sums must have the same bits on CPUs and GPUs.
    extra_compile_args=["-O3", "-Wall", "-Wextra", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"],
    extra_link_args=["-pthread", "-ldl"],
    depends=sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.h")),
)

# What NCCL loads: a plain shared library, of which Python only needs to know where it is.
plugin = Extension(
    PLUGIN,
    sources("rma_plugin/*.cpp", "runtime/fd_socket.cpp"),
    include_dirs=["csrc"],
    language="c++",
    extra_compile_args=["-std=c++17", "-O2", "-g0", "-Wall", "-Wextra", "-fvisibility=hidden"],
    extra_link_args=["-pthread", "-ldl", "-Wl,--version-script=csrc/rma_plugin/exports.map"],
    depends=native.depends,
)


class Build(build_ext):
    """Builds the plugin beside the native module, under the name that NCCL is given: no Python in it."""

    def get_ext_filename(self, name: str) -> str:
        """Without the tag of a Python version for the plugin."""
        if name.rpartition(".")[2] == PLUGIN.rpartition(".")[2]:
            return name.replace(".", "/") + ".so"
        return str(super().get_ext_filename(name))


class CannotBuild(Exception):
    """Why a shim is not built, as moecomm.shims says it after a colon."""


class BuildShims(Command):
    """csrc/shims/*.cu to LTO IR, into moecomm/shims/; where nvcc or headers are missing, that is written there instead.

    nvcc is that of CUDA_HOME, of the nvidia-cuda-nvcc wheel, of PATH or of /usr/local/cuda; headers are those of
    NCCL_HOME and NVSHMEM_HOME, of the wheels of NCCL and NVSHMEM, or of /usr.  A build in an environment of its own
    sees no wheels: pip install --no-build-isolation.
    """

    description = "compile the device shims of the gin and nvshmem backends"
    user_options: ClassVar = [
        ("build-lib=", "d", "directory that moecomm/shims is made in"),
        ("inplace", "i", "build beside the sources"),
    ]
    boolean_options: ClassVar = ["inplace"]
    editable_mode = False

    ARCH = "90a"
    # what is compiled, with which definitions, from whose headers, the oldest of them
    SHIMS: ClassVar = {
        "gin": ("gin.cu", [], "NCCL", (2, 30, 7)),
        "gin_proxy": ("gin.cu", ["-DNCCL_GIN_GDAKI_ENABLE=0", "-DNCCL_GIN_GPI_ENABLE=0"], "NCCL", (2, 30, 7)),
        "nvshmem": ("nvshmem.cu", [], "NVSHMEM", (3, 4, 5)),
    }
    # where a version stands, and the names of its three numbers
    VERSIONS: ClassVar = {
        "NCCL": ("nccl.h", "NCCL_MAJOR", "NCCL_MINOR", "NCCL_PATCH"),
        "NVSHMEM": (
            "non_abi/nvshmem_version.h",
            *(f"NVSHMEM_VENDOR_{part}_VERSION" for part in ("MAJOR", "MINOR", "PATCH")),
        ),
    }

    def initialize_options(self) -> None:
        """As setuptools wants it."""
        self.build_lib: str | None = None
        self.inplace = False

    def finalize_options(self) -> None:
        """As setuptools wants it."""
        self.set_undefined_options("build", ("build_lib", "build_lib"))
        self.inplace = self.inplace or self.editable_mode

    def get_source_files(self) -> list[str]:
        """What a source distribution needs."""
        return sources("shims/*")

    def get_outputs(self) -> list[str]:
        """What may be made."""
        return [str(self._into() / name) for name in ("built.json", *(f"{shim}.fatbin" for shim in self.SHIMS))]

    def get_output_mapping(self) -> dict[str, str]:
        """Nothing of it is a copy of a source."""
        return {}

    def run(self) -> None:
        """Each shim, or why it is not there; never fails."""
        into = self._into()
        into.mkdir(parents=True, exist_ok=True)
        for output in self.get_outputs():
            Path(output).unlink(missing_ok=True)
        told = {}
        for shim in self.SHIMS:
            try:
                told[shim] = self._compile(shim, into / f"{shim}.fatbin")
            except CannotBuild as why:
                told[shim] = {"missing": str(why)}
                self.announce(f"the {shim} shim is not built: {why}", level=4)
        (into / "built.json").write_text(json.dumps(told, indent=1) + "\n")

    def _into(self) -> Path:
        return (ROOT if self.inplace else Path(str(self.build_lib))) / "moecomm" / "shims"

    def _compile(self, shim: str, output: Path) -> dict[str, object]:
        source, defines, library, oldest = self.SHIMS[shim]
        include = self._headers(library)
        version = self._version(library, include)
        if version < oldest:
            raise CannotBuild(f"{library}'s headers in {include} are {dotted(version)}; want {dotted(oldest)} or later")
        nvcc = self._nvcc()
        arch = f"arch=compute_{self.ARCH},code=lto_{self.ARCH}"
        # NDEBUG: DOCA's and NVSHMEM's headers check arguments with a macro that traps.
        line = [nvcc, "-std=c++17", "-fatbin", "-dc", "-DNDEBUG", "-gencode", arch, *defines, "-I", str(include)]
        line += ["-o", str(output), str(ROOT / "csrc" / "shims" / source)]
        ran = subprocess.run(line, capture_output=True, text=True, check=False)
        if ran.returncode != 0:
            said = ran.stderr.strip().splitlines() or ["nothing"]
            first = next((line for line in said if "error" in line), said[-1])
            raise CannotBuild(f"{nvcc} failed and said {first.strip()!r}")
        return {
            "arch": f"sm_{self.ARCH}",
            "nvcc": self._nvcc_version(nvcc),
            "headers": f"{library} {dotted(version)}",
        }

    def _nvcc(self) -> str:
        homes = [*filter(None, [os.environ.get("CUDA_HOME")]), *installed("cu13", "cuda_nvcc")]
        candidates = [str(Path(home) / "bin" / "nvcc") for home in homes]
        candidates += [shutil.which("nvcc") or "", "/usr/local/cuda/bin/nvcc"]
        for candidate in candidates:
            if candidate and os.access(candidate, os.X_OK):
                return candidate
        raise CannotBuild("there was no nvcc (pip install nvidia-cuda-nvcc, or set CUDA_HOME)")

    def _nvcc_version(self, nvcc: str) -> list[int]:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
        if (found := re.search(r"release (\d+)\.(\d+)", said)) is None:
            raise CannotBuild(f"{nvcc} does not say which version it is")
        return [int(found[1]), int(found[2])]

    def _headers(self, library: str) -> Path:
        home = os.environ.get(f"{library}_HOME")
        homes = [Path(home)] if home else [*installed(library.lower()), Path("/usr")]
        for place in homes:
            if (place / "include" / self.VERSIONS[library][0]).is_file():
                return place / "include"
        where = f"in {homes[0]}" if home else f"(pip install nvidia-{library.lower()}-cu13, or set {library}_HOME)"
        raise CannotBuild(f"there were no headers of {library} {where}")

    def _version(self, library: str, include: Path) -> tuple[int, ...]:
        header, *names = self.VERSIONS[library]
        text = (include / header).read_text(errors="replace")
        found = [re.search(rf"#define\s+{name}\s+(\d+)", text) for name in names]
        if None in found:
            raise CannotBuild(f"{include / header} does not say which version it is")
        return tuple(int(number[1]) for number in found if number)


def dotted(version: tuple[int, ...]) -> str:
    """2.30.7"""
    return ".".join(map(str, version))


def installed(*names: str) -> list[Path]:
    """Where wheels of NVIDIA have put the libraries of these names."""
    package = importlib.util.find_spec("nvidia")
    places = package.submodule_search_locations or () if package else ()
    return [Path(place) / name for place in places for name in names if (Path(place) / name).is_dir()]


build.sub_commands = [*build.sub_commands, ("build_shims", None)]
ParallelCompile().install()

setup(
    packages=[*find_packages(include=["moecomm", "moecomm.*"]), *HEADERS],
    package_dir={"moecomm": "moecomm", "moecomm.csrc": "csrc"},
    package_data={
        "moecomm": ["py.typed", "*.pyi"],
        "moecomm.simulate": ["*.json"],
        "moecomm.tuning": ["*.json"],
        **{package: ["*.h", "*.cuh"] for package in HEADERS},
    },
    ext_modules=[native, plugin],
    cmdclass={"build_ext": Build, "build_shims": BuildShims},
)
