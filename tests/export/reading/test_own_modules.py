"""Modules are made and loaded as Lightning's ``load_from_checkpoint`` does it, for ``restore`` and for exports."""

import pytest
import torch

from lightning_lowbit import IntegerPrecision, restore
from lightning_lowbit.export.trained_model import read
from tests.export.reading import own_modules
from tests.lightning_imports import quiet_trainer

X = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["Drawn", "Computed", "Built", "Hooked", "Partial"])
def test_a_restored_module_and_an_exported_one_compute_as_it_was_trained(name, tmp_path):
    cls = getattr(own_modules, name)
    module, path = cls(seed=7), tmp_path / "last.ckpt"
    plugin = IntegerPrecision(8, activation_bits=None, group="row", quantize_output=False)
    trainer = quiet_trainer(max_steps=4, plugins=plugin, limit_val_batches=0, default_root_dir=tmp_path)
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(8, 16)))
    trainer.save_checkpoint(path)
    with torch.no_grad():
        with plugin.forward_context():
            expected = module.eval()(X)
        assert torch.equal(restore(cls(seed=7), path)(X), expected)
        assert torch.equal(read(path, f"{own_modules.__name__}.{name}").model(X), expected)
