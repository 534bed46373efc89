"""What a plugin looks like, in a notebook and in errors: the call that makes it."""

import copy
import inspect
import pickle
import pydoc

import pytest

import lightning_lowbit
from lightning_lowbit import (
    FP4Precision,
    FP8Precision,
    IntegerPrecision,
    LinearCasts,
    LowBitPrecision,
    TernaryPrecision,
)
from tests.lightning_imports import Trainer
from tests.tables import each


@each(
    "call",
    [
        "FP4Precision('mxfp4')",
        "FP4Precision('nvfp4', rounding={'wgrad_x': 'nearest'}, skip=['lm_head'])",
        "FP8Precision('row', overrides={'up_proj': 'bf16'}, seed=3)",
        "IntegerPrecision(4, activation_bits=6, group='row', symmetric=False)",
        "IntegerPrecision(4, scale_format='bf16')",
        "TernaryPrecision(None, scale_factor=1.5)",
        "LowBitPrecision({'preset': 'nvfp4', 'fprop_x': None}, compute_dtype='fp32', only=['a', 'b'])",
    ],
)
def test_a_plugin_is_shown_as_the_call_that_makes_it(call):
    plugin = eval(call, {name: getattr(lightning_lowbit, name) for name in lightning_lowbit.__all__})
    assert repr(plugin) == call
    assert repr(copy.deepcopy(plugin)) == repr(pickle.loads(pickle.dumps(plugin))) == call


def test_defaults_are_left_out_but_for_what_is_quantized():
    """A command line gives all arguments, and by name."""
    plugin = FP4Precision(casts="nvfp4", rounding=None, skip=["a"], shared_amax=[])
    assert repr(plugin) == "FP4Precision('nvfp4', skip=['a'])"
    assert repr(FP4Precision()) == "FP4Precision('nvfp4')"
    assert repr(FP8Precision(history=16, scaling="delayed", margin=1)) == "FP8Precision('delayed', margin=1)"


def test_help_shows_the_arguments_behind_kwargs():
    class Without(IntegerPrecision):
        pass

    class Own(FP8Precision):
        def __init__(self, margin_of_mine=1, **kwargs):
            super().__init__("row", **kwargs)

    shared = [*inspect.signature(LowBitPrecision).parameters][1:]
    assert {"skip", "only", "overrides", "compute_dtype", "backend", "quantize_output"} <= {*shared}
    for plugin in (FP4Precision, FP8Precision, TernaryPrecision, IntegerPrecision, Without, Own):
        names = [*inspect.signature(plugin).parameters]
        assert names[-len(shared) :] == shared and "kwargs" not in names, plugin
        own = inspect.signature(plugin.__init__).parameters
        assert {*own} - {"self", "kwargs", "args"} <= {*names}, plugin
    assert [*inspect.signature(Without).parameters] == [*inspect.signature(IntegerPrecision).parameters]
    assert next(iter(inspect.signature(Own).parameters)) == "margin_of_mine"
    assert "compute_dtype" in pydoc.render_doc(FP4Precision).split("Fully quantized training")[0]


def test_casts_are_named_or_described_and_errors_of_lightning_name_the_plugin():
    casts = LinearCasts.preset("nvfp4")
    plugin = LowBitPrecision(casts, overrides={"up": LinearCasts(fprop_w=casts.fprop_w)})
    described = "<fprop(x=hp, w=e2m1/e4m3:1x16+fp32) dgrad(g=hp, w=hp) wgrad(g=hp, x=hp)>"
    assert repr(plugin) == f"LowBitPrecision('nvfp4', overrides={{'up': {described}}})"
    with pytest.raises(ValueError, match=r"Received both `precision=16-mixed` and `plugins=FP4Precision\('nvfp4'\)"):
        Trainer(accelerator="cpu", precision="16-mixed", plugins=[FP4Precision("nvfp4")])


def test_arguments_that_are_used_up_are_not_kept():
    plugin = FP4Precision(skip=(name for name in ["lm_head"]))
    assert pickle.loads(pickle.dumps(plugin)).skip == ["lm_head"], "an iterator cannot be pickled"
