"""The optimizers of the package, each with its switches, that the tests of this folder run over."""

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from lightning_lowbit.optim import SPAM, Adaptive, LowBitAdamW, Muon, StableSPAM
from lightning_lowbit.optim.optimizer import ClippedOptimizer
from tests.optim.parameters import SHAPES, assert_same, make_parameters, snapshot
from tests.tables import each

LR = 0.01


class Entry(NamedTuple):
    """An optimizer with its switches."""

    kind: type[ClippedOptimizer]
    options: Mapping[str, Any]
    base: tuple[str, str] | None = None  # what `Adaptive` wraps: module, which may not be installed, and name
    base_options: Mapping[str, Any] = {}
    dtype: torch.dtype = torch.float32  # of the parameters, where a test needs one only
    takes_tensor_lr: bool = True
    can_be_copied: bool = True  # a copy of what is wrapped knows all that the original does
    shapes: Sequence[tuple[int, ...]] = SHAPES

    def parameters(self, dtype=None):
        return make_parameters(dtype or self.dtype, self.shapes)

    def new(self, dtype=None, **options):
        """Parameters, and an optimizer of them."""
        parameters = self.parameters(dtype)
        return parameters, self(parameters, **options)

    def __call__(self, params, lr=LR):
        if self.base is None:
            return self.kind(params, lr=lr, **self.options)
        return self.kind(self.make_base(params, lr=lr), **self.options)

    def make_base(self, params, lr=LR):
        module, name = self.base
        if not module.startswith("torch."):
            pytest.importorskip(module)
        return getattr(importlib.import_module(module), name)(params, lr=lr, **self.base_options)

    def takes(self, dtype):
        """Whether parameters may be of a dtype: what keeps 16 bits more is for 16 bits, and FP8 is not for float64."""
        if "master_weights" in self.options:
            return dtype in (torch.bfloat16, torch.float16)
        return dtype != torch.float64 or self.options.get("moments") != "fp8"

    @property
    def waits_for_the_host(self):
        """Whether the wrapped optimizer cannot be told on the device that a step is to be skipped."""
        return self.base is not None and not self.base_options.get("fused")

    @property
    def norm_clip(self):
        parameter = inspect.signature(self.kind.__init__).parameters.get("norm_clip")
        return self.options.get("norm_clip", parameter and parameter.default)


# AdamW keeps its moments in the dtype of the parameter; in fp16, 1e-8 is 0 and eps would be none.
ADAMW, EPS = ("torch.optim", "AdamW"), {"eps": 1e-3}
FP8 = {"moments": "fp8"}
MASTER = {**FP8, "master_weights": "fp16"}


#: A reset comes at step 4, and a warm-up is still going on at step 5.
ENTRIES = {
    "StableSPAM": Entry(StableSPAM, {"weight_decay": 0.1, "reset_interval": 4}),
    "StableSPAM schedules": Entry(StableSPAM, {"reset_interval": 4, "warmup_steps": 3, "total_steps": 8}),
    "StableSPAM older clips": Entry(
        StableSPAM,
        {"element_clip": "spike_clip", "spike_threshold": 2.0, "norm_clip": "grad_clip", "matrices_only": True},
    ),
    "StableSPAM no clips": Entry(StableSPAM, {"element_clip": None, "norm_clip": None, "maximize": True}),
    "StableSPAM fp8": Entry(StableSPAM, {**FP8, "weight_decay": 0.1, "reset_interval": 4}),
    "StableSPAM master": Entry(StableSPAM, {**MASTER, "reset_interval": 4, "warmup_steps": 3}, dtype=torch.bfloat16),
    "SPAM": Entry(SPAM, {"reset_interval": 4, "warmup_steps": 3, "spike_threshold": 2.0}),
    "SPAM density": Entry(SPAM, {"reset_interval": 4, "warmup_steps": 3, "density": 0.5, "weight_decay": 0.1}),
    "LowBitAdamW fp32": Entry(LowBitAdamW, {"moments": "fp32"}),
    "LowBitAdamW fp8": Entry(LowBitAdamW, FP8),
    "LowBitAdamW master": Entry(LowBitAdamW, MASTER, dtype=torch.bfloat16),
    "Muon": Entry(Muon, {"adam_names": []}),
    "Muon fp8": Entry(Muon, {"adam_names": [], **FP8}),
    "Muon rules": Entry(
        Muon, {"adam_names": [], "element_clip": "ada_clip", "norm_clip": "ada_gn", "nesterov": False, "maximize": True}
    ),
    "Adaptive AdamW": Entry(Adaptive, {}, ADAMW, EPS),
    "Adaptive AdamW foreach": Entry(Adaptive, {}, ADAMW, {**EPS, "foreach": True}, takes_tensor_lr=False),
    "Adaptive AdamW fused": Entry(Adaptive, {}, ADAMW, {**EPS, "fused": True}),
    "Adaptive AdamW older clips": Entry(
        Adaptive, {"element_clip": "spike_clip", "spike_threshold": 2.0, "norm_clip": "grad_clip"}, ADAMW, EPS
    ),
    "Adaptive SGD": Entry(Adaptive, {"matrices_only": True}, ("torch.optim", "SGD"), {"momentum": 0.9}),
    # Adafactor divides by the number of elements, so that empty parameters are none of its.
    "Adaptive Adafactor": Entry(
        Adaptive, {}, ("torch.optim", "Adafactor"), shapes=[shape for shape in SHAPES if 0 not in shape]
    ),
    "Adaptive Lion": Entry(Adaptive, {}, ("pytorch_optimizer", "Lion"), can_be_copied=False),
}


def entries(condition):
    chosen = [pytest.param(entry, id=name) for name, entry in ENTRIES.items() if condition(entry)]
    return pytest.mark.parametrize("entry", chosen)


def entries_and_dtypes(*dtypes):
    chosen = [
        pytest.param(entry, dtype, id=f"{name}-{dtype}")
        for name, entry in ENTRIES.items()
        for dtype in dtypes
        if entry.takes(dtype)
    ]
    return pytest.mark.parametrize(("entry", "dtype"), chosen)


every_entry = entries(lambda entry: True)
each_entry = each("entry", ENTRIES.values())  # in one test


def subclasses(kind):
    for child in kind.__subclasses__():
        if child.__module__.startswith("lightning_lowbit."):  # Lightning makes subclasses of its own
            yield child
            yield from subclasses(child)


def assert_nothing_happened(optimizer, parameters, before, groups, what):
    assert_same(snapshot(optimizer, parameters), before, f"{what} left traces")
    assert optimizer.state_dict()["param_groups"] == groups, f"{what} changed the groups"
