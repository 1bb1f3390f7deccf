"""Choice between a fused and an unfused layer, for `fused=None`: by the tuning table of rank 0."""

from __future__ import annotations

import torch

from moecomm import tuning
from moecomm.ranks.group import Rendezvous
from moecomm.ranks.settings import Settings

_WEIGHTS = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def faster(gpu: str, settings: Settings) -> dict[torch.dtype, bool]:
    """Return for each dtype of weights whether a fused layer is the faster one, in a full Buffer of these sizes.

    By the user's table for the GPU, else the shipped one.  A number of ranks that neither has is unfused.
    """
    of_rank = settings.max_tokens * settings.topk
    of_expert = of_rank * settings.ranks / settings.held_by_all
    found = {}
    for dtype in _WEIGHTS:
        bounds = tuning.fused_from(gpu, tuning.name_of(dtype), settings.ranks)
        found[dtype] = bounds is not None and bounds.cover(of_expert, of_rank)
    return found


def agree(ranks: Rendezvous, settings: Settings, device: torch.device) -> dict[torch.dtype, bool]:
    """Return faster() of rank 0.  Collective.

    Users of different hosts may have different tables, and a layer that only some ranks fuse would time out.

    Raises:
        As Rendezvous.all_gather.
    """
    if device.type == "cpu":  # whose layers are never fused
        return {}
    mine = faster(torch.cuda.get_device_name(device), settings)
    everybody = ranks.all_gather(bytes(mine.values()))
    return dict(zip(mine, map(bool, everybody[0]), strict=True))
