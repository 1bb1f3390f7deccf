"""Contract tests against the oldest supported version of each framework, and against the newest of the index.

    python -m tests.integrations.versions [--newest] [framework ...]

--newest leaves the oldest versions out.  Each version is installed into a virtual environment of its own over this one,
which is deleted afterwards.  Most frameworks come without dependencies: tests read their sources, and import nothing of
them.  docs/maintainers/testing.md has the list.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
CALLS = "tests/integrations/test_call_sites.py"


class Framework(NamedTuple):
    """Versions to check, and their tests.

    Attributes:
        package: its name on the index.
        oldest: the oldest version that is supported.
        newest: the newest version that has been checked; where the index has a newer one, that one is checked instead.
        before: why no version before `oldest` is supported.
        tests: files of tests; only tests that read sources run.
        whole: all tests of the files run, and import the framework.
        beside: packages that the framework imports in tests; their dependencies are not installed.
        dependencies: pip installs the framework with its dependencies.
        python: version of Python of the wheels, if it is not the running one.
    """

    package: str
    oldest: str
    newest: str
    before: str
    tests: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    dependencies: bool = False
    python: str = ""


FRAMEWORKS = {
    "torchtitan": Framework(
        "torchtitan",
        "0.3.0",
        "0.3.0",
        "0.2 has neither `config/override.py` nor `token_dispatcher.py`",
        tests=(CALLS,),
        whole=(
            "tests/integrations/test_torchtitan_installed.py",
            "tests/integrations/test_torchtitan_deep_ep.py",
            "tests/integrations/test_torchtitan.py",
            "tests/integrations/test_same_bits.py::test_an_engine_gives_the_bits_of_torchtitan",
        ),
        beside=("spmd_types==0.2.3", "tyro", "docstring_parser", "einops"),
    ),
    "transformers": Framework(
        "transformers",
        "5.23.0",
        "5.24.0",
        "5.22 has no registry of expert-parallel implementations",
        whole=("tests/integrations/test_transformers.py",),
        beside=("accelerate",),
        dependencies=True,
    ),
    "transformer-engine": Framework(
        "transformer-engine",
        "2.19.0",
        "2.20.2",
        "`ep_bootstrap` of 2.18 has other arguments",
        tests=("tests/compat/test_te_ep.py",),
    ),
    "sglang": Framework(
        "sglang",
        "0.5.19",
        "0.5.23",
        "0.5.18 has no `deepep_v2`",
        tests=("tests/integrations/test_sglang.py", CALLS),
    ),
    "vllm": Framework(
        "vllm",
        "0.24.0",
        "0.33.0",
        "0.23 has no `deepep_v2`",
        tests=("tests/integrations/test_vllm_signatures.py", CALLS),
    ),
    "flashinfer": Framework(
        "flashinfer-python",
        "0.7.2",
        "0.7.2.post1",
        "0.7.1 has no registry of communication backends",
        tests=("tests/integrations/test_flashinfer.py",),
    ),
    "megatron": Framework(
        "megatron-core",
        "0.16.1",
        "0.19.2",
        "0.16.0 has not been run",
        tests=(CALLS,),
        python="3.12",
    ),
}
# Tests that read sources, by their names.
SELECTED = "installed or signatures or its_dispatcher or overrides or metadata or deepeps or looks_for or of_vllm"


class Place:
    """A virtual environment over the running one: its packages, and those of the running one behind them."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder)
        self.python = str(folder / "bin" / "python")
        self.packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
        under = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        # addsitedir() also reads the files that name the folders of editable packages.
        lines = [f"import site; site.addsitedir({path!r})" for path in sorted(under)]
        (self.packages / "under.pth").write_text("\n".join(lines))

    def install(self, framework: Framework, version: str) -> None:
        wanted = f"{framework.package}=={version}"
        if framework.dependencies:
            pip(self.python, "install", wanted, *framework.beside)
            return
        pip(self.python, "install", "--no-deps", f"--target={self.packages}", *wheels_for(framework.python), wanted)
        if framework.beside:
            pip(self.python, "install", "--no-deps", *framework.beside)

    def run(self, *arguments: str) -> str:
        """Run pytest and return its last line.

        Raises:
            RuntimeError: a test failed, or none ran; with what pytest printed.
        """
        # Not -m, which puts this folder first on the path: its moecomm may not be built.
        program = str(Path(pytest.__file__).with_name("__main__.py"))
        tests = [self.python, program, "-q", "-p", "no:cacheprovider", *arguments]
        ran = subprocess.run(tests, cwd=ROOT, check=False, capture_output=True, text=True)
        if ran.returncode:
            raise RuntimeError(ran.stdout + ran.stderr)
        return ran.stdout.strip().splitlines()[-1]


