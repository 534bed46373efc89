"""Modules are made and loaded as Lightning's ``load_from_checkpoint`` does it, for ``restore`` and for exports."""

import pytest
import torch

from lightning_lowbit import IntegerPrecision, restore
from lightning_lowbit.export.trained_model import read
from tests.export.reading import own_modules
from tests.lightning_imports import quiet_trainer

X = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=["Drawn", "Computed", "Built", "Hooked", "Partial"])
def trained(request, tmp_path):
    """A class of a module, a checkpoint of it after four steps, and the outputs of the module."""
    cls = getattr(own_modules, request.param)
    module, path = cls(seed=7), tmp_path / "last.ckpt"
    plugin = IntegerPrecision(8, activation_bits=None, group="row", quantize_output=False)
    trainer = quiet_trainer(max_steps=4, plugins=plugin, limit_val_batches=0, default_root_dir=tmp_path)
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(8, 16)))
    trainer.save_checkpoint(path)
    with torch.no_grad(), plugin.forward_context():
        return cls, path, module.eval()(X)


def test_a_restored_module_computes_as_it_was_trained(trained):
    cls, path, expected = trained
    with torch.no_grad():
        assert torch.equal(restore(cls(seed=7), path)(X), expected)


def test_an_exported_module_computes_as_it_was_trained(trained):
    cls, path, expected = trained
    with torch.no_grad():
        assert torch.equal(read(path, f"tests.export.reading.own_modules.{cls.__name__}").model(X), expected)
