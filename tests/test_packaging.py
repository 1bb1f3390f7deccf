"""The sdist and the wheel: what they hold, and that each of them installs and runs without its repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

import moecomm

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(600)]

ROOT = Path(__file__).parent.parent
# What libstdc++ and the compiler call where glibc has it, and what older glibcs have under older versions.
YOUNGER = {"__libc_single_threaded", "dlopen", "dlsym", "fstat", "pthread_cond_clockwait", "pthread_sigmask"}
FILES = (
    "CHANGELOG.md",
    "LICENSE",
    "MANIFEST.in",
    "README.md",
    "package_page.py",
    "pyproject.toml",
    "setup.py",
    "signatures.py",
)
NATIVE = {".h", ".cuh", ".cpp", ".cu", ".map"}
KERNELS = {".h", ".cuh", ".cu"}


def run(
    *command: str | Path, cwd: Path, check: bool = True, **environment: str | None
) -> subprocess.CompletedProcess[str]:
    """A command in a folder, away from the repository; variables that are None are unset."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", *environment)}
    given = {name: value for name, value in environment.items() if value is not None}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**inherited, **given},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0 or not check, done.stdout[-10000:]
    return done


def new_environment(place: Path) -> Path:
    """The interpreter of a new virtual environment, without any package but pip."""
    run(sys.executable, "-m", "venv", place, cwd=place.parent)
    return place / "bin" / "python"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository as a checkout has it: nothing built, with tests."""
    tree = tmp_path_factory.mktemp("packaging") / "tree"
    ignored = shutil.ignore_patterns("*.so", "_native.pyi", "overloads.pyi", "*.fatbin", "built.json", "__pycache__")
    for folder in (".ci", "bench", "csrc", "docs", "examples", "moecomm", "moecomm_bench", "rma_plugin", "tests"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, tree)
    return tree


# Keeps each object under its command, without the folders of a build: the second build takes those of the first.
# Nothing is optimized: what packages hold is the same, and a build takes less time.
COMPILER = """#!/usr/bin/env sh
last= source= object=
for word; do
    case $last in -c) source=$word ;; -o) object=$word ;; esac
    last=$word
done
kept={kept}/$(printf '%s ' "$@" | sed 's/-I[^ ]*//g; s/-o [^ ]*//' | cksum | tr ' ' -)
if [ "$source" ] && [ -f "$kept" ]; then exec cp "$kept" "$object"; fi
{compiler} "$@" -O0 -U_FORTIFY_SOURCE || exit
if [ "$source" ]; then cp "$object" "$kept"; fi
"""


@pytest.fixture(scope="module", autouse=True)
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A quick compiler."""
    kept = tmp_path_factory.mktemp("objects")
    quick = tmp_path_factory.mktemp("compiler") / "quick"
    quick.write_text(COMPILER.format(kept=kept, compiler=shutil.which(os.environ.get("CXX", "g++"))))
    quick.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", str(quick))
        patch.setenv("CXX", str(quick))
        yield


