"""Examples do what they say."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moecomm
from moecomm.nn import Gate
from moecomm.router import Gating

from .conftest import Ranks
from .few import few
from .fresh_python import run_python

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "examples"))


@pytest.mark.long
@pytest.mark.parametrize(("steps", "ranks", "loss"), [(20, 2, 3.5), (200, 4, 3.2)])
def test_a_language_model_learns_the_same_on_several_ranks_and_on_one(steps: int, ranks: int, loss: float) -> None:
    program = ROOT / "examples" / "train_language_model.py"
    found = run_python(program, "--steps", str(steps), "--ranks", str(ranks))
    assert found.returncode == 0, found.stdout + found.stderr
    losses = [float(line.split()[1]) for line in found.stdout.splitlines() if re.match(r" *\d", line)]
    assert len(losses) == 11 and losses[0] > 5 and losses[-1] < loss
    assert found.stdout.splitlines()[-1] == "largest difference: 0.0"


def test_a_server_goes_on_through_a_loss() -> None:
    found = run_python(ROOT / "examples" / "serve_through_a_loss.py", "--steps", "60", "--lose-at", "20")
    assert found.returncode == 0, found.stdout + found.stderr
    lines = found.stdout.splitlines()
    assert sum(line.endswith(": all tokens are those of a run without a loss") for line in lines) == 4
    assert sum(line.endswith(": on 4 ranks again") for line in lines) == 3


def curve(printed: str, ranks: int) -> tuple[list[float], str]:
    """The losses on one rank that an example prints, and its last line."""
    lines = printed.splitlines()
    assert lines[0].startswith(f"step   {ranks} ranks    one rank")
    return [float(line.split()[2]) for line in lines[1:-1]], lines[-1]


def run_example(script: str, steps: int, ranks: int) -> tuple[list[float], str]:
    """An example as users start it."""
    found = run_python(ROOT / "examples" / script, "--steps", str(steps), "--ranks", str(ranks))
    assert found.returncode == 0, found.stdout + found.stderr
    return curve(found.stdout, ranks)


def _called(rank: int, group: Any, target: str, job: dict[str, Any]) -> Any:
    module, function = target.split(":")
    return getattr(importlib.import_module(module), function)(group, **job)


@pytest.fixture
def example_on_forks(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str, int, int], tuple[list[float], str]]:
    """run_example() in this process, with ranks that are forks of it: none imports torch anew."""
    import two_runs

    def run(script: str, steps: int, count: int) -> tuple[list[float], str]:
        def launch(target: str, job: dict[str, Any], processes: int) -> list[Any]:
            return ranks.run(processes, _called, target, job)

        monkeypatch.setattr(two_runs, "launch", launch)
        monkeypatch.setattr(sys, "argv", [script, "--steps", str(steps), "--ranks", str(count)])
        assert importlib.import_module(script.removesuffix(".py")).main() == 0
        return curve(capsys.readouterr().out, count)

    return run


def test_a_recommendation_model_learns(example_on_forks: Callable[..., tuple[list[float], str]]) -> None:
    losses, last = example_on_forks("dlrm.py", 10, 2)
    assert losses[-1] < 0.95 * losses[0] and last == "largest difference: 0.0"


def test_a_tensor_parallel_mlp_learns(example_on_forks: Callable[..., tuple[list[float], str]]) -> None:
    losses, last = example_on_forks("tensor_parallel_mlp.py", 10, 2)
    assert losses[-1] < 0.8 * losses[0] and last.startswith("largest relative difference: 0.00")


@pytest.mark.parametrize(("attention", "experts"), few([(3, 2), (1, 4), (6, 1)], (3, 2)))
def test_attention_and_experts_on_different_ranks(
    attention: int, experts: int, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import attention_and_experts as example

    def launch(target: str, job: dict[str, Any], processes: int) -> list[Any]:
        return ranks.run(processes, _called, target, job)

    monkeypatch.setattr(example, "launch", launch)
    monkeypatch.setattr(sys, "argv", ["example", "--attention", str(attention), "--experts", str(experts)])
    assert example.main() == 0
    *found, last = capsys.readouterr().out.splitlines()
    assert last == "the tokens of one process: the same" and len(found) == attention + experts
    assert [int(line.split()[2]) for line in found] == [12 // attention] * attention + [0] * experts


@pytest.mark.parametrize("steps", few([6, 60], 6))
def test_a_trainer_finds_the_logits_of_the_engine(
    steps: int, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import train_and_sample as example

    def launch(target: str, job: dict[str, Any], processes: int) -> list[Any]:
        return ranks.run(processes, _called, target, job)

    monkeypatch.setattr(example, "launch", launch)
    monkeypatch.setattr(sys, "argv", ["example", "--steps", str(steps)])
    assert example.main() == 0
    _, *lines, last = capsys.readouterr().out.splitlines()
    assert last == "logits of trainer and engine: equal to the bit"
    means = [float(line.split()[1]) for line in lines]
    assert means[0] < 0.2 and (steps < 60 or means[-1] > 0.9)


@pytest.mark.long
def test_a_recommendation_model_learns_the_same_on_several_ranks_and_on_one() -> None:
    losses, last = run_example("dlrm.py", 200, 4)
    assert losses[-1] < 0.3 * losses[0] and last == "largest difference: 0.0"


@pytest.mark.long
def test_a_tensor_parallel_mlp_learns_the_same_on_several_ranks_and_on_one() -> None:
    losses, last = run_example("tensor_parallel_mlp.py", 200, 4)
    assert losses[-1] < 0.3 * losses[0] and last.startswith("largest relative difference: 0.00")


def torchrun(processes: int, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return run_python(*command, ROOT / "examples" / script, *arguments, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")


@pytest.mark.long
def test_training_under_torchrun_uses_the_ranks_of_torchrun() -> None:
    found = torchrun(2, "train_language_model.py", "--steps", "2")
    assert found.returncode == 0, found.stdout + found.stderr
    lines = [line for line in found.stdout.splitlines() if line]
    assert lines[0] == "step   2 ranks    one rank   (nats a byte)"
    assert lines[-1] == "largest difference: 0.0" and len(lines) == 5


@torch.no_grad()
def test_the_decode_loop_computes_its_layer_at_every_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import decode_in_a_graph as example

    monkeypatch.setattr(example, "STEPS", 2)
    found = example.decode("self").float()
    on_gpu = torch.cuda.is_available() and moecomm.doctor().backends[1].can_run
    assert ("no GPU" in capsys.readouterr().out) is not on_gpu
    assert torch.equal(example.decode("self", graph=False).float(), found)

    gate = Gate(Gating(example.HIDDEN, example.EXPERTS, example.TOPK))
    alone = SimpleNamespace(rank=0, num_ranks=1, device="cpu", dtype=torch.bfloat16)
    w13, w2 = (w.float() for w in example.weights(alone))
    generator = torch.Generator().manual_seed(100)
    state = torch.randn(example.SEQUENCES, example.HIDDEN, generator=generator).bfloat16().float()
    for _ in range(2):
        topk_idx, weights = gate(state)
        inner = torch.einsum("th,tkih->tki", state, w13[topk_idx])
        gates, ups = inner.chunk(2, dim=2)
        y = torch.einsum("tki,tkhi->tkh", torch.nn.functional.silu(gates) * ups, w2[topk_idx])
        total = state + (y * weights.unsqueeze(2)).sum(dim=1)
        state = torch.nn.functional.rms_norm(total, (example.HIDDEN,)).bfloat16().float()
    torch.testing.assert_close(found, state, rtol=0.05, atol=0.05)  # some roundings of 2^-8 a step


def _custom(rank: int, group: Any) -> list[Any]:
    import custom_experts as example

    return [tensor.tolist() for tensor in example.main(group)]


def test_custom_experts_on_two_ranks_are_those_on_one(ranks: Ranks) -> None:
    """Output and gradient of the first rank's tokens, against every expert applied to every token."""
    import custom_experts as example

    found = ranks.run(2, _custom)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(example.TOKENS, example.HIDDEN, generator=generator).requires_grad_()
    topk_idx = torch.rand(example.TOKENS, example.EXPERTS, generator=generator).topk(example.TOPK).indices
    experts = example.LowRankExperts(0, example.EXPERTS)
    rows = x.repeat(example.EXPERTS, 1)
    every = experts(rows, torch.full((example.EXPERTS,), example.TOKENS)).view(example.EXPERTS, example.TOKENS, -1)
    out = every[topk_idx.T, torch.arange(example.TOKENS)].mean(dim=0)
    out.square().mean().backward()
    torch.testing.assert_close(torch.tensor(found[0][0]), out.detach())
    torch.testing.assert_close(torch.tensor(found[0][1]), x.grad)


