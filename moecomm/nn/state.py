"""States of models with ExpertParallel layers: one rank's with all experts, cut into those of several, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from moecomm.errors import BadInput
from moecomm.rendezvous import rendezvous
from moecomm.whole import check_whole, is_whole

if TYPE_CHECKING:
    import torch.distributed as dist

SHARDED = ("experts.w13", "experts.w2")  # ends of the names of what is cut, along the experts


def is_sharded(name: str) -> bool:
    """Whether a tensor of that name has a part on every rank; the others are the same on all."""
    return any(name == end or name.endswith(f".{end}") for end in SHARDED)


def shard_state(state: Mapping[str, torch.Tensor], rank: int, num_ranks: int) -> dict[str, torch.Tensor]:
    """The state of one rank, out of one with the weights of all experts.

    Args:
        state: a state_dict of a model, all of whose ExpertParallel layers have `[E, ...]` weights.
        rank: whose state.
        num_ranks: R, of the group.

    Returns:
        The same names; weights of experts are views of `[E/R, ...]`.

    Raises:
        BadInput: weights that can't be cut into R parts.
    """
    check_whole("num_ranks", num_ranks, 1)
    if not is_whole(rank) or not 0 <= rank < num_ranks:
        raise BadInput("rank", repr(rank), f"0 to {num_ranks - 1}")
    cut = {}
    for name, tensor in state.items():
        if is_sharded(name):
            if tensor.shape[0] % num_ranks:
                raise BadInput("state", f"{tensor.shape[0]} experts in {name}", f"a multiple of {num_ranks} ranks")
            tensor = tensor.chunk(num_ranks)[rank]
        cut[name] = tensor
    return cut


def gather_state(
    state: Mapping[str, torch.Tensor], group: dist.ProcessGroup | str | None = None
) -> dict[str, torch.Tensor]:
    """The state with the weights of all experts, out of every rank's.  Collective.

    Args:
        state: this rank's state_dict.
        group: of the ExpertParallel layers, with a backend that moves the tensors' kind; "self": one rank; None:
            see Buffer.

    Returns:
        The same names; weights of experts are `[E, ...]`, on every rank.
    """
    if group is None or isinstance(group, str):
        rendezvous(group)  # raises unless it is one rank
        return dict(state)
    import torch.distributed as dist

    whole = {}
    for name in sorted(state):  # in one order on all ranks
        tensor = state[name].detach()
        if is_sharded(name):
            parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
            dist.all_gather(parts, tensor.contiguous(), group=group)
            tensor = torch.cat(parts)
        whole[name] = tensor
    return {name: whole[name] for name in state}
