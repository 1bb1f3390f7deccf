"""The parts of vLLM 0.33's weight transfer that moecomm.integrations.vllm_weights touches, with their signatures.

No code of vLLM: what each part has to do is written anew.  test_vllm_weights.py compares the signatures with an
installed vLLM's.
"""

# Only names and defaults are compared, and theirs have types of their own.
# ruff: noqa: ANN001, ANN201, ANN206
from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Generic, TypeVar

T, U = TypeVar("T"), TypeVar("U")
BASE = "vllm.distributed.weight_transfer.base"
FACTORY = "vllm.distributed.weight_transfer.factory"


@dataclass
class WeightTransferInitInfo(ABC):  # noqa: B024
    pass


@dataclass
class WeightTransferUpdateInfo(ABC):  # noqa: B024
    pass


@dataclass
class TrainerInitInfo:
    rank: int = field(kw_only=True)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not getattr(cls, "backend", None):
            raise TypeError(f"{cls.__name__} has no backend")

    @property
    def is_sender(self):
        return self.rank == 0


class WeightTransferEngine(ABC, Generic[T, U]):
    supports_draft_weight_update = True
    defers_processing = False

    def __init__(self, config, vllm_config, device, model) -> None:
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
        self.parallel_config, self.model_config = vllm_config.parallel_config, vllm_config.model_config

    def set_weight_update_target(self, model, model_config): ...

    def reset_weight_update_target(self): ...

    def drain_pending(self): ...

    def parse_init_info(self, init_dict):
        return self.init_info_cls(**init_dict)

    def parse_update_info(self, update_dict):
        return self.update_info_cls(**update_dict)

    @abstractmethod
    def init_transfer_engine(self, init_info): ...

    @abstractmethod
    def start_weight_update(self): ...

    @abstractmethod
    def finish_weight_update(self): ...

    def update_weights(self, update_info):
        self.receive_weights(self.parse_update_info(update_info))

    @abstractmethod
    def receive_weights(self, update_info): ...

    @abstractmethod
    def shutdown(self): ...


class TrainerWeightTransferEngine(ABC, Generic[T]):
    def __init__(self, *, client, source=None, is_sender=True, rank=0) -> None:
        self.client, self.source, self.is_sender, self.rank = client, source, is_sender, rank

    @classmethod
    @abstractmethod
    def trainer_init(cls, init_info, *, client, source=None): ...

    @abstractmethod
    def send_weights(self): ...

    def shutdown(self): ...


class _Factory:
    _registry: dict[str, Any]

    @classmethod
    def register_engine(cls, name, module_path_or_cls, class_name=None):
        if name in cls._registry:
            raise ValueError(f"{name} is there")
        cls._registry[name] = lambda: getattr(importlib.import_module(module_path_or_cls), class_name)


class WeightTransferEngineFactory(_Factory):
    @classmethod
    def create_engine(cls, config, vllm_config, device, model):
        return cls._registry[config.backend]()(config, vllm_config, device, model)


class WeightTransferTrainerFactory(_Factory):
    @classmethod
    def trainer_init(cls, init_info, *, client, source=None):
        return cls._registry[init_info.backend]().trainer_init(init_info=init_info, client=client, source=source)


def modules() -> dict[str, ModuleType]:
    """For sys.modules, with empty registries."""
    parts = {
        BASE: [
            *(WeightTransferInitInfo, WeightTransferUpdateInfo, TrainerInitInfo),
            *(WeightTransferEngine, TrainerWeightTransferEngine),
        ],
        FACTORY: [WeightTransferEngineFactory, WeightTransferTrainerFactory],
    }
    for kind in parts[FACTORY]:
        kind._registry = {}
    found: dict[str, ModuleType] = {}
    for name, kinds in parts.items():
        steps = name.split(".")
        for end in range(1, len(steps) + 1):
            above = ".".join(steps[:end])
            module = found.setdefault(above, ModuleType(above))
            module.__path__ = []
        found[name].__dict__.update({kind.__name__: kind for kind in kinds})
    return found
