"""Hugging Face transformers: a small model whose experts are distributed over CPU ranks, and experts of its models."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import moecomm

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="needs transformers, installed: python -m tests.integrations.versions transformers",
)
PROMPTS = 4, 7  # and their tokens


def model_of(folder: Path, **how: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager", **how)


def make(folder: Path, kind: str = "Qwen3Moe") -> None:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    own = {
        "Qwen3Moe": {"intermediate_size": 32, "moe_intermediate_size": 24, "num_experts": 8, "decoder_sparse_step": 1},
        "GptOss": {"intermediate_size": 32, "num_local_experts": 8, "layer_types": ["full_attention"] * 2},
    }[kind]
    how = {"vocab_size": 64, "head_dim": 16, "num_experts_per_tok": 3, "initializer_range": 0.3}
    config = getattr(transformers, f"{kind}Config")(**sizes, **own, **how)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)


def both(folder: Path, ranks: int, **settings: Any) -> tuple[Any, Any]:
    """A model over the ranks, and the same on one."""
    from transformers.distributed import DistributedConfig

    from moecomm.integrations.transformers import register

    register(**settings)
    how = DistributedConfig(tp_size=ranks, ep_size=ranks, ep_implementation="moecomm")
    return model_of(folder, distributed_config=how), model_of(folder)


def off(found: torch.Tensor, want: torch.Tensor) -> float:
    found = getattr(found, "full_tensor", lambda: found)()
    return float((found.detach() - want.detach()).abs().max() / want.detach().abs().max())


def prompts() -> torch.Tensor:
    return torch.randint(0, 64, PROMPTS, generator=torch.Generator().manual_seed(1))


def _same(rank: int, group: Any, folder: Path) -> tuple[float, bool, float]:
    """How far logits are off, whether the tokens that follow are the same, and how far the gradient is off."""
    from moecomm.integrations.transformers import ExpertParallel

    ours, theirs = both(folder, group.size())
    with pytest.MonkeyPatch.context() as patch:
        calls = []
        call = ExpertParallel.__call__
        patch.setattr(ExpertParallel, "__call__", lambda *given: (calls.append(1), call(*given))[1])
        ids = prompts()
        with torch.no_grad():
            found, want = ours(ids).logits, theirs(ids).logits
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        same = torch.equal(ours.generate(ids, **options), theirs.generate(ids, **options))
        for model in (ours, theirs):
            model(ids, labels=ids).loss.backward()
        assert len(calls) == 2 * (1 + 6 + 1)
    name = next(name for name, _ in theirs.named_parameters() if name.endswith(("gate.weight", "router.weight")))
    return off(found, want), same, off(*(dict(model.named_parameters())[name].grad for model in (ours, theirs)))


@pytest.mark.parametrize("kind", ["Qwen3Moe", "GptOss"])
def test_logits_tokens_and_gradients_are_those_of_one_rank(ranks: Any, tmp_path: Path, kind: str) -> None:
    """The eager experts of GPT-OSS, and of some more, take no id that is none of their experts'."""
    make(tmp_path, kind)
    ranks.start(2, _same, tmp_path)
    for result in ranks.results(2, timeout_s=240).values():
        assert not isinstance(result, BaseException), result
        error, same, gradient = result
        assert error < 1e-5 and same and gradient < 1e-5, result


def _step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """A pass forward and back; the gradient of a weight below all experts."""
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    grad: torch.Tensor = model.model.layers[0].self_attn.q_proj.weight.grad.clone()
    return grad


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "to_local", lambda: tensor)()


def _one_model_after_another(rank: int, group: Any, folder: Path) -> tuple[list[float], bool]:
    """Longer prompts, the same model loaded once more, and routing to the experts of one rank alone.

    Return how far gradients are off, and whether the experts of this rank had tokens then.
    """
    errors, ours = [], None
    for most in (None, 3):  # the second model begins with a smaller Buffer than the first has
        kept, (ours, theirs) = ours, both(folder, group.size(), timeout_s=60, max_tokens=most)
        for length in (5, 70, 3, 90):
            ids = torch.randint(0, 64, (4, length), generator=torch.Generator().manual_seed(length))
            errors.append(off(_step(ours, ids), _step(theirs, ids)))
    errors.append(off(_step(kept, ids), _step(theirs, ids)))
    for model in (ours, theirs):
        for layer in model.model.layers:
            torch.nn.init.zeros_(_local(layer.mlp.gate.weight))  # all tokens pick the same experts
    errors.append(off(_step(ours, ids), _step(theirs, ids)))
    grads = [p.grad for layer in ours.model.layers for p in layer.mlp.experts.parameters()]
    assert all(grad is not None for grad in grads), "no gradient where others have one: FSDP would wait"
    return errors, any(bool(_local(grad).any()) for grad in grads)


