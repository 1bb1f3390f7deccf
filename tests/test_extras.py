"""Extras of pyproject.toml: what is in them, and that messages that say `pip install` name what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moecomm.backends.windows import nccl
from moecomm.shims.build import SHIMS, dotted

ROOT = Path(__file__).parent.parent
# The first thing behind "pip install": a name that may end with that of CUDA's version, and extras.
ADVICE = re.compile(r"pip install (['\"]?)([a-z][\w-]*(?:\{[^{}]*\})?(?:\[[^\[\]]*\])?)")


def extras() -> dict[str, list[str]]:
    """Requirements by extra, without tomllib, which Python 3.10 lacks."""
    text = (ROOT / "pyproject.toml").read_text()
    section = text.split("[project.optional-dependencies]\n")[1].split("\n[project")[0]
    lists = re.findall(r'^([\w-]+) = \[((?:[^"\]]|"[^"]*")*)\]', section, re.MULTILINE)
    return {name: re.findall(r'"(.*?)"', requirements) for name, requirements in lists}


def name_of(requirement: str) -> str:
    """A requirement without its extras and versions."""
    return re.split(r"[\[<>=!~]", requirement)[0]


@pytest.mark.parametrize("cuda", ["cu12", "cu13"])
def test_messages_name_extras_and_packages_that_there_are(cuda: str) -> None:
    declared = extras()
    packages = {name_of(requirement) for requirements in declared.values() for requirement in requirements}
    sources = [path for folder in ("moecomm", "moecomm_bench") for path in (ROOT / folder).rglob("*.py")]
    found = [match.groups() for path in sources for match in ADVICE.finditer(path.read_text())]
    assert len(found) > 8
    for quote, words in found:
        text = re.sub(r"\{[\w.]*wheel_suffix\(\)\}|cu\{driver_major\}", cuda, words)
        package, _, wanted = text.rstrip("]").partition("[")
        assert not wanted or quote, f"a shell may take the brackets of {text} for a pattern"
        if package == "moecomm":
            assert wanted in declared, text
        else:
            assert package in packages, text


@pytest.mark.parametrize("cuda", ["cu12", "cu13"])
def test_the_extra_of_gpus_has_lsa_and_gin_and_the_other_one_nvshmem(cuda: str) -> None:
    declared = extras()
    wanted = {"cuda-core", "cuda-bindings", "nccl4py", f"nvidia-nccl-{cuda}"}
    compilers = ("nvidia-cuda-nvrtc", "nvidia-nvjitlink")  # those of CUDA 13 have no suffix
    wanted |= {name if cuda == "cu13" else f"{name}-{cuda}" for name in compilers}
    assert {name_of(requirement) for requirement in declared[cuda]} == wanted
    assert f"pip install '{declared[cuda][-1]}'" == nccl._INSTALL
    added = [f"moecomm[{cuda}]", f"nvidia-nvshmem-{cuda}>={dotted(SHIMS['nvshmem'][3])}", f"nvshmem4py-{cuda}"]
    assert declared[f"nvshmem-{cuda}"] == added


def test_shims_of_wheels_are_compiled_from_the_oldest_headers() -> None:
    """A process may have later ones, and not older ones."""
    oldest = {library.lower(): dotted(version) for _, _, library, version in SHIMS.values()}
    assert extras()["shims"][1:] == [f"nvidia-{name}-cu13=={version}" for name, version in oldest.items()]