def pip(python: str, command: str, *arguments: str) -> str:
    """Run pip for an environment, and return what it prints.

    Raises:
        RuntimeError: it failed; with its errors.
    """
    ran = subprocess.run(
        [python, "-m", "pip", command, "--disable-pip-version-check", *arguments],
        check=False,
        capture_output=True,
        text=True,
    )
    if ran.returncode:
        raise RuntimeError(ran.stderr)
    return ran.stdout


def wheels_for(python: str) -> list[str]:
    """Options of pip for wheels of another Python; tests import none of their C modules."""
    if not python:
        return []
    kinds = [f"manylinux_2_{minor}_{platform.machine()}" for minor in (28, 24, 17)]
    # pip install compares with the running Python, whatever --python-version says.
    other = ["--only-binary=:all:", f"--python-version={python}", "--ignore-requires-python"]
    return [*other, *(f"--platform={kind}" for kind in kinds)]


def on_index(framework: Framework) -> list[str]:
    """The versions that the index has, the newest first.

    Raises:
        RuntimeError: it has none.
    """
    printed = pip(sys.executable, "index", "versions", *wheels_for(framework.python), framework.package)
    (line,) = [line for line in printed.splitlines() if line.startswith("Available versions:")]
    return line.partition(":")[2].replace(",", " ").split()


def check(framework: Framework, version: str) -> None:
    """Run the tests beside a version, and print what pytest counts.

    Raises:
        RuntimeError: pip or a test failed, or a test of those that run whole was skipped.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        place.install(framework, version)
        counts = []
        if framework.tests:
            counts.append(place.run("-k", SELECTED, *framework.tests))
        if framework.whole:
            counts.append(place.run("-rs", *framework.whole))
            if "skipped" in counts[-1]:
                raise RuntimeError(counts[-1])
    print(f"{framework.package} {version}: {'; '.join(counts)}", flush=True)


def check_all(framework: Framework, newest_only: bool) -> bool:
    """Return whether the tests pass beside the oldest supported version and the newest of the index, or the newest."""
    passed = True
    try:
        there = on_index(framework)
    except RuntimeError as error:
        print(f"{framework.package}: {error}", flush=True)
        return False
    if there[0] != framework.newest:
        print(
            f"{framework.package}: the newest is {there[0]} here, and {framework.newest} in docs/maintainers/testing.md"
        )
    for version in dict.fromkeys((there[0],) if newest_only else (framework.oldest, there[0])):
        if version not in there:
            print(f"{framework.package} {version}: not on the index, left out", flush=True)
            continue
        try:
            check(framework, version)
        except RuntimeError as error:
            print(f"{framework.package} {version}: {error}", flush=True)
            passed = False
    return passed


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Contract tests against versions of frameworks")
    parser.add_argument("--newest", action="store_true", help="leave out the oldest versions")
    parser.add_argument("frameworks", nargs="*", metavar="framework", help="default: all")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.frameworks if name not in FRAMEWORKS]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(FRAMEWORKS)}")
    passed = [check_all(FRAMEWORKS[name], given.newest) for name in given.frameworks or FRAMEWORKS]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
