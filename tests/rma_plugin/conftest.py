"""The driver, built once, and a function that runs it under a hard limit of time."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from moecomm import rma_plugin
from moecomm.errors import Unsupported

from .build import build_driver, build_fake_cuda

Drive = Callable[..., str]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    try:
        rma_plugin.path()
    except Unsupported as error:
        for item in items:
            if item.path.parent == Path(__file__).parent:
                item.add_marker(pytest.mark.skip(reason=str(error)))


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_fake_cuda(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory, fake_cuda: Path) -> Path:
    return build_driver(tmp_path_factory.mktemp("rma"), fake_cuda)


def run_driver(
    driver: Path,
    plugin: Path,
    fake_cuda: Path,
    scenario: str,
    *,
    timeout_ms: int = 20000,
    times: str = "0",
    **options: object,
) -> str:
    """Return what it printed.  It ends itself, and its ranks, after `seconds`; subprocess does after a few more."""
    seconds = int(str(options.setdefault("seconds", 30)))
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(fake_cuda),
        "MOECOMM_RMA_JOB": "a job",
        "MOECOMM_RMA_TIMEOUT_MS": str(timeout_ms),
        "MOECOMM_RMA_TIMES": times,
    }
    done = subprocess.run(
        [str(driver), str(plugin), scenario, *(f"{name}={value}" for name, value in options.items())],
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds + 10,
        check=False,
    )
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture
def drive(driver: Path, fake_cuda: Path) -> Drive:
    """Runs a scenario with the plugin as it was built with the package."""

    def run(scenario: str, **options: object) -> str:
        return run_driver(driver, rma_plugin.path(), fake_cuda, scenario, **options)  # type: ignore[arg-type]

    return run
