"""The pages of docs/ run as they stand: all Python of a page is one program, and commands are those that exist."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer

from moecomm.tools.cli import app

from ..conftest import Ranks
from ..fresh_python import run_python

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
# A block, and what the comment ahead of it says that it needs: CUDA, or a framework.
BLOCK = re.compile(r"^(?:<!-- needs (\w+) -->\n)?```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def here(needed: str) -> bool:
    """Return whether a block runs here.  Lines for a framework stand in a program of it, and are only compiled."""
    return not needed or (needed == "CUDA" and torch.cuda.is_available())


def program(page: Path) -> str:
    """The Python of a page that runs here; line numbers are those of the page."""
    text = page.read_text()
    lines = [""] * text.count("\n")
    for block in BLOCK.finditer(text):
        needed, language, code = block.groups()
        if language == "python" and here(needed):
            begin = text.count("\n", 0, block.start(3))
            lines[begin : begin + code.count("\n")] = code.splitlines()
    return "\n".join(lines)


def with_python() -> list[Path]:
    return [page for page in PAGES if program(page).strip()]


def run(page: str, code: str) -> None:
    exec(compile(code, page, "exec"), {"__name__": "__main__"})


def _on_a_rank(rank: int, group: Any, page: str, code: str, folder: str) -> bool:
    os.chdir(folder)  # for what the page writes
    dist.init_process_group = lambda backend: None  # done
    run(page, code)
    return True


@pytest.fixture(scope="module")
def warm() -> None:
    """Imports that torch puts off, once here and not in every rank."""
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp

    torch.testing.assert_close(torch.ones(1), torch.ones(1))
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([parameter])
    parameter.sum().backward()
    optimizer.step()


UNDER_TORCHRUN = "quick_start"


@pytest.mark.long
def test_the_first_program_runs_under_torchrun(tmp_path: Path) -> None:
    file = tmp_path / "first.py"
    file.write_text(program(ROOT / "docs" / f"{UNDER_TORCHRUN}.md"))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", file]
    found = run_python(*command, timeout_s=120, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    assert found.returncode == 0, found.stderr
    assert sorted(re.findall(r"rank (\d): \d+ rows", found.stdout)) == ["0", "1"]


@pytest.mark.parametrize(
    "page", [page for page in with_python() if page.stem != UNDER_TORCHRUN], ids=lambda page: page.stem
)
def test_the_python_of_a_page_runs(page: Path, ranks: Ranks, warm: None, tmp_path: Path) -> None:
    """On two ranks where it makes a process group, else alone."""
    code = program(page)
    processes = 2 if "init_process_group(" in code else 1
    assert ranks.run(processes, _on_a_rank, page.name, code, str(tmp_path)) == [True] * processes


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_that_does_not_run_here_compiles(page: Path) -> None:
    for needed, language, code in BLOCK.findall(page.read_text()):
        if language == "python" and not here(needed):
            compile(code, page.name, "exec")


def commands() -> list[tuple[str, str]]:
    """Every call of `moecomm` in a bash block, by its page."""
    found = []
    for page in PAGES:
        for _, language, code in BLOCK.findall(page.read_text()):
            lines = code.replace("\\\n", " ").splitlines() if language == "bash" else []
            found += [(page.name, part.strip()) for line in lines for part in re.split(r"&&|\|", line)]
    return [(page, part) for page, part in found if part.startswith("moecomm ")]


@pytest.mark.parametrize(("page", "command"), commands())
def test_commands_of_pages_exist_with_their_options(page: str, command: str) -> None:
    words = shlex.split(command, comments=True)[1:]
    found: Any = typer.main.get_command(app)
    while words and hasattr(found, "commands") and words[0] in found.commands:
        found = found.commands[words.pop(0)]
    options = {name for parameter in found.params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert not (words and hasattr(found, "commands") and not words[0].startswith("-")), f"no command {words[0]}"
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options


def test_there_are_snippets() -> None:
    assert len(with_python()) >= 6 and len(commands()) >= 4
