"""Megatron-core's own flex dispatcher over moecomm as deep_ep, against its all-to-all dispatcher, on CPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("tests.integrations.megatron_core", reason="needs megatron-core: pip install megatron-core")

from megatron.core.transformer.moe import fused_a2a, moe_layer, token_dispatcher

from moecomm.compat import deep_ep
from tests.integrations.megatron_on_cpu import built, config_of, over_deep_ep, parallel, spec, without_cuda
from tests.integrations.test_megatron import EXACT, results

BACKENDS: dict[str, tuple[type, type]] = {
    "deepep": (token_dispatcher._DeepepManager, deep_ep.Buffer),
    "hybridep": (token_dispatcher._HybridEPManager, deep_ep.HybridEPBuffer),
}
PADDED = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": EXACT["bfloat16"],
    "three terms": {"moe_router_topk": 3},
    "dropped": EXACT["dropped"],
    "padded to capacity": PADDED,  # which Megatron has for one of the two
}
# Sequence lengths of the ranks, of batches of two, step by step: of either rank more than there was room for.
TOKENS = [(5, 3), (2, 80), (150, 1), (6, 6)]
ALIKE = [(6, 6), (60, 60), (9, 9)]  # where all ranks pad to the same


def errors_of(rank: int, group: Any, backend: str) -> dict[str, float]:
    """By case, how far outputs and gradients are from theirs, in parts of the largest number of each."""
    without_cuda()
    over_deep_ep()
    parallel(2)
    manager, buffer = BACKENDS[backend]
    errors = dict.fromkeys(CASES, 0.0)
    for name, settings in CASES.items():
        if settings is PADDED and backend == "deepep":
            continue
        torch.manual_seed(0)
        theirs = built(spec(), config_of(2, **settings))
        chosen = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": backend}
        flex = built(spec(), config_of(2, **settings, **chosen))
        flex.load_state_dict(theirs.state_dict())
        assert type(flex) is moe_layer.MoELayer and type(flex.token_dispatcher._comm_manager) is manager
        fused_a2a.reset_hybrid_ep_buffer()  # so that each case has a first call
        for step, tokens in enumerate(ALIKE if settings is PADDED else TOKENS):
            dtype = settings.get("params_dtype", torch.float32)
            want, found = (results(layer, rank, tokens[rank], dtype, seed=step) for layer in (theirs, flex))
            assert want[0].any() and want[1].any() and len(want) == len(found) > 2
            for a, b in zip(found, want, strict=True):
                most = float(b.abs().max()) if b.any() else 1.0  # an expert may have no token of anybody
                errors[name] = max(errors[name], float((a - b).abs().max()) / most if b.numel() else 0.0)
        assert type(fused_a2a._buffer if backend == "deepep" else fused_a2a._hybrid_ep_buffer) is buffer
    return errors


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_layer_is_the_one_with_all_to_all(ranks: Any, backend: str) -> None:
    """But for the order of sums."""
    for errors in ranks.run(2, errors_of, backend):
        for name, error in errors.items():
            assert error <= (8 * 2.0**-8 if name == "bfloat16" else 64 * 2.0**-24), errors
