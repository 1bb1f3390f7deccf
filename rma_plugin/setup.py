"""The plugin as a plain shared library.  pip builds it in a checkout, because some sources are in csrc/ beside it."""

from __future__ import annotations

import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent
os.chdir(HERE)  # setuptools wants sources relative to it

plugin = Extension(
    "moecomm_rma.libmoecomm_rma",
    [*sorted(str(path.relative_to(HERE)) for path in HERE.glob("src/*.cpp")), "../csrc/runtime/fd_socket.cpp"],
    include_dirs=["src", "../csrc"],
    language="c++",
    depends=["setup.py", *sorted(str(path.relative_to(HERE)) for path in HERE.glob("src/*.h"))],
    # It takes bytes from other processes.  The interpreter's own flags may set another level of FORTIFY_SOURCE.
    extra_compile_args=[
        *("-std=c++17", "-O2", "-g0", "-Wall", "-Wextra", "-fvisibility=hidden"),
        *("-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"),
    ],
    extra_link_args=[
        *("-pthread", "-ldl", "-Wl,-z,relro,-z,now,-z,noexecstack"),
        "-Wl,--version-script=src/exports.map",
    ],
)


class Build(build_ext):
    """Builds it under the name that NCCL is given, without the tag of a Python version."""

    def get_ext_filename(self, name: str) -> str:
        """Return the path of an extension in the package."""
        return name.replace(".", "/") + ".so"


setup(packages=["moecomm_rma"], ext_modules=[plugin], cmdclass={"build_ext": Build})
