"""The native module, the RMA plugin and the headers that the package ships; everything else is in pyproject.toml."""

from __future__ import annotations

from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import Extension, find_packages, setup

ROOT = Path(__file__).parent

# Headers that kernels are compiled from at run time.  They live in csrc/ and are installed as moecomm/csrc/.
HEADERS = [f"moecomm.csrc.{folder}" for folder in ("protocol", "device", "dispatch", "combine", "bench")]


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
    cmdclass={"build_ext": Build},
)
