"""Compiles the device shims: csrc/shims/*.cu to LTO IR, in this directory or another.

    python -m moecomm.shims.build [--cuda DIR] [--nccl DIR] [--nvshmem DIR]

Building a wheel runs it (setup.py, with CUDA_HOME, NCCL_HOME and NVSHMEM_HOME for the options); an installation that
had no compiler then may run it later.  nvcc is that of --cuda, of the nvidia-cuda-nvcc wheel, of PATH or of
/usr/local/cuda.  Headers are those of --nccl and --nvshmem, of the wheels of NCCL and NVSHMEM, or of /usr.  A shim that
can't be built is left out, and built.json says why: moecomm.shims repeats it.

setup.py loads this file by itself: it imports nothing of moecomm.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

ARCH = "90a"
# Backends of NCCL 2.32 that stay off: EFA's cannot say yet what has been sent, which shims.h promises.
_NO_EFA = ["-DNCCL_GIN_EFA_GDA_ENABLE=0"]
_PROXY_ALONE = [*_NO_EFA, "-DNCCL_GIN_GDAKI_ENABLE=0", "-DNCCL_GIN_GPI_ENABLE=0"]
# what is compiled, with which definitions, from whose headers, the oldest of them
SHIMS: dict[str, tuple[str, list[str], str, tuple[int, int, int]]] = {
    "gin": ("gin.cu", _NO_EFA, "NCCL", (2, 30, 7)),
    "gin_proxy": ("gin.cu", _PROXY_ALONE, "NCCL", (2, 30, 7)),
    "nvshmem": ("nvshmem.cu", [], "NVSHMEM", (3, 4, 5)),
}
# where a library's version stands, and how its three numbers are called
_VERSIONS = {
    "NCCL": ("nccl.h", "NCCL_{}"),
    "NVSHMEM": ("non_abi/nvshmem_version.h", "NVSHMEM_VENDOR_{}_VERSION"),
}


class CannotBuild(Exception):
    """Reason why a shim is not built, as moecomm.shims says it after a colon."""


def build(into: Path, sources: Path, homes: Mapping[str, str]) -> dict[str, str]:
    """Build each shim into `into`, with a built.json about all; return the reasons of those that were not built.

    `sources` is csrc.  `homes`: where CUDA, NCCL and NVSHMEM are installed; those not named are searched for.
    """
    into.mkdir(parents=True, exist_ok=True)
    told: dict[str, dict[str, object]] = {}
    for shim in SHIMS:
        output = into / f"{shim}.fatbin"
        output.unlink(missing_ok=True)
        try:
            told[shim] = _compile(shim, output, sources / "shims", homes)
        except CannotBuild as why:
            told[shim] = {"missing": str(why)}
    (into / "built.json").write_text(json.dumps(told, indent=1) + "\n")
    return {shim: str(found["missing"]) for shim, found in told.items() if "missing" in found}


def recipe(shim: str) -> str:
    """Return the command that builds a shim in this environment, as a sentence.

    nvcc is of the release of the cuda-toolkit package, which torch pins, or of nvJitLink if that is older: it reads no
    LTO IR of a later release.  The parts of the compiler come as one package: those of different releases do not
    compile together.
    """
    _, _, library, oldest = SHIMS[shim]
    linker = {name: _installed(f"nvidia-nvjitlink{name}") for name in ("", "-cu12")}
    if linker["-cu12"] and not linker[""]:  # wheels of CUDA 12 have no nvcc
        wanted = f"nvidia-{library.lower()}-cu12>={dotted(oldest)}"
        return (
            f"To build it: pip install '{wanted}', then python -m moecomm.shims.build --cuda DIR, with the nvcc of a "
            f"CUDA {linker['-cu12']} toolkit."
        )
    wanted = f"nvidia-{library.lower()}-cu13>={dotted(oldest)}"
    releases = [release for release in (_installed("cuda-toolkit"), linker[""]) if release]
    release = min(releases, key=lambda release: [int(part) for part in release.split(".")], default="13")
    return (
        f"To build it: pip install 'cuda-toolkit[nvcc,crt,nvvm,cccl,cudart]=={release}.*' '{wanted}', then "
        "python -m moecomm.shims.build."
    )


def _installed(package: str) -> str:
    """Major and minor version of a distribution; empty: not there."""
    try:
        return ".".join(importlib.metadata.version(package).split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return ""


def _compile(shim: str, output: Path, sources: Path, homes: Mapping[str, str]) -> dict[str, object]:
    source, definitions, library, oldest = SHIMS[shim]
    include = _headers(library, homes.get(library))
    found = version(library, include)
    if found < oldest:
        raise CannotBuild(f"the headers of {library} in {include} are {dotted(found)}; want {dotted(oldest)} or later")
    nvcc = _nvcc(homes.get("CUDA"))
    major, minor = _release(nvcc)
    # LTO IR alone, compressed.  NDEBUG: headers of both libraries check arguments with a macro that traps.
    line = [nvcc, "-std=c++17", "-fatbin", "-dc", "-DNDEBUG", "-gencode", f"arch=compute_{ARCH},code=lto_{ARCH}"]
    line += [*definitions, "-I", str(include), "-o", str(output), str(sources / source)]
    ran = subprocess.run(line, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        output.unlink(missing_ok=True)
        said = [text.strip() for text in ran.stderr.splitlines() if text.strip()] or ["nothing"]
        raise CannotBuild(f"{nvcc} failed and said {next((text for text in said if 'error' in text), said[-1])!r}")
    return {"arch": f"sm_{ARCH}", "nvcc": [major, minor], "headers": f"{library} {dotted(found)}"}


def _nvcc(home: str | None) -> str:
    places = [Path(home)] if home else []
    wanted = [*places, *wheels("cu13", "cuda_nvcc")]
    candidates = [*(str(place / "bin" / "nvcc") for place in wanted), shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise CannotBuild("there was no nvcc")


def _release(nvcc: str) -> tuple[int, int]:
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    if (found := re.search(r"release (\d+)\.(\d+)", said)) is None:
        raise CannotBuild(f"{nvcc} does not say which version it is")
    return int(found[1]), int(found[2])


def _headers(library: str, home: str | None) -> Path:
    places = [Path(home)] if home else [*wheels(library.lower()), Path("/usr")]
    for place in places:
        if (place / "include" / _VERSIONS[library][0]).is_file():
            return place / "include"
    raise CannotBuild(f"there were no headers of {library}{f' in {home}' if home else ''}")


def version(library: str, include: Path) -> tuple[int, ...]:
    """Return the version of the library of these headers: "NCCL" or "NVSHMEM"."""
    header, name = _VERSIONS[library]
    text = (include / header).read_text(errors="replace")
    numbers = []
    for part in ("MAJOR", "MINOR", "PATCH"):
        if (found := re.search(rf"#define\s+{name.format(part)}\s+(\d+)", text)) is None:
            raise CannotBuild(f"{include / header} does not say which version it is")
        numbers.append(int(found[1]))
    return tuple(numbers)


def dotted(numbers: tuple[int, ...]) -> str:
    """Return a version as people write it: 2.30.7."""
    return ".".join(map(str, numbers))


def wheels(*names: str) -> list[Path]:
    """Return the folders in which wheels of NVIDIA have put the libraries of these names."""
    package = importlib.util.find_spec("nvidia")
    places = package.submodule_search_locations or () if package else ()
    return [Path(place) / name for place in places for name in names if (Path(place) / name).is_dir()]


def main() -> None:
    """The command."""
    options = argparse.ArgumentParser(prog="python -m moecomm.shims.build", description="Compiles the device shims.")
    for library in ("cuda", "nccl", "nvshmem"):
        options.add_argument(f"--{library}", metavar="DIR", help="where it is installed")
    homes = {library.upper(): home for library, home in vars(options.parse_args()).items() if home}
    package = Path(__file__).parent.parent
    sources = package / "csrc" if (package / "csrc").is_dir() else package.parent / "csrc"
    missing = build(package / "shims", sources, homes)
    for shim in SHIMS:
        print(f"{shim:<10} {f'not built: {missing[shim]}.  {recipe(shim)}' if shim in missing else 'built'}")


if __name__ == "__main__":
    main()
