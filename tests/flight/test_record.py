"""The format of a flight record: torch's, where it fits."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import moecomm

from ..fresh_python import run_python
from .records import FakeRank

OURS = {"round", "tokens", "captured", "rejected", "call", "error"}
# torch has the thread of a call, and the state of NCCL's communicators.
TORCHS = {"thread_id", "thread_name"}
TORCH = """
import os, torch.distributed as dist, torch
os.environ["TORCH_FR_BUFFER_SIZE"] = "10"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.zeros(4))
print(torch._C._distributed_c10d._dump_fr_trace_json().decode())
"""


def kinds(values: dict[str, Any]) -> dict[str, type]:
    return {name: type(value) for name, value in values.items() if value is not None}


@pytest.mark.long
def test_the_names_are_those_of_torch() -> None:
    told = run_python("-c", TORCH)
    assert told.returncode == 0, told.stderr
    theirs = json.loads(told.stdout[told.stdout.index("{") :])  # after the lines of gloo
    rank = FakeRank(0, 1)
    rank.make([("dispatch", 0)])
    mine = rank.record()
    assert mine["version"] == theirs["version"]
    assert mine.keys() - {"moecomm"} == theirs.keys() - {"nccl_comm_state"}
    assert mine["entries"][0].keys() - OURS == theirs["entries"][0].keys() - TORCHS
    for name, kind in kinds(mine["entries"][0]).items():
        assert name in OURS or kind is type(theirs["entries"][0][name])
    (config,), (our_config,) = theirs["pg_config"].values(), mine["pg_config"].values()
    assert kinds(our_config) == kinds(config)
    assert mine["pg_status"]["0"].keys() == theirs["pg_status"]["0"].keys()


def test_a_record_is_json_with_shapes_and_options() -> None:
    x = torch.ones(3, 256, dtype=torch.bfloat16)
    sizes: dict[str, Any] = {"hidden": 256, "num_experts": 4, "topk": 1, "max_tokens": 8, "backend": "host"}
    with moecomm.Buffer("self", **sizes, timeout_s=7) as buffer:
        routed = buffer.dispatch(x, torch.zeros(3, 1, dtype=torch.int32), layout="batched", quantize="fp8")
        buffer.combine(routed.x.float(), routed.handle, wire="exact")
        record = json.loads(json.dumps(buffer.flight_record()))
    sent, returned = record["entries"]
    assert sent["input_sizes"] == [[3, 256]] == returned["output_sizes"]
    assert (sent["input_dtypes"], returned["output_dtypes"]) == (["Float8_e4m3fn"], ["Float"])
    assert sent["call"] == {
        "layout": "batched",
        "dtype": "bfloat16",
        "quantize": "fp8",
        "scale bytes": "8",
        "expert_alignment": "1",
    }
    assert returned["call"] == {"layout": "batched", "dtype": "float32", "wire": "float32", "weighted": "True"}
    assert sent["timeout_ms"] == 7000 and sent["process_group"][1] == record["pg_config"]["0"]["desc"]
    assert 0 < sent["time_created_ns"] <= sent["time_discovered_completed_ns"] <= returned["time_created_ns"]
    assert record["moecomm"]["written_ns"] - returned["time_created_ns"] < 60e9
