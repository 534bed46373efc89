"""Operands of stacks by the Triton kernels beside the plain code, and what grouped layers launch, in Triton's
interpreter."""

import contextlib
from unittest import mock

import torch

from lightning_lowbit import LinearCasts, compilation, convert
from lightning_lowbit.kernels.forms import CastForm
from lightning_lowbit.kernels.gpu import casts as gpu
from lightning_lowbit.kernels.stacks import CAST_STACK, StackForm, stack_sample
from lightning_lowbit.nn import GroupedLinear, LayerKeys
from lightning_lowbit.nn.casts.traits import CONTRACTION, GEMM, OPERANDS
from lightning_lowbit.quant.call import CastCall, operand_dtype
from tests.kernels import interpreted

CPU = torch.device("cpu")


def forms(presets):
    """The forms of the operands of presets in bfloat16, each once."""
    distinct = {}
    for preset in presets:
        casts = LinearCasts.preset(preset)
        for name in OPERANDS:
            cast, hadamard = casts.cast_of(name), casts.hadamard.get(GEMM[name])
            if cast is not None and casts.requantize == ():
                dtype, size = operand_dtype(torch.bfloat16, cast), 0 if hadamard is None else hadamard.size
                product = CastForm(cast.spec, CONTRACTION[name], torch.bfloat16, dtype, size)
                has_signs = hadamard is not None and hadamard.signs == "keyed"
                distinct.setdefault(StackForm(product, not name.endswith("w"), has_signs), f"{preset}, {name}")
    return distinct


def many(cast, dim):
    """Arguments for 200 products, some without rows: more than a program has threads."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 5, (200,), generator=generator) * torch.randint(0, 9, (200,), generator=generator)
    x, keys = torch.randn(int(rows.sum()), 40, generator=generator).bfloat16(), torch.arange(200) * 7919
    return x, CastCall(cast, dim, keys if cast.draws else None), tuple(rows.cumsum(0).tolist())


def differences(presets):
    """What differs, in words, and how many forms have a kernel."""
    cases = {name: stack_sample(form, CPU) for form, name in forms(presets).items()}
    return differences_of({name: arguments for name, arguments in cases.items() if arguments is not None})


def differences_of_many(casts):
    return differences_of({f"{cast} along {dim}": many(cast, dim) for cast in casts for dim in (0, 1)})


def differences_of(cases):
    texts = [interpreted.by_operation(CAST_STACK, arguments, name) for name, arguments in cases.items()]
    return sum(texts, []), len(cases)


def launches(preset, experts):
    """The launches of both passes of a grouped layer with so many experts: operations of torch and kernels."""
    from tests.kernels.passes import Launches  # imports transformers

    torch.manual_seed(0)
    layer, count = GroupedLinear(experts, 32, 48, bias=False).bfloat16(), Launches()
    LayerKeys(convert(layer, preset, grouped="native")).fill_(0)
    ends = [4 * (i + 1) for i in range(experts)]
    x, g = torch.randn(ends[-1], 32).bfloat16().requires_grad_(), torch.randn(ends[-1], 48).bfloat16()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("lightning_lowbit.kernels.gpu.casts.run", count.counting(gpu.run)))
        stack.enter_context(compilation.backend("triton"))
        layer(x, ends).backward(g)  # kernels are compared with plain code before their first use
        x.grad = layer.weight.grad = None
        count.number = 0
        with count:
            layer(x, ends).backward(g)
    return count.number
