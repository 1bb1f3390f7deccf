"""torch's all-to-all over symmetric memory on the same rows: all_to_all_vdev_2d, and all_to_all_vdev_2d_offset back.

Both take their splits from the device, and move rows through NVSHMEM. Written for torch 2.11, which takes at most 15
experts a rank: DeepSeek-V3 on 18 ranks or more.
"""

from __future__ import annotations

from functools import cached_property
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from moecomm.errors import Unsupported
from moecomm_bench.case import RoundsCase
from moecomm_bench.clock import Timed
from moecomm_bench.exchange import nccl_group
from moecomm_bench.ours import Input, Ours

NAME = "torch-symm-mem"
_MOST_EXPERTS = 15
_LEAST_OPERATORS = ("all_to_all_vdev_2d", "all_to_all_vdev_2d_offset")


def module() -> ModuleType:
    """Return torch's module of symmetric memory, set to NVSHMEM. Raises Unsupported where torch cannot use that."""
    try:
        import torch.distributed._symmetric_memory as found
    except ImportError:
        raise Unsupported(f"{NAME}: this torch has no symmetric memory") from None
    if not all(hasattr(torch.ops.symm_mem, name) for name in _LEAST_OPERATORS):
        raise Unsupported(f"{NAME}: this torch lacks {' or '.join(_LEAST_OPERATORS)}")
    if not found.is_nvshmem_available():
        raise Unsupported(f"{NAME}: this torch finds no NVSHMEM (libnvshmem_host.so.3)")
    found.set_backend("NVSHMEM")
    return found


class TorchOperations:
    """The operations of torch. Collective.

    Rows are those of layout "expert": one for each (token, expert), grouped by expert. As for the other libraries, the
    order of rows is known in advance; a dispatch copies rows into symmetric memory, and a combine takes them from where
    experts would have written them, and adds them with their weights.
    """

    def __init__(self, case: RoundsCase) -> None:
        if (most := -(-case.experts // case.ranks)) > _MOST_EXPERTS:
            raise Unsupported(f"{NAME}: torch takes at most {_MOST_EXPERTS} experts a rank, not {most}")
        self._case, self._module = case, module()

    @cached_property
    def _group(self) -> dist.ProcessGroup:
        return nccl_group()

    def calls(self, ours: Ours) -> list[Timed]:
        """Return the timed calls for the size of `ours`."""
        memory = TorchMemory(self._module, self._group, ours.inputs[0], self._case)
        rounds = [TorchRound(memory, self._group.group_name, given, self._case) for given in ours.inputs]
        about = {"layout": "expert", "sms": 0}
        # Their launches are collective, which a capture does not allow.
        options: dict[str, Any] = {"graph": False, "by_expert": True}
        for found in rounds:
            found.dispatch()  # leaves the offsets that combine starts from
        return [
            Timed({"what": "dispatch", "payload": "bf16", **about}, [found.dispatch for found in rounds], **options),
            Timed({"what": "combine", "payload": "", **about}, [found.combine for found in rounds], **options),
        ]


class TorchMemory:
    """Symmetric memory for the rows of one round, which all inputs share. Collective.

    Attributes:
        sent: rows of a dispatch, `[T * K, H]`.
        arrived: room for the rows of all ranks, where experts would leave theirs.
        home: rows that combine brings back, `[T * K, H]`.
    """

    def __init__(self, module: ModuleType, group: dist.ProcessGroup, given: Input, case: RoundsCase) -> None:
        self._module, self._group, self._device = module, group, given.x.device
        entries = given.topk_idx.numel()
        self.sent, self.home = (self.empty(entries, case.hidden, dtype=torch.bfloat16) for _ in range(2))
        self.arrived = self.empty(entries * case.ranks, case.hidden, dtype=torch.bfloat16)

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a tensor on all ranks alike."""
        made: torch.Tensor = self._module.empty(*shape, dtype=dtype, device=self._device)
        self._module.rendezvous(made, self._group)
        return made


class TorchRound:
    """A dispatch and its combine on one input. Collective."""

    def __init__(self, memory: TorchMemory, name: str, given: Input, case: RoundsCase) -> None:
        self._memory, self._name, self._given = memory, name, given
        ids = given.topk_idx.flatten()
        order = ids.argsort(stable=True)  # entries by expert, and so by rank
        self._token, self._place = order // given.topk_idx.shape[1], order.argsort()
        self._splits = memory.empty(case.experts, dtype=torch.int64)
        self._splits.copy_(torch.bincount(ids, minlength=case.experts))
        self._arriving, self._returned = (memory.empty(2, case.experts, dtype=torch.int64) for _ in range(2))

    def dispatch(self) -> torch.Tensor:
        """Send every row to its expert; returns the memory in which rows arrive."""
        sent, arrived = self._memory.sent, self._memory.arrived
        torch.index_select(self._given.x, 0, self._token, out=sent)
        torch.ops.symm_mem.all_to_all_vdev_2d(sent, arrived, self._splits, self._arriving, self._name)
        return arrived

    def combine(self) -> torch.Tensor:
        """Return the rows that have arrived, and add them, weighted, in float32."""
        arrived, home = self._memory.arrived, self._memory.home
        torch.ops.symm_mem.all_to_all_vdev_2d_offset(arrived, home, self._arriving, self._returned, self._name)
        tokens, topk = self._given.topk_idx.shape
        rows = torch.index_select(home, 0, self._place).view(tokens, topk, -1)
        weighted = torch.bmm(self._given.topk_weights.unsqueeze(1), rows.float()).squeeze(1)
        return weighted.to(self._given.x.dtype)