def _compiled(rank: int, group: Any, folder: Path, is_warm: bool) -> tuple[float, float, list[int]]:
    """How far logits and gradients are off, and how many graphs each of three passes made."""
    ours, theirs = both(folder, group.size())
    ids, made, graphs = prompts(), [], list[Any]()

    def kept(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    if is_warm:
        ours(ids)
    compiled = torch.compile(ours, backend=kept)
    for _ in range(3):
        found = compiled(ids)
        made.append(len(graphs))
    want = theirs(ids)
    for result in (found, want):
        result.logits.square().mean().backward()
    name = "model.layers.0.mlp.gate.weight"
    grads = [dict(model.named_parameters())[name].grad for model in (ours, theirs)]
    return off(found.logits, want.logits), off(*grads), made


@pytest.mark.parametrize("is_warm", [False, True], ids=["fresh", "after an eager pass"])
def test_a_compiled_model_has_a_graph_break_at_its_experts(ranks: Any, tmp_path: Path, is_warm: bool) -> None:
    make(tmp_path)
    ranks.start(2, _compiled, tmp_path, is_warm)
    for result in ranks.results(2, timeout_s=240).values():
        assert not isinstance(result, BaseException), result
        error, gradient, made = result
        assert error < 1e-5 and gradient < 1e-5, result
        assert made[0] > 1 and made[2] == made[1], "graphs around the experts, which later passes have"


def test_prompts_grow_models_are_loaded_again_and_experts_starve(ranks: Any, tmp_path: Path) -> None:
    make(tmp_path)
    ranks.start(2, _one_model_after_another, tmp_path)
    had_tokens = []
    for result in ranks.results(2, timeout_s=240).values():
        assert not isinstance(result, BaseException), result
        errors, had = result
        assert max(errors) < 1e-5, errors
        had_tokens.append(had)
    assert sorted(had_tokens) == [False, True]


# Of experts that limit what they activate: the module of the model, its config and experts, and the number of a layer.
LIMITED: dict[str, tuple[str, str, str, int | None]] = {
    "DeepSeek-V4": ("deepseek_v4", "DeepseekV4Config", "DeepseekV4Experts", None),
    "GLM-5.3": ("glm5_next", "Glm5NextTextConfig", "Glm5NextTextExperts", None),
    "gpt-oss": ("gpt_oss", "GptOssConfig", "GptOssExperts", None),
    "HY-V4": ("hy_v4", "HYV4Config", "HYV4Experts", None),
    "MiniMax-M3": ("minimax_m3_vl", "MiniMaxM3VLTextConfig", "MiniMaxM3VLExperts", None),
    "Step-3.7": ("step3p7", "Step3p7TextConfig", "Step3p7SparseMoeBlock", 44),
    "Step-3.7, a layer without": ("step3p7", "Step3p7TextConfig", "Step3p7SparseMoeBlock", 3),
}
HIDDEN, INNER, EXPERTS, TOPK, TOKENS = 64, 32, 4, 2, 33


def experts_of(name: str) -> tuple[Any, dict[str, Any]]:
    """Return the model's own experts, with drawn weights, and the arguments of a layer with these."""
    folder, config_class, module_class, number = LIMITED[name]
    module = pytest.importorskip(f"transformers.models.{folder}.modeling_{folder}")
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_local_experts": EXPERTS}
    by_layer = {"n_routed_experts": EXPERTS, "swiglu_limits": [0.0] * 43 + [7.0, 7.0]}
    more = {"gpt_oss": {"intermediate_size": INNER}, "step3p7": by_layer}
    config = getattr(module, config_class)(**sizes, **more.get(folder, {}), experts_implementation="eager")
    made = getattr(module, module_class)(config, *([] if number is None else [number]))
    theirs = getattr(made, "experts", made)
    g = torch.Generator().manual_seed(0)
    for parameter in theirs.parameters():
        parameter.data = torch.randn(parameter.shape, generator=g) * (0.9 if parameter.dim() == 3 else 1)
    w13, w2 = theirs.gate_up_proj, theirs.down_proj
    given = {"w13": w13, "w2": w2}
    if folder == "gpt_oss":  # gate and up columns in turn
        w13, b13 = w13.transpose(1, 2), theirs.gate_up_proj_bias
        given = {"w13": torch.cat((w13[:, 0::2], w13[:, 1::2]), 1), "w2": w2.transpose(1, 2).contiguous()}
        given |= {"w13_bias": torch.cat((b13[:, 0::2], b13[:, 1::2]), 1), "w2_bias": theirs.down_proj_bias}
    return theirs, {**given, **moecomm.checkpoints.activation(config.to_dict(), number)}


@pytest.mark.parametrize("name", LIMITED)
def test_a_layer_has_the_values_and_gradients_of_the_models_experts(name: str) -> None:
    """A tenth of what they activate, or more, is beyond the limits."""
    theirs, given = experts_of(name)
    g = torch.Generator().manual_seed(1)
    x, seen = (torch.randn(TOKENS, HIDDEN, generator=g) for _ in range(2))
    weights = torch.rand(TOKENS, TOPK, generator=g)
    ids = torch.rand(TOKENS, EXPERTS, generator=g).topk(TOPK).indices
    leaves = [x.requires_grad_(), weights.requires_grad_(), *theirs.parameters()]
    want = theirs(x, ids, weights)
    wanted = torch.autograd.grad(want, leaves, seen)
    both = torch.einsum("th,eih->tei", x, given["w13"])
    assert float((both.abs() > given.get("activation_limit", 0)).float().mean()) > 0.1
    sizes: dict[str, Any] = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": TOPK, "max_tokens": TOKENS}
    with moecomm.Buffer("self", **sizes, dtype=torch.float32, device="cpu") as buffer:
        out = moecomm.ops.moe(buffer, x, ids, weights, **given)
        assert off(out, want) < 1e-5
        for got, other in zip(torch.autograd.grad(out, leaves, seen), wanted, strict=True):
            assert off(got, other) < 1e-5
        with torch.no_grad():
            assert torch.equal(buffer.moe(x, ids, weights, **given), out)
