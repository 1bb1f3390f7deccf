"""Signature by signature: moecomm's classes against the stub's, and both against an installed vLLM's source.

The source is read, not imported: vLLM imports what only a machine that serves models has.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations import vllm_stub as stub

MOE = "model_executor/layers/fused_moe"
COMMUNICATORS = "distributed/device_communicators"
INSTALLED = importlib.util.find_spec("vllm")  # before a stub stands in its place


def mine() -> dict[str, type]:
    from moecomm.integrations.vllm.batched import BatchedPrepareAndFinalize
    from moecomm.integrations.vllm.managers import BatchedManager, StandardManager
    from moecomm.integrations.vllm.standard import StandardPrepareAndFinalize

    kinds = [StandardPrepareAndFinalize, BatchedPrepareAndFinalize, StandardManager, BatchedManager]
    return {kind.__name__: kind for kind in kinds}


def parameters(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def methods(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    for base in reversed(kind.__mro__[:-1]):
        for name, value in vars(base).items():
            if inspect.isfunction(value) and not name.startswith("_"):
                yield name, value


@pytest.mark.parametrize("name", ["StandardPrepareAndFinalize", "BatchedPrepareAndFinalize"])
def test_prepare_and_finalize_have_the_signatures_of_the_abstract_class(batches: Any, name: str) -> None:
    kind, base = mine()[name], stub.FusedMoEPrepareAndFinalizeModular
    assert issubclass(kind, base) and not kind.__abstractmethods__
    for method, theirs in methods(base):
        assert parameters(getattr(kind, method)) == parameters(theirs), method
        given = inspect.signature(getattr(kind, method)).parameters
        needed = [p for p, value in given.items() if value.default is value.empty and p != "self"]
        assert set(needed) <= set(parameters(theirs))
    assert isinstance(inspect.getattr_static(kind, "activation_format"), property)


@pytest.mark.parametrize("name", ["StandardManager", "BatchedManager"])
def test_managers_take_what_a_communicator_gives(batches: Any, name: str) -> None:
    kind = mine()[name]
    assert issubclass(kind, stub.All2AllManagerBase)
    assert parameters(kind.__init__) == parameters(stub.All2AllManagerBase.__init__)
    for method in ("get_handle", "set_num_sms", "max_sms_used", "destroy"):
        assert parameters(getattr(kind, method)) == parameters(getattr(stub.All2AllManagerBase, method)), method


class Source:
    """A file of the installed vLLM."""

    def __init__(self, path: str) -> None:
        if INSTALLED is None or not INSTALLED.submodule_search_locations:
            pytest.skip("needs vllm, installed; its source is read")
        self.tree = ast.parse((Path(next(iter(INSTALLED.submodule_search_locations))) / path).read_text())

    def functions(self, kind: str = "") -> dict[str, ast.FunctionDef]:
        body = self.tree.body
        if kind:
            (body,) = [node.body for node in body if isinstance(node, ast.ClassDef) and node.name == kind]
        return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}

    def fields(self, kind: str) -> list[str]:
        (body,) = [node.body for node in self.tree.body if isinstance(node, ast.ClassDef) and node.name == kind]
        return [
            node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        ]


def names(function: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in function.args.args if argument.arg != "self"]


def without_default(function: ast.FunctionDef) -> list[str]:
    given = function.args.args
    return [argument.arg for argument in given[: len(given) - len(function.args.defaults)] if argument.arg != "self"]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (f"{MOE}/modular_kernel.py", "FusedMoEPrepareAndFinalize"),
        (f"{MOE}/modular_kernel.py", "FusedMoEPrepareAndFinalizeModular"),
        (f"{MOE}/modular_kernel.py", "TopKWeightAndReduce"),
        (f"{COMMUNICATORS}/base_device_communicator.py", "All2AllManagerBase"),
    ],
)
def test_the_stub_has_the_signatures_of_vllm(path: str, kind: str) -> None:
    theirs = Source(path).functions(kind)
    stubbed = {name: f for name, f in vars(getattr(stub, kind)).items() if inspect.isfunction(f)}
    for name, function in stubbed.items():
        if kind == "FusedMoEPrepareAndFinalize" and name not in theirs:
            continue  # newer versions have more
        assert parameters(function) == names(theirs[name]), name
    abstract = {name for name, f in theirs.items() if "abstractmethod" in ast.dump(ast.Module(f.decorator_list, []))}
    assert abstract == {
        name for name, f in vars(getattr(stub, kind)).items() if getattr(f, "__isabstractmethod__", False)
    }


def test_the_metadata_has_the_fields_that_are_given() -> None:
    assert {"expert_num_tokens", "expert_num_tokens_cpu"} <= set(
        Source(f"{MOE}/modular_kernel.py").fields("ExpertTokensMetadata")
    )


def test_the_quantizer_and_its_configuration_have_what_is_used() -> None:
    given = ["A", "A_scale", "quant_dtype", "per_act_token_quant", "block_shape", "is_scale_swizzled"]
    assert names(Source(f"{MOE}/utils.py").functions()["moe_kernel_quantize_input"])[: len(given)] == given
    used = {name for name in vars(stub.quant_config()) if name != "is_scale_swizzled"}
    assert used <= set(Source(f"{MOE}/config.py").functions("FusedMoEQuantConfig"))
    assert "is_scale_swizzled" in Source(f"{MOE}/config.py").fields("FusedMoEQuantConfig")
    for name in ("VLLM_DEEPEPLL_NVFP4_DISPATCH", "VLLM_BATCH_INVARIANT"):
        assert name in ast.dump(Source("envs.py").tree)


@pytest.mark.parametrize(
    ("path", "theirs", "name"),
    [
        (f"{MOE}/prepare_finalize/deepep_ht.py", "DeepEPHTPrepareAndFinalize", "StandardPrepareAndFinalize"),
        (f"{MOE}/prepare_finalize/deepep_ll.py", "DeepEPLLPrepareAndFinalize", "BatchedPrepareAndFinalize"),
        (f"{COMMUNICATORS}/all2all.py", "DeepEPHTAll2AllManager", "StandardManager"),
        (f"{COMMUNICATORS}/all2all.py", "DeepEPLLAll2AllManager", "BatchedManager"),
    ],
)
def test_what_takes_deepeps_place_is_made_as_it_is(batches: Any, path: str, theirs: str, name: str) -> None:
    found, kind = Source(path).functions(theirs), mine()[name]
    for method in ("__init__", "maybe_roundup_layer_hidden_size"):
        if method in found:
            assert parameters(getattr(kind, method)) == names(found[method]), method
            needed = [p for p, v in inspect.signature(getattr(kind, method)).parameters.items() if v.default is v.empty]
            assert [p for p in needed if p != "self"] == without_default(found[method]), method


def test_vllm_looks_for_the_names_that_are_set() -> None:
    places = Source(f"{MOE}/all2all_utils.py")
    for function, wanted in (
        ("maybe_make_prepare_finalize", {"DeepEPHTPrepareAndFinalize", "DeepEPLLPrepareAndFinalize"}),
        ("maybe_roundup_layer_hidden_size", {"DeepEPHTPrepareAndFinalize", "DeepEPLLPrepareAndFinalize"}),
        ("maybe_make_prepare_finalize", {"DEEPEP_QUANT_BLOCK_SHAPE"}),
    ):
        used = {node.id for node in ast.walk(places.functions()[function]) if isinstance(node, ast.Name)}
        assert wanted <= used
    text = ast.unparse(Source(f"{COMMUNICATORS}/cuda_communicator.py").tree)
    for name in ("DeepEPHTAll2AllManager", "DeepEPLLAll2AllManager"):
        assert f"from .all2all import {name}" in text and f"{name}(self.cpu_group, tcp_store_group)" in text


def test_what_is_called_of_vllm_is_there(batches: Any) -> None:
    quantizer = names(Source(f"{MOE}/utils.py").functions()["moe_kernel_quantize_input"])
    assert quantizer[1:6] == ["A_scale", "quant_dtype", "per_act_token_quant", "block_shape", "is_scale_swizzled"]
    assert names(Source(f"{MOE}/utils.py").functions()["normalize_batched_scales_shape"]) == ["scales", "num_experts"]
    ubatching = Source("v1/worker/ubatching.py").tree
    there = {node.name for node in ubatching.body if isinstance(node, ast.FunctionDef)}
    there |= {
        t.id for node in ubatching.body if isinstance(node, ast.Assign) for t in node.targets if isinstance(t, ast.Name)
    }
    assert {name for name in vars(batches.module()) if name.startswith("dbo_")} <= there
    config = Source(f"{MOE}/config.py")
    settings = {*config.functions("FusedMoEQuantConfig"), *config.fields("FusedMoEQuantConfig")}
    assert set(vars(stub.quant_config())) <= settings
    reducers = {
        node.name for node in Source(f"{MOE}/topk_weight_and_reduce.py").tree.body if isinstance(node, ast.ClassDef)
    }
    assert {"TopKWeightAndReduceDelegate", "TopKWeightAndReduceContiguous"} <= reducers


def test_vllm_looks_for_no_all_to_all_backend_but_its_own() -> None:
    """Once it has a registry, moecomm can come in by that: then moecomm.integrations.doors is out of date."""
    from moecomm.integrations import doors

    text = ast.unparse(Source(f"{MOE}/all2all_utils.py").tree)
    assert doors._REGISTRY not in text
    chosen = ast.unparse(Source(f"{COMMUNICATORS}/cuda_communicator.py").tree)
    assert "self.all2all_backend == 'deepep_low_latency'" in chosen and "DeepEPLLAll2AllManager" in chosen
    assert INSTALLED is not None and INSTALLED.submodule_search_locations
    layer = Path(next(iter(INSTALLED.submodule_search_locations))) / MOE / "routed_experts.py"
    # A layer of another class (register_oot) makes neither the steps nor the manager.
    assert not layer.exists() or "maybe_make_prepare_finalize" not in layer.read_text()
    assert not layer.exists() or "PluggableLayer" in layer.read_text()


def test_calls_of_vllm_that_change_masks_are_there(batches: Any) -> None:
    from moecomm.compat import nixl_ep

    manager = mine()["BatchedManager"]
    base = Source(f"{COMMUNICATORS}/base_device_communicator.py").functions("All2AllManagerBase")
    for method in ("query_active_mask", "query_fault", "clean_buffers"):
        assert names(base[method]) == parameters(getattr(manager, method)) == []
    (theirs,) = [
        node
        for node in Source(f"{COMMUNICATORS}/all2all.py").tree.body
        if isinstance(node, ast.ClassDef) and node.name == "NixlEPAll2AllManager"
    ]
    made = [node.func for node in ast.walk(theirs) if isinstance(node, ast.Call)]
    called = {f.attr for f in made if isinstance(f, ast.Attribute) and ast.unparse(f.value).endswith("buffer")}
    assert {"update_mask_buffer", "connect_ranks", "query_mask_buffer", "clean_mask_buffer"} <= called
    assert {name for name in called if not hasattr(nixl_ep.Buffer, name)} == set()
    sentinel = "v1/worker/sentinel/gpu_worker_sentinel.py"
    if "deepep_low_latency" in (text := ast.unparse(Source(sentinel).tree) if _has(sentinel) else ""):
        asked = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)]
        used = {node.attr for node in asked if ast.unparse(node.value) in ("get_ep_all2all_manager()", "mgr")}
        assert used and {name for name in used if not hasattr(manager, name)} == set()


def _has(path: str) -> bool:
    assert INSTALLED is not None and INSTALLED.submodule_search_locations
    return (Path(next(iter(INSTALLED.submodule_search_locations))) / path).exists()
