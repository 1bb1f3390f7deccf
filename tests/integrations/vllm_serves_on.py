"""vLLM's engine goes on over moecomm after a loss: four CPU ranks, one of which is killed in the middle of decoding.

    python -m tests.integrations.vllm_serves_on

Needs a CPU build of vLLM: docs/vllm.md, On CPUs.  Ranks serve a small Qwen3-MoE model of random weights in float32,
data and expert parallel, over `deepep_low_latency` with fault tolerance.  Tokens are compared with those of vLLM's
engine on one rank without moecomm:

- requests before the loss, of all ranks;
- requests after it, of the ranks that are left, with an engine in which the weights of the lost experts are zero.

Three parts stand in for what vLLM 0.33 lacks:

- Experts in the batched format on CPUs: NaiveBatchedExperts, vLLM's own reference, which it never chooses by itself.
- Fault tolerance in an engine that runs in its caller's process: set behind the checks of arguments.
- The instruction after a fault.  vLLM's `retry` opens the data-parallel group anew among all ranks, and waits for the
  lost one.  recover() makes the calls of vLLM's two sentinels with a group of the ranks that are left.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import vllm_tokens

from moecomm_bench.ranks import free_port

RANKS, LOST, TOKENS, LIMIT_S = 4, 3, 12, 540.0
EXPERTS = 8  # of the model
DIES_IN = 7  # calls of a layer's experts after the first turn
TURNS = ("before", "lost", "after")


def prompts(rank: int, turn: str) -> list[list[int]]:
    """Return the prompts of a rank.  Those of the turn in which a rank is lost are asked again after it."""
    seed = 100 * rank + (50 if turn != "before" else 0)
    return [vllm_tokens._prompt(seed + number, length) for number, length in enumerate((1, 17, 40))]


def decode(engine: Any, asked: list[list[int]], turn: str) -> list[list[int]]:
    """Return the likeliest tokens behind each prompt.  Collective.

    Raises:
        RuntimeError, MoecommError: a rank is lost.
    """
    from vllm import SamplingParams

    how = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    for number, prompt in enumerate(asked):
        engine.add_request(f"{turn} {number}", {"prompt_token_ids": prompt}, how)
    answers: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():  # on any rank
        for output in engine.step():
            answers[output.request_id] = list(output.outputs[0].token_ids)
        if engine.vllm_config.parallel_config.data_parallel_size > 1:
            from vllm.model_executor.layers.fused_moe.all2all_utils import get_ep_all2all_manager

            if get_ep_all2all_manager().query_fault():  # as vLLM's runner does on GPUs
                raise RuntimeError("Fault detected")
    return [answers[f"{turn} {number}"] for number in range(len(asked))]


def in_place_of_what_vllm_lacks(rank: int) -> dict[str, int]:
    """Put experts for the batched format on CPUs, and fault tolerance, into vLLM.  Returns the calls left to live."""
    from vllm import EngineArgs
    from vllm.model_executor.layers.fused_moe.experts import fused_batched_moe
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    left = {"calls": -1}

    class Experts(fused_batched_moe.NaiveBatchedExperts):  # type: ignore[misc]
        @staticmethod
        def is_supported_config(*args: Any) -> tuple[bool, str | None]:
            return True, None

        def apply(self, *args: Any, **named: Any) -> None:
            left["calls"] -= 1
            if left["calls"] == 0:  # rows have come, and none has returned
                os.kill(os.getpid(), signal.SIGKILL)
            super().apply(*args, **named)

    fused_batched_moe._is_capturing_or_compiling = lambda: False  # theirs asks an accelerator
    unquantized.backend_to_kernel_cls = lambda backend: [Experts]
    checked = EngineArgs.create_engine_config

    def tolerant(*args: Any, **named: Any) -> Any:
        config = checked(*args, **named)
        config.parallel_config.enable_fault_tolerance = True
        return config

    EngineArgs.create_engine_config = tolerant
    return left


def recover(engine: Any, rank: int, port: int) -> None:
    """Make the calls of vLLM's EngineCoreSentinel and WorkerSentinel, and go on without the lost rank."""
    from vllm.distributed import get_dp_group
    from vllm.distributed.utils import (
        stateless_destroy_torch_distributed_process_group,
        stateless_init_torch_distributed_process_group,
    )
    from vllm.model_executor.layers.fused_moe.all2all_utils import get_ep_all2all_manager
    from vllm.v1.request import RequestStatus

    core = engine.engine_core.engine_core
    core.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    engine.output_processor.abort_requests(list(engine.output_processor.request_states), internal=True)
    engine.should_execute_dummy_batch = False
    core.model_executor.driver_worker.worker.worker_sentinel._clean_worker_state()
    manager = get_ep_all2all_manager()
    manager.clean_buffers()
    manager.update_mask(LOST)
    old = engine.dp_group, get_dp_group().cpu_group
    for group in old:  # ranks that wait in a collective for the lost one, or for this one, are told
        stateless_destroy_torch_distributed_process_group(group)
    engine.dp_group, get_dp_group().cpu_group = (
        stateless_init_torch_distributed_process_group("127.0.0.1", port + nth, rank, RANKS - 1, backend="gloo")
        for nth in range(2)
    )


