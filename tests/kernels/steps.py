"""Steps of the optimizers by the Triton kernels beside plain torch on the CPU: in a process with
``TRITON_INTERPRET=1``, or on a GPU, within ``interpreted.kernels_on``."""

import warnings
from contextlib import contextmanager
from unittest import mock

import torch

from lightning_lowbit.compilation import backend
from lightning_lowbit.distributed import Sharding
from lightning_lowbit.kernels import ops
from lightning_lowbit.kernels.gpu import adam as gpu
from lightning_lowbit.optim import Adaptive, kernels, optimizer, rules
from lightning_lowbit.optim.adam import ClippedAdam
from tests.kernels.interpreted import place_of_kernels
from tests.optim.parameters import make_parameters, set_gradients

# Rows that end within a block of 128, blocks of 16 bytes at a time, and more than one tile of 1024 elements.
SHAPES = [(), (0, 3), (300,), (2, 3, 130), (5, 6), (24, 128)]
PLACES = {torch.bfloat16: 2**-7, torch.float16: 2**-10}
CPU = torch.device("cpu")
_FAULT = "The Triton kernel for the steps of optimizers fails"  # begins a warning

# Aligned parameters, and options that make every kernel.
ALIGNED = [(64,), (64, 128)]
_RULES = {"element_clip": "ada_clip", "norm_clip": "ada_gn", "weight_decay": 0.1}
_SPIKES = {"element_clip": "spike_clip", "spike_threshold": 0.5, "moments": "fp8", "master_weights": "fp16"}
CASES = [(_RULES, torch.float32), (_SPIKES, torch.bfloat16), ({**_RULES, "moments": "fp8"}, torch.bfloat16)]


def small_adaptive(parameters, **options):
    return Adaptive(torch.optim.AdamW(parameters, lr=0.1), **options)


def sample_is_near():
    """Whether the comparison before the first use on a device finds the kernels right."""
    return kernels.triton_agrees(place_of_kernels()) and not kernels._left


def differences_without_a_gradient(options, dtype, make=ClippedAdam):
    """The same where, after its state was loaded, this rank has no gradient of one parameter, and another rank has one,
    of zeros."""

    def reduced(values, *_):
        return [value.clamp(min=0) for value in values]

    with (
        mock.patch.object(optimizer, "sharding_of", lambda p: Sharding(p.shape, ("all ranks",))),
        mock.patch.object(optimizer, "all_reduce_", reduced),
    ):
        return differences([(options, dtype)], make, idle=3)


def differences_after_a_failure(options, dtype, number):
    """The same where the launch of a number fails; and how many launches and which warnings of it there were."""
    launches, launch_of = iter(range(10**6)), gpu.run

    def run(launch):
        if next(launches) == number:
            raise NotImplementedError("no such instruction")
        launch_of(launch)

    with (
        launched(run),
        mock.patch(f"{__name__}.SHAPES", [(0, 3), (3,), (5, 6)]),
        mock.patch.object(ops, "_warned", set()),
        mock.patch.object(kernels, "_left", set()),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.filterwarnings("always", _FAULT)
        texts = _differences([(options, dtype)])
    return texts, next(launches), [text for text in map(str, (w.message for w in caught)) if text.startswith(_FAULT)]


def differences(cases, make=ClippedAdam, idle=None):
    """Where three steps, the second of which is skipped, end elsewhere than in plain torch: beyond 1e-6 of the largest
    element, 2e-6 of squares, or a place of 16 bits. Of FP8 codes one in a thousand may lie on the other side of a draw,
    and its parameter be moved by another moment. After a launch that fails plain torch would be compared with itself:
    that is a difference."""
    texts = _differences(cases, make, idle)
    return [*texts, "plain torch has taken a step of the kernels"] if kernels._left else texts


def _differences(cases, make=ClippedAdam, idle=None):
    texts = []
    for options, dtype in cases:
        results = [_three_steps(make, options, dtype, name, idle) for name in ("triton", "eager")]
        for (name, found), (_, wanted) in zip(*results, strict=True):
            drawn = max(1.0, found.numel() / 1000)
            if found.dtype == torch.uint8 or name == "master":
                is_near = (found != wanted).double().sum() <= drawn
            else:
                place = PLACES.get(found.dtype, 2e-6 if "square" in name else 1e-6)
                error = (found.double() - wanted.double()).nan_to_num(0.0, 0.0, 0.0).abs()
                largest = wanted.double().nan_to_num(0.0, 0.0, 0.0).abs().amax() if wanted.numel() else 0.0
                moved = drawn if name == "parameter" and options.get("moments") == "fp8" else 0
                is_near = bool((error > place * largest).sum() <= moved)
                is_near &= torch.equal(found.isfinite(), wanted.isfinite())
            if not is_near:
                texts.append(f"{options} in {dtype}: {name} of {tuple(found.shape)} differs: {found} {wanted}")
    return texts


def _three_steps(make, options, dtype, name, idle):
    """Parameters, their state and statistics, by name."""
    with backend(name), rules.spikes_clipped_after(0):
        parameters = make_parameters(dtype, SHAPES, place_of_kernels() if name == "triton" else CPU)
        optimizer = make(parameters, **options)
        seen = []
        for step in range(3):
            set_gradients(parameters, seed=step)
            if step == 1:
                parameters[-1].grad[3] = float("nan")
            if idle is not None and step == 2:
                optimizer.load_state_dict(optimizer.state_dict())
                parameters[idle].grad = None
            optimizer.step()
            for row in optimizer.gradient_statistics().values():
                seen += row._asdict().items()
    for parameter in parameters:
        seen += [("parameter", parameter.detach()), *optimizer.state[parameter].items()]
    return [(key, torch.as_tensor(value).cpu()) for key, value in seen]


@contextmanager
def launched(run):
    """Within this context steps on a CPU give the launches of the kernels to ``run``."""
    with (
        backend("triton"),
        mock.patch.object(gpu, "run", run),
        mock.patch.object(gpu, "obstacle", lambda device: None),
        mock.patch.object(kernels, "triton_agrees", lambda device: True),
    ):
        yield


def launches(shapes):
    found = {}
    for options, dtype in CASES:
        parameters = make_parameters(dtype, shapes)
        set_gradients(parameters, seed=0)
        with launched(lambda launch: found.setdefault(f"{launch.kernel} {launch.constants}", launch) and None):
            ClippedAdam(parameters, **options).step()
    return list(found.values())
