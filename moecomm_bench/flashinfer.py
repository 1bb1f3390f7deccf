"""FlashInfer's one-sided all-to-all over NVLink on the same rows, where it is installed: pairs alone.

Its ranks wait for the number of a round, not for it or a later one, in words that dispatch and combine share.  Only
calls in turn, as a layer makes them, are sure to end, so neither is timed by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moecomm.errors import Unsupported
from moecomm_bench.case import GIVEN, RoundsCase
from moecomm_bench.clock import Timed
from moecomm_bench.ours import Input, Ours, cast_before

NAME = "flashinfer"
_BACKEND = "nvlink_one_sided"


class FlashInfer:
    """Its communicator, opened for each size.  Collective.

    Rows are those of layout "flat": one for each (token, rank), in the places of their source ranks.  A combine takes
    them from the communicator's memory, where experts would have written them.
    """

    def __init__(self, case: RoundsCase) -> None:
        self._case = case
        self.version = ""

    def ways(self) -> dict[str, Callable[[Ours], list[Timed]]]:
        """Return the communicator by name; it returns the timed calls for the size of `ours`."""
        return {NAME: self._calls} if "flat" in self._case.layouts else {}

    def open(self, tokens: int) -> Any:
        """Open a communicator for so many tokens of a rank."""
        try:
            import flashinfer
            from flashinfer import moe_ep
        except Exception as error:
            raise Unsupported(f"{NAME}: can't be imported ({error})") from error
        self.version = str(flashinfer.__version__)
        case, ranks = self._case, torch.distributed.group.WORLD
        assert ranks is not None
        bootstrap = moe_ep.BootstrapConfig(
            world_size=case.ranks, rank=ranks.rank(), device=torch.cuda.current_device(), process_group=ranks
        )
        params = moe_ep.MoEEpCommParams(
            num_experts=case.experts,
            top_k=case.topk,
            max_tokens_per_rank=tokens,
            hidden_size=case.hidden,
            dtype=torch.bfloat16,
        )
        return moe_ep.create_communication(bootstrap, params, _BACKEND)

    def _calls(self, ours: Ours) -> list[Timed]:
        communicator = self.open(ours.tokens)
        about = {"what": "pair", "layout": "flat", "sms": 0, "version": self.version}
        return [
            Timed({**about, "payload": payload}, [pair(communicator, given, payload) for given in ours.inputs])
            for payload in self._case.payloads
            if payload in ("bf16", "fp8") or payload.endswith(GIVEN)
        ]


def pair(communicator: Any, given: Input, payload: str) -> Callable[[], torch.Tensor]:
    """Return a dispatch and a combine of an input; rows but for bf16 are cast in advance, as for DeepEP."""
    ids, out = given.topk_idx.int(), torch.empty_like(given.x)
    rows, scales = (given.x, None) if payload == "bf16" else cast_before(given.x, payload)

    def run() -> torch.Tensor:
        arrived = communicator.dispatch(rows, ids, given.topk_weights, hidden_states_scale=scales)
        y = communicator.get_combine_input_buffer(torch.bfloat16)
        if payload == "bf16":
            assert arrived.hidden_states.shape == y.shape
        communicator.combine(y, output=out)
        return out

    return run
