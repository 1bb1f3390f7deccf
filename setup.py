"""The native module and the headers that the package ships; everything else is in pyproject.toml."""

from __future__ import annotations

from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import find_packages, setup

ROOT = Path(__file__).parent

# Headers that kernels are compiled from at run time.  They live in csrc/ and are installed as moecomm/csrc/.
HEADERS = [f"moecomm.csrc.{folder}" for folder in ("protocol", "device", "dispatch", "combine", "bench")]


def sources() -> list[str]:
    """All translation units of moecomm._native, relative to the root as setuptools wants them."""
    patterns = ("bindings*.cpp", "runtime/*.cpp", "host/*.cpp")
    return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in (ROOT / "csrc").glob(pattern))


native = Pybind11Extension(
    "moecomm._native",
    sources(),
    include_dirs=["csrc"],
    cxx_std=17,
    # No contraction of a * b + c: sums must have the same bits on CPUs and GPUs.
    extra_compile_args=["-O3", "-Wall", "-Wextra", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"],
    extra_link_args=["-pthread", "-ldl"],
    depends=sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.h")),
)

ParallelCompile().install()

setup(
    packages=[*find_packages(include=["moecomm", "moecomm.*"]), *HEADERS],
    package_dir={"moecomm": "moecomm", "moecomm.csrc": "csrc"},
    package_data={
        "moecomm": ["py.typed", "*.pyi"],
        "moecomm.tuning": ["*.json"],
        **{package: ["*.h", "*.cuh"] for package in HEADERS},
    },
    ext_modules=[native],
    cmdclass={"build_ext": build_ext},
)
