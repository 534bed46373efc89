"""What an fp16 plugin is, what it refuses, and scalers without it."""

import pytest
import torch
from torch.amp.grad_scaler import GradScaler

from lightning_lowbit import ConservativeGradScaler, FP4Precision, ShardedConservativeGradScaler
from tests.lightning_imports import MisconfigurationException, MixedPrecision
from tests.precision.fp16.runs import SCALERS, checkpoint, fp16, moving, run, static
from tests.precision.regression_model import Regression, flat, trainer
from tests.tables import each


@pytest.mark.parametrize("cut", [3, 4, 6])
def test_a_scaler_alone_in_lightnings_own_precision(cut):
    def plugin():
        return MixedPrecision("16-mixed", "cpu", SCALERS["conservative"]())

    whole = run(plugin(), 9)
    expected = checkpoint()["MixedPrecision"]
    assert "_tolerated" in expected
    assert not torch.equal(flat(whole), flat(Regression())), "nothing was trained"
    run(plugin(), cut)
    resumed = run(plugin(), 9, ckpt_path="x.ckpt")
    assert checkpoint()["MixedPrecision"] == expected
    assert torch.equal(flat(resumed), flat(whole)), "final weights differ"
    run(fp16(SCALERS["conservative"]()), 9)
    assert checkpoint()["lightning_lowbit"]["scaler"] == expected, "in this package's plugin it moves otherwise"


@each(
    ("arguments", "message"),
    [
        ({"scaler": moving()}, r"for compute_dtype='fp16'; got 'auto'.* leave out scaler=ConservativeGradScaler, or"),
        ({"compute_dtype": "fp32", "scaler": static()}, r"got 'fp32'.* leave out scaler=StaticGradScaler, or train"),
        ({"compute_dtype": "fp16", "scaler": 2.0**16}, r"scaler is a torch.amp.GradScaler, or None; got 65536.0"),
        ({"compute_dtype": "fp16", "scaler": GradScaler}, r"scaler is a torch.amp.GradScaler, or None; got <class"),
        ({"compute_dtype": "fp16", "scaler": "default"}, r"scaler is a torch.amp.GradScaler, or None; got 'default'"),
        (
            {"compute_dtype": "fp16", "scaler": GradScaler("cpu", enabled=False)},
            r"The scaler GradScaler is disabled, and fp16 needs one.* device='cpu'; or leave out enabled=False",
        ),
        (
            {"compute_dtype": "fp16", "scaler": ConservativeGradScaler(device="cpu", enabled=False)},
            r"The scaler ConservativeGradScaler is disabled",
        ),
    ],
)
def test_bad_arguments_say_what_to_do(arguments, message):
    with pytest.raises(ValueError, match=message):
        FP4Precision(**arguments)


def test_a_sharded_scaler_needs_ranks():
    model = Regression()
    with pytest.raises(
        MisconfigurationException,
        match=r"ShardedConservativeGradScaler needs .*SingleDeviceStrategy has none.*the plugin asks all ranks",
    ):
        trainer(FP4Precision(compute_dtype="fp16", scaler=ShardedConservativeGradScaler(device="cpu"))).fit(model)
    assert type(model.head) is torch.nn.Linear, "a refused model has been changed"
