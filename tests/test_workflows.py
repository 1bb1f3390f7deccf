"""Workflows build the wheels that users install, for every Python of the README."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]


def declared(name: str) -> list[str]:
    """The strings of a list in pyproject.toml, without tomllib, which Python 3.10 lacks."""
    found = re.search(rf"^{name} = \[(.*?)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return re.findall(r'"(.*?)"', found[1])


def test_every_python_of_the_readme_is_tested() -> None:
    """One by .ci/run, the others by the command of the README, with a torch that moecomm takes."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "proofs.yml").read_text())["jobs"]
    (all_of_ci,) = (step["with"]["python-version"] for step in jobs["proofs"]["steps"] if "with" in step)
    others = jobs["pythons"]["strategy"]["matrix"]["include"]
    assert "Python 3.10 to 3.14" in (ROOT / "README.md").read_text()
    want = [f"3.{minor}" for minor in range(10, 15)]
    assert sorted([all_of_ci, *(other["python"] for other in others)]) == want
    wheels = (ROOT / ".github" / "workflows" / "wheels.yml").read_text()
    assert re.findall(r"\bcp(\d)(\d+)-", wheels) == [tuple(version.split(".")) for version in want]
    oldest = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert oldest and min(other["torch"] for other in others) == f"{oldest[1]}.0"
    command = jobs["pythons"]["steps"][-1]["run"]
    assert f"\n{command}\n" in (ROOT / "README.md").read_text()


def test_wheels_are_built_with_all_that_shims_need() -> None:
    (env,) = [step["env"] for step in steps(ROOT / ".github" / "workflows" / "wheels.yml") if "env" in step]
    installed = shlex.split(env["CIBW_BEFORE_BUILD"])
    assert installed[:2] == ["pip", "install"]
    assert installed[2:] == declared("requires") + declared("shims")
    assert "--no-isolation" in env["CIBW_BUILD_FRONTEND"]
    code = shlex.split(env["CIBW_TEST_COMMAND"])[-1]
    compile(code, "CIBW_TEST_COMMAND", "exec")
    assert "shims.find(name).missing" in code
