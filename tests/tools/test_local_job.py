"""`moecomm launch`: the variables of ranks, exit codes, and what becomes of the ranks when one or the launcher ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import moecomm
from moecomm.tools.launch import run_program

from ..fresh_python import beside_packages, run_python

ROOT = Path(__file__).parent.parent.parent
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


def of_ranks(*programs: str) -> list[str]:
    """A program of which each rank has a line of its own."""
    return ["-c", f"import os, signal, sys\nexec({list(programs)!r}[int(os.environ['RANK'])])"]


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_ended(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while not all(map(ended, pids)):
        assert time.monotonic() < deadline, f"still running: {[pid for pid in pids if not ended(pid)]}"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("programs", "code", "said"),
    [
        (["pass", "pass"], 0, []),
        (["pass", KILL, "pass"], 0, ["rank 1 was killed by SIGKILL"]),
        (["pass", "sys.exit(3)", "pass"], 3, ["rank 1 ended with exit code 3"]),
        ([KILL, "sys.exit(3)", "pass"], 3, ["rank 0 was killed by SIGKILL", "rank 1 ended with exit code 3"]),
        ([KILL, KILL], 128 + signal.SIGKILL, ["rank 0 was killed by SIGKILL", "rank 1 was killed by SIGKILL"]),
    ],
    ids=["all end", "one is lost", "one fails", "one is lost and one fails", "all are lost"],
)
def test_the_exit_code_tells_losses_from_failures(programs: list[str], code: int, said: list[str]) -> None:
    lines: list[str] = []
    assert run_program(of_ranks(*programs), len(programs), lines.append) == code
    assert sorted(line.split(";")[0] for line in lines) == said


def test_ranks_go_on_after_the_loss_of_another(tmp_path: Path) -> None:
    """The survivor ends only when it has seen that the other is gone, and not been told to end."""
    lost = tmp_path / "lost"
    die = f"open({str(lost)!r}, 'w').write(str(os.getpid())); {KILL}"
    wait = f"""
import time
while not os.path.exists({str(lost)!r}) or not (pid := open({str(lost)!r}).read()): time.sleep(0.01)
while os.path.exists('/proc/' + pid): time.sleep(0.01)
"""
    lines: list[str] = []
    assert run_program(of_ranks(wait, die), 2, lines.append) == 0
    assert lines == ["rank 1 was killed by SIGKILL; 1 of 2 ranks still run"]


def test_ranks_have_the_variables_of_torchrun(tmp_path: Path) -> None:
    program = f"import json; json.dump(dict(os.environ), open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w'))"
    before = dict(os.environ)
    assert run_program(of_ranks(program, program), 2, print) == 0
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert dict(os.environ) == before
    for rank, variables in enumerate(found):
        assert variables["RANK"] == variables["LOCAL_RANK"] == str(rank)
        assert variables["WORLD_SIZE"] == variables["LOCAL_WORLD_SIZE"] == "2"
        assert variables["MASTER_ADDR"] == "127.0.0.1" and variables["MASTER_PORT"] == found[0]["MASTER_PORT"]


def test_the_store_outlives_each_rank_and_listens_on_the_loopback_interface() -> None:
    program = """
import time
import torch.distributed as dist
store = dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), is_master=False)
if os.environ['RANK'] == '0':
    store.set('pid', str(os.getpid()))
    os.kill(os.getpid(), signal.SIGKILL)
while os.path.exists('/proc/' + store.get('pid').decode()): time.sleep(0.01)
store.set('after', 'the loss')
rows = [line.split() for table in ('tcp', 'tcp6') for line in open('/proc/net/' + table)]
port = format(int(os.environ['MASTER_PORT']), '04X')
heard = [row[1] for row in rows if row[3] == '0A' and row[1].endswith(':' + port)]
found = [store.get('after'), heard, dist.is_torchelastic_launched()]
sys.exit(None if found == [b'the loss', ['0100007F:' + port], True] else str(found))
"""
    assert run_program(of_ranks(program, program), 2, print) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_the_launcher(number: signal.Signals, tmp_path: Path) -> None:
    rank = f"""
import os, time
with open({str(tmp_path)!r} + '/new' + os.environ['RANK'], 'w') as file: file.write(str(os.getpid()))
os.rename(file.name, file.name.replace('new', 'pid'))
time.sleep(600)
"""
    job = f"import sys; from moecomm.tools.launch import run_program; sys.exit(run_program(['-c', {rank!r}], 2, print))"
    launcher = subprocess.Popen([sys.executable, "-c", job], **beside_packages())
    files = [tmp_path / f"pid{rank}" for rank in range(2)]
    while not all(file.exists() for file in files):
        assert launcher.poll() is None
        time.sleep(0.02)
    launcher.send_signal(number)
    assert launcher.wait(60) == (-number if number == signal.SIGKILL else 128 + number)
    wait_until_ended([int(file.read_text()) for file in files])


@pytest.mark.parametrize(("given", "argument"), [(([], 2), "program"), ((["-c", ""], 0), "ranks")])
def test_bad_arguments_start_nothing(given: tuple[list[str], int], argument: str) -> None:
    with pytest.raises(moecomm.BadInput) as error:
        run_program(*given, print)
    assert error.value.argument == argument


@pytest.mark.parametrize("lost", [2, 0])
def test_the_ranks_of_the_example_serve_on_without_a_lost_one(lost: int) -> None:
    """Rank 0 would have the store under plain torch."""
    command = ["-m", "moecomm", "launch", "--ranks", "3", ROOT / "examples" / "lose_a_rank.py"]
    found = run_python(*command, "--steps", "40", "--lose", str(lost))
    assert found.returncode == 0, found.stdout + found.stderr
    assert f"rank {lost} was killed by SIGKILL; 2 of 3 ranks still run" in found.stderr
    left = [rank for rank in range(3) if rank != lost]
    lines = found.stdout.splitlines()
    assert {f"rank {rank}: served 40 steps, at last on 2 ranks" for rank in left} <= set(lines)
    assert sum(f"without ({lost},), on 2 ranks" in line for line in lines) == 2
