"""Real NCCL, real GPUs: a program with GIN kernels, through the plugin."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from . import gin_program


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if gin_program.nccl() is None or shutil.which("nvcc") is None:
        pytest.skip("wants nvcc and a wheel of NCCL 2.30.7 or later")
    target = tmp_path_factory.mktemp("gin") / "gin_program"
    gin_program.build(target)
    return target


@pytest.mark.gpu2
@pytest.mark.parametrize("lsa", [None, 1])
@pytest.mark.parametrize("how", ["processes", "threads"])
def test_gin_kernels_find_every_byte(program: Path, how: str, lsa: int | None) -> None:
    assert gin_program.run(program, 2, how, lsa).count("all bytes are right") == 2
