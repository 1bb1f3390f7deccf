"""The experts of each rank: consecutive ones.  The first E % R ranks have one more than the others.

ExpertRanges of csrc/protocol/slots.h has the same for kernels and the host executor.
"""

from __future__ import annotations

import torch


def experts_of(rank: int, num_experts: int, ranks: int) -> range:
    """Return the experts of a rank."""
    least, longer = divmod(num_experts, ranks)
    first = rank * least + min(rank, longer)
    return range(first, first + least + (rank < longer))


def most_experts(num_experts: int, ranks: int) -> int:
    """Return the most experts that a rank has."""
    return -(-num_experts // ranks)


def owners_of(ids: torch.Tensor, num_experts: int, ranks: int) -> torch.Tensor:
    """Return the rank of each expert, in the shape and dtype of `ids`; -1 of those below 0."""
    least, longer = divmod(num_experts, ranks)
    each = max(least, 1)  # of fewer experts than ranks, all are in front of `begin`
    owners = ids.div(each, rounding_mode="floor")
    if longer:
        begin = longer * (least + 1)  # first expert of a rank that has not one more
        wide = ids.div(least + 1, rounding_mode="floor")
        owners = torch.where(ids < begin, wide, longer + (ids - begin).div(each, rounding_mode="floor"))
    return owners.clamp(min=-1)
