"""Megatron-core's `ncclep` dispatcher over moecomm as TransformerEngine's ep, against its all-to-all dispatcher."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("tests.integrations.megatron_core", reason="needs megatron-core: pip install megatron-core")

from megatron.core.transformer.moe import fused_a2a, moe_layer, token_dispatcher

from moecomm.compat import te_ep
from tests.integrations.megatron_on_cpu import built, config_of, over_te_ep, parallel, spec, without_cuda
from tests.integrations.test_megatron import EXACT, results

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": EXACT["bfloat16"],
    "three terms": {"moe_router_topk": 3},
    "sigmoid": EXACT["sigmoid"],
}
TOKENS = (30, 6, 30)  # sequence lengths, of batches of two; it takes no more than in its first step

needs_ncclep = pytest.mark.skipif(
    not hasattr(token_dispatcher, "_NCCLEPManager"), reason="needs a Megatron-core with ncclep, later than 0.19"
)


def errors_of(rank: int, group: Any) -> dict[str, float]:
    """By case, how far outputs and gradients are from theirs, in parts of the largest number of each."""
    without_cuda()
    over_te_ep()
    parallel(2)
    errors = dict.fromkeys(CASES, 0.0)
    for name, settings in CASES.items():
        torch.manual_seed(0)
        theirs = built(spec(), config_of(2, **settings))
        chosen = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "ncclep"}
        flex = built(spec(), config_of(2, **settings, **chosen))
        flex.load_state_dict(theirs.state_dict())
        manager = flex.token_dispatcher._comm_manager
        assert type(flex) is moe_layer.MoELayer and type(manager) is token_dispatcher._NCCLEPManager
        for step, tokens in enumerate(TOKENS):
            dtype = settings.get("params_dtype", torch.float32)
            want, found = (results(layer, rank, tokens, dtype, seed=step) for layer in (theirs, flex))
            assert want[0].any() and want[1].any() and len(want) == len(found) > 2
            for a, b in zip(found, want, strict=True):
                most = float(b.abs().max()) if b.any() else 1.0  # an expert may have no token of anybody
                errors[name] = max(errors[name], float((a - b).abs().max()) / most if b.numel() else 0.0)
        assert te_ep.is_ep_bootstrapped()
        fused_a2a.nccl_ep_finalize()
    return errors


@needs_ncclep
def test_the_layer_is_the_one_with_all_to_all(ranks: Any) -> None:
    """But for the order of sums."""
    for errors in ranks.run(2, errors_of):
        for name, error in errors.items():
            assert error <= (8 * 2.0**-8 if name == "bfloat16" else 64 * 2.0**-24), errors
