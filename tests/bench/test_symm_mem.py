"""torch's all-to-all over symmetric memory: called so that rows reach their experts and return, by a stand-in."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from moecomm.errors import Unsupported
from moecomm_bench import symm_mem
from moecomm_bench.ours import Ours
from moecomm_bench.peers import Peers

from ..conftest import Ranks
from .test_case import CASE as SIZES

CASE = dataclasses.replace(SIZES, ranks=2, replays=2, ceiling=False, layouts=["expert"], inputs=2, experts=8)
NAMES = ["torch-symm-mem", "deep_ep"]


def _gathered(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
    found = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(found, tensor, group=group)
    return found


def _exchanged(rows: list[list[torch.Tensor]], group: Any) -> list[torch.Tensor]:
    """The chunks that each rank has for this one, in order of ranks; `rows` has those for each rank."""
    mine, sizes = (
        torch.cat([chunk for chunks in rows for chunk in chunks]),
        torch.tensor([list(map(len, c)) for c in rows]),
    )
    counts = _gathered(sizes, group)
    padded = mine.new_zeros(max(int(count.sum()) for count in counts), mine.shape[1])
    padded[: len(mine)] = mine
    found = []
    for count, theirs in zip(counts, _gathered(padded.view(torch.uint8), group), strict=True):
        chunks = theirs.view(mine.dtype)[: int(count.sum())].split(count.flatten().tolist())
        found += chunks[group.rank() * count.shape[1] :][: count.shape[1]]
    return found


class Operators:
    """The operators by torch's description, on CPUs: chunks by rank and expert become chunks by expert and rank."""

    def __init__(self, group: Any) -> None:
        self.group, self.calls = group, []

    def all_to_all_vdev_2d(self, sent: Any, out: Any, splits: Any, arriving: Any, name: str) -> None:
        self.calls.append(("dispatch", name))
        chunks, local = list(sent.split(splits.tolist())), len(splits) // self.group.size()
        by_rank = [chunks[rank * local : (rank + 1) * local] for rank in range(self.group.size())]
        came = _exchanged(by_rank, self.group)
        came = [came[rank * local + expert] for expert in range(local) for rank in range(self.group.size())]
        self._place(came, out, arriving)

    def all_to_all_vdev_2d_offset(self, y: Any, out: Any, arriving: Any, returned: Any, name: str) -> None:
        self.calls.append(("combine", name))
        ranks, (splits, offsets) = self.group.size(), arriving.tolist()
        chunks = [y[at : at + count] for count, at in zip(splits, offsets, strict=True)]
        came = _exchanged([chunks[rank::ranks] for rank in range(ranks)], self.group)
        self._place(came, out, returned)

    def _place(self, came: list[torch.Tensor], out: torch.Tensor, about: torch.Tensor) -> None:
        counts = torch.tensor([len(chunk) for chunk in came])
        about.copy_(torch.stack([counts, counts.cumsum(0) - counts]))
        out[: int(counts.sum())] = torch.cat(came)


def _round(rank: int, group: Any) -> list[Any]:
    operators = Operators(group)
    module = SimpleNamespace(empty=torch.empty, rendezvous=lambda made, group: None)
    found: list[Any] = []
    with (
        patch.object(symm_mem, "module", lambda: module),
        patch.object(symm_mem, "nccl_group", lambda: group),
        patch.object(torch.ops, "symm_mem", operators),
        Ours(CASE, group, torch.device("cpu"), 6) as ours,
    ):
        timed = symm_mem.SymmetricMemory(CASE).calls(ours)
        about = [(one.about["what"], one.about["layout"], one.graph, one.by_expert) for one in timed]
        dispatch, combine = timed
        for given, send, bring in zip(ours.inputs, dispatch.calls, combine.calls, strict=True):
            arrived = ours.buffer.dispatch(given.x, given.topk_idx, given.topk_weights, layout="expert")
            rows = send()[: len(arrived.x)]
            wanted = given.x.float() * given.topk_weights.sum(dim=1, keepdim=True)
            found.append((torch.equal(rows, arrived.x), torch.allclose(bring().float(), wanted, rtol=2**-8)))
    return [about, found]


def test_rows_arrive_as_ours_do_and_come_home_weighted(ranks: Ranks) -> None:
    about = [("dispatch", "expert", False, True), ("combine", "expert", False, True)]
    for got, found in ranks.run(2, _round):
        assert got == about
        assert all(arrives for arrives, _ in found)
        assert all(returned for _, returned in found)


def _absent(rank: int, group: Any) -> list[tuple[str, str]]:
    case = dataclasses.replace(CASE, others=NAMES)
    peers = Peers(case, group, torch.device("cpu"))
    with Ours(case, group, torch.device("cpu"), 6) as ours:
        return [(row["who"], row.get("why", "")) for row in peers.rows(ours, lambda text: None)]


def test_those_that_are_asked_for_and_absent_are_named(ranks: Ranks) -> None:
    for found in ranks.run(2, _absent):
        assert found[:2] == [("gloo", "")] * 2
        whys = dict(found[2:])
        assert list(whys) == ["deep_ep", "torch-symm-mem"]
        assert whys["deep_ep"] == "Unsupported: deep_ep: not for cpu"
        assert whys["torch-symm-mem"].startswith("Unsupported: torch-symm-mem: this torch")


@pytest.mark.parametrize("lacks", ["operators", "nvshmem"])
def test_torch_without_them_is_unsupported(monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    import torch.distributed._symmetric_memory as real

    monkeypatch.setattr(real, "is_nvshmem_available", lambda: lacks != "nvshmem")
    if lacks == "operators":
        monkeypatch.setattr(torch.ops, "symm_mem", SimpleNamespace())
    with pytest.raises(Unsupported, match="lacks all_to_all" if lacks == "operators" else "finds no NVSHMEM"):
        symm_mem.module()


def test_more_experts_than_torch_takes_are_unsupported() -> None:
    with pytest.raises(Unsupported, match="at most 15 experts a rank, not 16"):
        symm_mem.SymmetricMemory(dataclasses.replace(CASE, experts=32))
