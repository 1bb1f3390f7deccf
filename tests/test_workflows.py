"""Workflows and issue templates: they parse, and what they name exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]


def declared(name: str) -> list[str]:
    """The strings of a list in pyproject.toml, without tomllib, which Python 3.10 lacks."""
    found = re.search(rf"^{name} = \[(.*?)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return re.findall(r'"(.*?)"', found[1])


def test_there_are_tests_wheels_and_both_templates() -> None:
    assert [path.stem for path in WORKFLOWS] == ["proofs", "test", "wheels"]
    assert [path.stem for path in TEMPLATES] == ["bug", "feature"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_what_github_wants(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    # "on" is a boolean to YAML 1.1.
    assert set(workflow) - {"concurrency"} == {"name", True, "permissions", "jobs"}
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["runs-on"] and job["timeout-minutes"] <= (150 if path.stem == "proofs" else 60)
    for step in steps(path):
        assert ("run" in step) != ("uses" in step)
        assert re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/checkout@v4"))


@pytest.mark.parametrize(("workflow", "command"), [("test", ".ci/run"), ("proofs", ".ci/run proofs")])
def test_the_cpu_workflows_run_all_of_ci(workflow: str, command: str) -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / f"{workflow}.yml").read_text())["jobs"]
    first = next(iter(jobs.values()))
    assert [step["run"] for step in first["steps"] if "run" in step] == [command]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_every_python_of_the_readme_is_tested() -> None:
    """One by .ci/run, the others by the command of the README, with a torch that moecomm takes."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "proofs.yml").read_text())["jobs"]
    (all_of_ci,) = (step["with"]["python-version"] for step in jobs["proofs"]["steps"] if "with" in step)
    others = jobs["pythons"]["strategy"]["matrix"]["include"]
    assert "Python 3.10 to 3.13" in (ROOT / "README.md").read_text()
    want = [f"3.{minor}" for minor in range(10, 14)]
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


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_is_a_form(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert form["name"] and form["description"]
    asked = {entry["id"]: entry for entry in form["body"] if entry["type"] != "markdown"}
    assert all(entry["attributes"]["label"] for entry in asked.values())
    if path.stem == "bug":
        assert "moecomm doctor" in asked["doctor"]["attributes"]["label"] and asked["doctor"]["validations"]["required"]
