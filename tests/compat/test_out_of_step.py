"""A call of deep_ep that fails on one rank before it reaches moecomm: every rank's next one ends in OutOfStep."""

from __future__ import annotations

from collections.abc import Callable
from threading import Barrier
from typing import Any, ClassVar

import pytest
import torch

import moecomm
from moecomm.compat.deep_ep import Buffer, ElasticBuffer, EPBuffer, HybridEPBuffer

from ..backends.conftest import all_ranks

TOKENS, HIDDEN, EXPERTS = 3, 128, 4
X = torch.arange(1, TOKENS + 1).view(-1, 1).expand(-1, HIDDEN).bfloat16().contiguous()
IDX = torch.tensor([[0, 2], [1, 3], [2, 1]])
WEIGHTS = torch.ones(TOKENS, 2)


class Normal:
    """The calls of one rank; a combine without a dispatch before it is wrong."""

    kind: Any = Buffer
    most: tuple[Any, ...] = ()

    def __init__(self, group: Any) -> None:
        self.buffer: Any = self.kind(group, *self.most)
        self.handle: Any = None
        self.rows: Any = None

    def dispatch(self, **wrong: Any) -> None:
        layout = self.buffer.get_dispatch_layout(IDX, EXPERTS)
        given = {"num_tokens_per_expert": layout[2], "topk_idx": IDX, "topk_weights": WEIGHTS, **wrong}
        self.rows, *_, self.handle, _ = self.buffer.dispatch(X, **given)

    def combine(self, handle: Any) -> torch.Tensor:
        out: torch.Tensor = self.buffer.combine(self.rows, handle)[0]
        return out

    def both(self) -> torch.Tensor:
        """LowLatency's dispatch hands out its tensors before they are checked: the combine raises."""
        self.dispatch()
        return self.combine(self.handle)

    wrong: ClassVar[dict[str, Any]] = {"num_tokens_per_expert": None}


class WithoutIds(Normal):
    def dispatch(self, **wrong: Any) -> None:
        layout = self.buffer.get_dispatch_layout(IDX, EXPERTS)
        given = {"num_tokens_per_expert": layout[2], "is_token_in_rank": layout[3], **wrong}
        self.rows, *_, self.handle, _ = self.buffer.dispatch(X, **given)

    wrong: ClassVar[dict[str, Any]] = {"is_token_in_rank": None}


class LowLatency(Normal):
    def dispatch(self, **wrong: Any) -> None:
        given = {"use_fp8": False, "topk_weights": WEIGHTS, **wrong}
        self.rows, _, self.handle, *_ = self.buffer.low_latency_dispatch(X, IDX, 4, EXPERTS, **given)

    def combine(self, handle: Any) -> torch.Tensor:
        out: torch.Tensor = self.buffer.low_latency_combine(self.rows, IDX, WEIGHTS, handle)[0]
        return out

    wrong: ClassVar[dict[str, Any]] = {"use_ue8m0": True}


class Elastic(Normal):
    kind = ElasticBuffer

    def dispatch(self, **wrong: Any) -> None:
        given = {"num_experts": EXPERTS, "num_max_tokens_per_rank": 4, **wrong}
        self.rows, _, _, self.handle, _ = self.buffer.dispatch(X, IDX, **given)

    wrong: ClassVar[dict[str, Any]] = {"num_experts": None}


class EP(Elastic):
    kind = EPBuffer
    wrong: ClassVar[dict[str, Any]] = {"defer_epilogue": True}  # without async_with_compute_stream


class Hybrid(Normal):
    kind = HybridEPBuffer
    most = (HIDDEN, 4, EXPERTS // 2)

    def dispatch(self, **wrong: Any) -> None:
        self.rows, *_, self.handle = self.buffer.dispatch_with_permute(
            **{"hidden": X, "topk_idx": IDX, "num_of_experts": EXPERTS, **wrong}
        )

    def combine(self, handle: Any) -> torch.Tensor:
        out: torch.Tensor = self.buffer.combine_with_unpermute(hidden=self.rows, handle=handle)[0]
        return out

    wrong: ClassVar[dict[str, Any]] = {"num_of_experts": None}


def on_ranks(kind: type[Normal], body: Callable[[Normal, int], Any]) -> list[Any]:
    """No rank closes before the others have seen what they raise."""
    done = Barrier(2)

    def run(group: Any) -> Any:
        calls = kind(group)
        try:
            return body(calls, group.rank)
        finally:
            done.wait(30)
            calls.buffer._pool.close()

    return all_ranks(2, run)


KINDS = [Normal, WithoutIds, LowLatency, Elastic, EP, Hybrid]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", [0, 1], ids=["the first call", "a later call"])
def test_a_dispatch_that_fails_on_one_rank(kind: type[Normal], before: int) -> None:
    def body(calls: Normal, rank: int) -> None:
        for _ in range(before):
            assert torch.equal(calls.both(), 2 * X)
        if rank == 1:
            with pytest.raises(moecomm.BadInput):
                calls.dispatch(**kind.wrong)
        with pytest.raises(moecomm.OutOfStep):
            calls.both()

    on_ranks(kind, body)


@pytest.mark.parametrize("kind", KINDS)
def test_a_combine_that_fails_on_one_rank(kind: type[Normal]) -> None:
    def body(calls: Normal, rank: int) -> None:
        calls.dispatch()
        if rank == 1:
            with pytest.raises(moecomm.BadInput):
                calls.combine(None)
        with pytest.raises(moecomm.OutOfStep):
            calls.combine(calls.handle)

    on_ranks(kind, body)


@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_fail_on_all_ranks_leave_them_in_step(kind: type[Normal]) -> None:
    def body(calls: Normal, rank: int) -> list[bool]:
        same = []
        for _ in range(2):
            with pytest.raises(moecomm.BadInput):
                calls.dispatch(**kind.wrong)
            calls.dispatch()
            with pytest.raises(moecomm.BadInput):
                calls.combine(None)
            same.append(torch.equal(calls.combine(calls.handle), 2 * X))
        return same

    assert on_ranks(kind, body) == [[True] * 2] * 2