def serve(rank: int, job: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens of each turn; those of the turn in which a rank is lost are not kept."""
    os.environ |= vllm_tokens.environment(job, rank)
    if job["backend"] == "alone":
        filled = vllm_tokens.fill

        def without(model: torch.nn.Module, of: int) -> None:
            filled(model, of)
            for name, parameter in model.named_parameters():
                if job["without"] and name.endswith("experts.w2_weight"):
                    parameter.data[job["without"]] = 0

        vllm_tokens.fill = without
        engine = vllm_tokens.open_engine(job, rank)
        return {turn: [decode(engine, prompts(of, turn), f"{turn} {of}") for of in range(RANKS)] for turn in TURNS}
    left = in_place_of_what_vllm_lacks(rank)
    engine = vllm_tokens.open_engine(job, rank)
    found: dict[str, Any] = {"before": decode(engine, prompts(rank, "before"), "before")}
    if rank == LOST:
        left["calls"] = DIES_IN
    begin = time.monotonic()
    try:
        decode(engine, prompts(rank, "lost"), "lost")
        raise AssertionError("no rank was lost")
    except Exception as error:  # noqa: BLE001 - as vLLM's wrapper of the busy loop takes it
        found["fault"] = f"{type(error).__name__}: {error}"
    recover(engine, rank, job["next_port"])
    found["after"] = decode(engine, prompts(rank, "after"), "after")
    return found | {"seconds": time.monotonic() - begin}


def _rank(rank: int, job: dict[str, Any], folder: Path) -> None:
    faulthandler.dump_traceback_later(LIMIT_S - 20, exit=True)
    try:
        (folder / f"{rank}.json").write_text(json.dumps(serve(rank, job)))
    except BaseException:  # noqa: BLE001 - the parent says it
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # an engine's threads would keep the process


def run(backend: str, ranks: int, without: list[int]) -> list[dict[str, Any]]:
    """Return what each rank that lives on has found."""
    job = {"model": "tiny", "dtype": "float32", "layers": 2, "backend": backend, "ranks": ranks, "gpus": 0}
    job |= {"shared": False, "port": free_port(), "next_port": free_port(), "without": without}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(vllm_tokens.config_of("tiny", 2) | {"dtype": "float32"}))
        job["folder"] = name
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=_rank, args=(rank, job, folder)) for rank in range(ranks)]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(LIMIT_S)
        finally:
            for process in processes:
                process.kill()
                process.join()
        lives = [rank for rank in range(ranks) if ranks == 1 or rank != LOST]
        codes = {rank: processes[rank].exitcode for rank in range(ranks)}
        wanted = {rank: 0 if rank in lives else -signal.SIGKILL for rank in range(ranks)}
        if codes != wanted:
            raise SystemExit(f"exit codes {codes} instead of {wanted}")
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in lives]


def main() -> None:
    """Run the engines, and compare their tokens."""
    lost = list(range(LOST * EXPERTS // RANKS, (LOST + 1) * EXPERTS // RANKS))
    found = run("ll", RANKS, [])
    (whole,), (zeroed,) = run("alone", 1, []), run("alone", 1, lost)
    for rank, of in enumerate(found):
        print(f"rank {rank}: {of['fault'][:100]}; served again after {of['seconds']:.1f} s")
        for turn, wanted in (("before", whole), ("after", zeroed)):
            assert of[turn] == wanted[turn][rank], (rank, turn, of[turn], wanted[turn][rank])
    assert zeroed["after"] != whole["after"], "no token came from a lost expert"
    print(f"{len(found)} ranks: all tokens before and after the loss are those of one rank")


if __name__ == "__main__":
    main()
