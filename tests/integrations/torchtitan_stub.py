"""The parts of torchtitan 0.3 that moecomm.integrations.torchtitan touches, with their signatures.

No code of torchtitan: what each part has to do is written anew.  test_torchtitan.py compares the signatures with an
installed torchtitan's.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any, ClassVar

import torch

DISPATCHERS = "torchtitan.models.common.token_dispatcher"
OVERRIDES = "torchtitan.config.override"
_OURS = "moecomm.integrations.torchtitan"


class Configurable:
    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[type | None] = None

        def build(self) -> Any:
            assert self._owner is not None
            return self._owner(self)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "Config" in cls.__dict__:
            cls.Config._owner = cls


class LocalTokenDispatcher(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        num_experts: int
        top_k: int

    def __init__(self, config: Config) -> None:
        self.num_experts, self.top_k = config.num_experts, config.top_k

    def wire_meshes(self, *, ep_mesh: Any) -> None: ...

    def dispatch(
        self,
        x_TD: torch.Tensor,
        topk_scores_TK: torch.Tensor,
        topk_expert_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        order = topk_expert_ids_TK.flatten().argsort(stable=True)
        tokens = order // self.top_k
        return x_TD[tokens], num_local_tokens_per_expert_E, (tokens, topk_scores_TK.flatten()[order])

    def combine(self, routed_output_RD: torch.Tensor, metadata: Any, x_TD: torch.Tensor) -> torch.Tensor:
        tokens, scores = metadata
        return torch.zeros_like(x_TD).index_add(0, tokens, routed_output_RD * scores.unsqueeze(1))


class BaseEPTokenDispatcher(LocalTokenDispatcher, ABC):
    @dataclass(kw_only=True, slots=True)
    class Config(LocalTokenDispatcher.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.ep_mesh: Any = None

    def wire_meshes(self, *, ep_mesh: Any) -> None:
        self.ep_mesh = ep_mesh
        self.init_buffer()

    def init_buffer(self) -> None: ...

    @abstractmethod
    def dispatch(
        self,
        x_TD: torch.Tensor,
        topk_scores_TK: torch.Tensor,
        topk_expert_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, Any]: ...

    @abstractmethod
    def combine(self, routed_output_RD: torch.Tensor, metadata: Any, x_TD: torch.Tensor) -> torch.Tensor: ...


class HybridEPTokenDispatcher(BaseEPTokenDispatcher):
    """A dispatcher whose configuration has sizes: not run."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):
        non_blocking_capacity_factor: float | None = None
        pad_multiple: int | None = None
        hidden_dim: int | None = None
        num_max_tokens_per_rank: int | None = None

    dispatch = combine = LocalTokenDispatcher.dispatch  # type: ignore[assignment]


def override(
    *, target: type, fqns: list[str] | None = None, description: str = "", exact: bool = False
) -> Callable[[Any], Any]:
    assert issubclass(target, Configurable.Config)
    return lambda factory: factory


def derive(source: Any, target_cls: type, **deltas: object) -> Any:
    there = {field.name for field in fields(target_cls)}
    shared = {field.name: getattr(source, field.name) for field in fields(source) if field.name in there}
    return target_cls(**{**shared, **deltas})


class Mesh:
    """A DeviceMesh of one dimension on CPUs."""

    device_type = "cpu"

    def __init__(self, group: Any, ranks: int) -> None:
        self._group, self._ranks = group, ranks

    def size(self) -> int:
        return self._ranks

    def get_group(self) -> Any:
        return self._group


@contextmanager
def stubbed() -> Iterator[Any]:
    """The integration over these parts, in the place of torchtitan, installed or not."""
    kinds = (LocalTokenDispatcher, BaseEPTokenDispatcher, HybridEPTokenDispatcher)
    with _replaced(
        {
            DISPATCHERS: {kind.__name__: kind for kind in kinds},
            OVERRIDES: {"override": override, "derive": derive},
        }
    ):
        yield importlib.import_module(_OURS)


@contextmanager
def _replaced(parts: dict[str, dict[str, Any]]) -> Iterator[None]:
    def there() -> dict[str, ModuleType]:
        return {name: m for name, m in sys.modules.items() if name.split(".")[0] == "torchtitan" or name == _OURS}

    before = there()
    for name in before:
        del sys.modules[name]
    for path, found in parts.items():
        for end in range(1, path.count(".") + 2):
            name = ".".join(path.split(".")[:end])
            module = sys.modules.setdefault(name, ModuleType(name))
            module.__path__ = []  # type: ignore[attr-defined]
        sys.modules[path].__dict__.update(found)
    try:
        yield
    finally:
        for name in there():
            del sys.modules[name]
        sys.modules.update(before)


@contextmanager
def without(part: str) -> Iterator[None]:
    """The parts without one of them, for whoever imports the integration now."""
    module = next(sys.modules[name] for name in (DISPATCHERS, OVERRIDES) if hasattr(sys.modules[name], part))
    value, ours = module.__dict__.pop(part), sys.modules.pop(_OURS)
    try:
        yield
    finally:
        module.__dict__[part] = value
        sys.modules[_OURS] = ours


def without_triton() -> None:
    """In a process of its own.  torchtitan imports kernels that no dispatcher of this test calls; CPU builds of torch
    come without Triton.
    """
    if importlib.util.find_spec("triton") is None:
        name = "torchtitan.distributed.minimal_async_ep.kernels"
        kernels = ModuleType(name)
        kernels.__getattr__ = lambda kernel: None  # type: ignore[method-assign]
        sys.modules.setdefault(name, kernels)
