"""The native module, the device shims and the headers of the package; the rest is in pyproject.toml."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import ClassVar

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import Command, find_packages, setup
from setuptools.command.build import build
from setuptools.errors import PlatformError

ROOT = Path(__file__).parent

# Headers that kernels are compiled from at run time.  They live in csrc/ and are installed as moecomm/csrc/.
HEADERS = [
    f"moecomm.csrc.{path.relative_to(ROOT / 'csrc').as_posix().replace('/', '.')}"
    for path in sorted(
        {header.parent for header in (ROOT / "csrc").rglob("*.cuh")} | {ROOT / "csrc/protocol", ROOT / "csrc/shims"}
    )
]


SHIMS = "moecomm/shims/build.py"

# It takes bytes from other processes.  The interpreter's own flags may set another level of FORTIFY_SOURCE.
HARDENED = ["-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"]
HARDENED_LINK = ["-Wl,-z,relro,-z,now,-z,noexecstack"]


def sources(*patterns: str) -> list[str]:
    """Sources in csrc/, relative to the root as setuptools wants them."""
    return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in (ROOT / "csrc").glob(pattern))


native = Pybind11Extension(
    "moecomm._native",
    sources("bindings/*.cpp", "runtime/*.cpp", "host/**/*.cpp"),
    include_dirs=["csrc"],
    cxx_std=17,
    # No contraction of a * b + c: sums must have the same bits on CPUs and GPUs.
    extra_compile_args=[
        "-O3",
        "-Wall",
        "-Wextra",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fvisibility=hidden",
        *HARDENED,
    ],
    extra_link_args=["-pthread", "-ldl", *HARDENED_LINK],
    # This file as well: its flags are part of what is built.
    depends=["setup.py", "csrc/bindings/fields.py", *sources("**/*.h")],
)


class Build(build_ext):
    """Builds the native module, and beside it stubs for type checkers."""

    def run(self) -> None:
        """Write that of the module in a process of its own: a sanitized module ends any other process."""
        super().run()
        module = Path(self.get_ext_fullpath(native.name))
        stub = script("signatures.py").written(ROOT / "moecomm")
        (module.parent / "buffer").mkdir(parents=True, exist_ok=True)
        (module.parent / "buffer/overloads.pyi").write_text(stub, encoding="utf-8")
        command = [sys.executable, "csrc/bindings/stub.py", module, module.parent / "_native.pyi"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        if done.returncode:
            self.announce(f"moecomm/_native.pyi is not written: {done.stderr}", level=4)
        if not self.inplace:
            self.copy_extensions_to_source()  # Python started in this folder imports its moecomm, not the installed one

    def build_extensions(self) -> None:
        """Name what to install before the first command fails.  Older setuptools compile C++ with the C compiler."""
        tools = dict.fromkeys((self.compiler.compiler_so[0], self.compiler.compiler_cxx[0]))
        missing = [f"{tool} is not on PATH" for tool in tools if shutil.which(tool) is None]
        header = Path(sysconfig.get_path("include"), "Python.h")
        if not header.is_file():
            missing.append(f"{header} does not exist")
        if missing:
            raise PlatformError(
                f"moecomm needs a C++17 compiler and the headers of Python: {', '.join(missing)}.\n"
                "Debian, Ubuntu: apt install g++ python3-dev.  Fedora, RHEL: dnf install gcc-c++ python3-devel.\n"
                "A compiler of another name: set CC and CXX."
            )
        generated = Path(self.build_temp, "generated")
        script("csrc/bindings/fields.py").write(ROOT / "csrc", generated / "moecomm_fields.h")
        native.include_dirs.append(str(generated))
        super().build_extensions()


def script(path: str) -> ModuleType:
    """A module of this tree, without moecomm, which wants torch."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def version() -> str:
    """The version in pyproject.toml, without tomllib, which Python 3.10 lacks."""
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return found[1]


class BuildShims(Command):
    """The device shims, where nvcc and headers are: moecomm/shims/build.py.

    A build in an environment of its own sees no wheels but those that it asked for: pip install --no-build-isolation.
    """

    description = "compile the device shims of the gin and nvshmem backends"
    user_options: ClassVar = [("build-lib=", "d", "directory that moecomm/shims is made in")]
    editable_mode = False  # set by setuptools

    def initialize_options(self) -> None:
        """As setuptools wants it."""
        self.build_lib: str | None = None

    def finalize_options(self) -> None:
        """As setuptools wants it."""
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        """Never fails: what could not be built is said, now and by moecomm."""
        homes = {
            name: os.environ[f"{name}_HOME"] for name in ("CUDA", "NCCL", "NVSHMEM") if f"{name}_HOME" in os.environ
        }
        for shim, why in script(SHIMS).build(self._into(), ROOT / "csrc", homes).items():
            self.announce(f"the {shim} shim is not built: {why}", level=4)

    def get_source_files(self) -> list[str]:
        """Return the files that a source distribution needs."""
        return sources("shims/*")

    def get_outputs(self) -> list[str]:
        """Return the files that may be made."""
        names = ("built.json", *(f"{shim}.fatbin" for shim in script(SHIMS).SHIMS))
        return [str(self._into() / name) for name in names]

    def get_output_mapping(self) -> dict[str, str]:
        """Nothing of it is a copy of a source."""
        return {}

    def _into(self) -> Path:
        return (ROOT if self.editable_mode else Path(str(self.build_lib))) / "moecomm" / "shims"


build.sub_commands = [*build.sub_commands, ("build_shims", None)]
ParallelCompile().install()

page = script("package_page.py")
about = (os.environ.get("MOECOMM_REPOSITORY", ""), version())

setup(
    long_description=page.description((ROOT / "README.md").read_text(encoding="utf-8"), *about),
    long_description_content_type="text/markdown",
    project_urls=page.urls(*about),
    packages=[*find_packages(include=["moecomm", "moecomm.*", "moecomm_bench", "moecomm_bench.*"]), *HEADERS],
    package_dir={"moecomm": "moecomm", "moecomm.csrc": "csrc"},
    package_data={
        "moecomm": ["py.typed", "*.pyi"],
        "moecomm.buffer": ["*.pyi"],
        "moecomm_bench.simulate": ["*.json"],
        "moecomm.gpu.tuning": ["*.json"],
        **{package: ["*.h", "*.cuh", "*.cu"] for package in HEADERS},  # shims may be compiled later
    },
    ext_modules=[native],
    cmdclass={"build_ext": Build, "build_shims": BuildShims},
)