@pytest.fixture(scope="module")
def built(tree: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run(tree / ".ci" / "package", "dist", cwd=tree.parent, PATH=path)
    (sdist,), (wheel,) = (tree.parent / "dist").glob("*.tar.gz"), (tree.parent / "dist").glob("*.whl")
    return sdist, wheel


def test_the_sdist_holds_what_is_built_from_and_no_tests(built: tuple[Path, Path], tree: Path) -> None:
    with tarfile.open(built[0]) as archive:
        held = {PurePosixPath(*PurePosixPath(entry.name).parts[1:]) for entry in archive if entry.isfile()}
    folders = {path.parts[0] for path in held if len(path.parts) > 1}
    assert folders == {"csrc", "docs", "examples", "moecomm", "moecomm.egg-info", "moecomm_bench", "rma_plugin"}
    native = {path.relative_to(tree) for path in (tree / "csrc").rglob("*") if path.suffix in NATIVE}
    assert {Path(path) for path in held if path.parts[0] == "csrc" and path.suffix in NATIVE} == native
    assert {Path(name) for name in FILES} <= {Path(path) for path in held}


def test_the_wheel_holds_the_package_and_the_headers_of_its_kernels(built: tuple[Path, Path], tree: Path) -> None:
    with zipfile.ZipFile(built[1]) as archive:
        held = {name: archive.read(name).decode() for name in archive.namelist() if Path(name).suffix in KERNELS}
        names = set(archive.namelist())
        said = archive.read(f"moecomm-{moecomm.__version__}.dist-info/METADATA").decode()
    about = f"moecomm-{moecomm.__version__}.dist-info"
    assert "Description-Content-Type: text/markdown" in said and "# moecomm" in said
    assert "](docs/" not in said and "](bench/" not in said  # lead nowhere on an index
    assert {name.split("/")[0] for name in names} == {"moecomm", "moecomm_bench", about}
    assert {name for name in names if re.search(r"(^|/)(tests|results)/|\.cpp$", name)} == set()
    packages = [path for package in ("moecomm", "moecomm_bench") for path in (tree / package).rglob("*")]
    assert {str(path.relative_to(tree)) for path in packages if path.suffix in (".py", ".json")} - names == set()
    assert {
        f"moecomm/{name}" for name in ("py.typed", "_native.pyi", "buffer/overloads.pyi")
    } <= names  # type checkers then use the package's types
    # Every kernel there is, and every header that a kernel includes, to the last.
    kernels = {f"moecomm/{path.relative_to(tree)}" for path in (tree / "csrc").rglob("*.cu*")}
    assert kernels - set(held) == set()
    included = {
        os.path.normpath(f"{Path(name).parent}/{header}")
        for name, text in held.items()
        for header in re.findall(r'^#include "(.*)"', text, re.MULTILINE)
    }
    assert included and included - set(held) == set()


def test_the_wheel_is_for_machines_with_an_older_glibc(built: tuple[Path, Path], tmp_path: Path) -> None:
    """auditwheel has named it and added no library.  Nothing in the sources is younger than manylinux_2_28."""
    name = rf"moecomm-{moecomm.__version__}-cp3\d+-cp3\d+-manylinux_2_\d+_{os.uname().machine}\.whl"
    assert re.fullmatch(name, built[1].name)
    with zipfile.ZipFile(built[1]) as archive:
        (module,) = (entry for entry in archive.namelist() if entry.endswith(".so"))
        archive.extract(module, tmp_path)
    needed = re.findall(r"\(NEEDED\).*\[(.*?)\]", run("readelf", "-dW", module, cwd=tmp_path).stdout)
    assert "libc.so.6" in needed and not any("torch" in library or "python" in library for library in needed)
    symbols = run("readelf", "--dyn-syms", "-W", module, cwd=tmp_path).stdout
    versions = {symbol: int(minor) for symbol, minor in re.findall(r"UND (\w+)@GLIBC_2\.(\d+)", symbols)}
    assert {symbol for symbol, minor in versions.items() if minor > 28} - YOUNGER == set()


def install(package: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Install a package in a new environment, whose interpreter and site-packages are returned."""
    python = new_environment(tmp_path / "environment")
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", package, cwd=tmp_path)
    # Take moecomm's dependencies from this environment: torch is large.  Behind the packages of the new one.
    site = Path(run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=tmp_path).stdout.strip())
    (site / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    return python, site


def test_programs_run_in_the_checkout_that_was_installed(tree: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    shutil.copytree(tree, checkout)
    refused = run(sys.executable, "-c", "import moecomm", cwd=checkout, check=False).stdout
    assert f"ImportError: {checkout} is not built: run `pip install" in refused
    python, _ = install(checkout, tmp_path)
    (program,) = re.findall(r"^```python\n(.*?)^```$", (checkout / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    (checkout / "example.py").write_text(program)
    torchrun = (python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "example.py")
    assert "the result is right to" in run(*torchrun, cwd=checkout, GLOO_SOCKET_IFNAME="lo").stdout
    run(python, "-m", "pytest", "--collect-only", "-q", "tests/test_errors.py", cwd=checkout)
    assert moecomm.__version__ in run(python, "-m", "moecomm", "--version", cwd=checkout).stdout


@pytest.mark.parametrize("which", [0, 1], ids=["sdist", "wheel"])
def test_what_is_installed_runs_the_demo(built: tuple[Path, Path], which: int, tmp_path: Path) -> None:
    python, site = install(built[which], tmp_path)
    module = run(python, "-c", "import moecomm; print(moecomm.__file__)", cwd=tmp_path).stdout.strip()
    assert Path(module).is_relative_to(site)
    command = tmp_path / "environment" / "bin" / "moecomm"
    assert run(command, "--version", cwd=tmp_path).stdout == f"moecomm {moecomm.__version__}\n"
    bare = {"PATH": str(command.parent), "CC": None, "CXX": None}  # no compiler
    said = run(command, "demo", "--tokens", "16", "--ranks", "2", "--backend", "host", cwd=tmp_path, **bare).stdout
    assert "Every output equals the single-rank layer" in said
    assert "not measured" in run(command, "simulate", "--domains", "1", "--tokens", "1", cwd=tmp_path).stdout
    # moecomm is on no index.  Its extras can be added to it nevertheless, as `moecomm doctor` says.
    dry = (python, "-m", "pip", "install", "--dry-run", "moecomm[cu13]")
    assert re.search(r"^Would install .*nccl4py-0\.6", run(*dry, cwd=tmp_path).stdout, re.MULTILINE)


def test_without_a_compiler_the_build_says_what_to_install(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    build = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, tree)
    done = run(*build, cwd=tmp_path, check=False, PATH=str(tmp_path / "empty"), CC=None, CXX=None)
    assert done.returncode != 0
    assert "moecomm needs a C++17 compiler and the headers of Python: " in done.stdout
    assert "apt install g++ python3-dev" in done.stdout and "dnf install gcc-c++ python3-devel" in done.stdout