def test_the_microbenchmark_is_short_and_measures() -> None:
    import microbenchmark as example

    code = inspect.getsource(example.median_us).splitlines()
    assert len(code) <= 20
    assert 0 < example.median_us("self", tokens=4, hidden=64, experts=4, topk=2) < 1e6


@pytest.mark.parametrize("steps", ["0", "-3"])
def test_no_steps_are_named(steps: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import train_language_model as example

    monkeypatch.setattr(sys, "argv", ["train_language_model.py", "--steps", steps])
    monkeypatch.setattr(example, "launch", lambda target, job, ranks: [[]])
    with pytest.raises(SystemExit) as ended:
        example.main()
    assert ended.value.code == 2 and f"--steps: got {steps}" in capsys.readouterr().err


def test_another_curve_is_exit_code_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import train_language_model as example

    monkeypatch.setattr(sys, "argv", ["train_language_model.py", "--steps", "2"])
    monkeypatch.setattr(example, "launch", lambda target, job, ranks: [[5.0, 4.0 if ranks == 1 else 4.5]])
    assert example.main() == 1
    assert capsys.readouterr().out.splitlines()[-1] == "largest difference: 0.5"


@pytest.mark.parametrize(
    ("script", "missing", "command"),
    [
        ("megatron_layer", "megatron", "pip install megatron-core"),
        ("vllm_layer", "vllm", "pip install vllm"),
        ("window_halo_triton", "triton", "pip install triton"),
        ("window_ring_triton", "triton", "pip install triton"),
        ("window_source", "cuda", r"pip install 'moecomm\[cu13\]'"),
    ],
)
def test_an_example_says_what_installs_the_framework_that_it_lacks(
    script: str, missing: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name == script or name.partition(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)

    def run() -> None:
        example = importlib.import_module(script)
        example.main("self") if script == "vllm_layer" else example.cubin("")

    with pytest.raises(SystemExit, match=rf"{missing}.*; install it: {command}$"):
        run()
    monkeypatch.delitem(sys.modules, script, raising=False)


def packages(nodes: Iterable[ast.AST]) -> set[str]:
    """The packages that imports among these nodes name."""
    found = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    found += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in found}


def test_every_example_says_what_installs_a_package_beside_torch() -> None:
    examples = list((ROOT / "examples").glob("*.py"))
    known = {*sys.stdlib_module_names, "torch", "moecomm", *(path.stem for path in examples)}
    for path in examples:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        guarded = packages([inner for node in nodes if isinstance(node, ast.With) for inner in node.body])
        assert packages(nodes) - known <= guarded, path.name
