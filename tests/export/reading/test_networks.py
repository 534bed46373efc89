"""Modules of one's own, and networks of other kinds than plain language models: read, exported, compared or refused."""

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_lowbit import Cast, IntegerPrecision, LinearCasts, LowBitPrecision, Scale, export_checkpoint, restore
from lightning_lowbit.export.trained_model import read
from tests.export import modules
from tests.export.originals import fit
from tests.tables import each

MODULE = "tests.export.modules.Network"
WEIGHTS = LinearCasts(fprop_w=Cast("int4", Scale("fp32", 32)), dgrad_w="fprop")

pytestmark = pytest.mark.filterwarnings("ignore:The checkpoint does not tell its tokenizer")


@pytest.fixture
def trained(tmp_path):
    """A function that trains a kind of network for a step, and returns its checkpoint."""

    def train(kind, casts):
        plugin = LowBitPrecision(casts, skip=["lm_head"] * (kind != "vit"), compute_dtype="bf16")
        return fit(modules.Network(kind), plugin, tmp_path, 1, DataLoader(torch.randn(2, 768), batch_size=2))

    return train


def test_a_folder_that_its_client_cannot_load_is_refused(trained, tmp_path):
    pytest.importorskip("compressed_tensors")
    with pytest.raises(ValueError, match="client cannot read the export: .* Nothing was exported"):
        export_checkpoint(trained("t5", "mxfp4"), "mxfp4", tmp_path / "out", module=MODULE)
    assert not (tmp_path / "out").exists()


def test_a_network_that_is_not_compared_is_loaded_by_its_client(trained, tmp_path):
    exported = export_checkpoint(trained("t5", "mxfp4"), "dequantized", tmp_path / "out", module=MODULE)
    assert exported.why_not is not None and exported.why_not.endswith("its client loads it")


def test_a_dtype_in_which_the_client_does_not_compute_is_told(trained, tmp_path):
    pytest.importorskip("compressed_tensors")
    with pytest.warns(UserWarning, match=r"in torch.bfloat16 alone.*from_pretrained\(folder, dtype=torch.bfloat16\)"):
        export_checkpoint(trained("llama", "mxfp4"), "mxfp4", tmp_path / "out", module=MODULE, dtype="fp32")
    assert 'dtype="bfloat16"' in (tmp_path / "out" / "README.md").read_text()


def test_stacks_of_experts_changed_outputs_and_several_parts_are_compared(trained, tmp_path):
    for kind in ("mixtral", "falcon", "llava"):
        exported = export_checkpoint(trained(kind, "nvfp4"), "dequantized", tmp_path / kind, module=MODULE)
        assert exported.parity is not None and not exported.parity.others, kind


@pytest.mark.slow
@each("casts, limit", [(WEIGHTS, 0.05), ("nvfp4", 0.15)])  # in four bits, inputs between two values round otherwise
def test_the_first_output_of_an_image_model_is_compared(casts, limit, trained, tmp_path):
    pytest.importorskip("onnxruntime")
    options = {"module": MODULE, "shape": [1, 3, 16, 16], "overwrite": True}
    exported = export_checkpoint(trained("vit", casts), "onnx", tmp_path / "out", **options)
    assert exported.outputs is not None and exported.outputs < limit


@pytest.mark.parametrize(
    "name", ["Drawn", "Computed", "Built", "Hooked", "Inherited", "Passing", "Configured", "Partial"]
)
def test_a_restored_module_and_an_exported_one_compute_as_it_was_trained(name, tmp_path):
    """They are made and loaded as Lightning's ``load_from_checkpoint`` does it."""
    module, x = getattr(modules, name)(seed=7), torch.randn(5, 16)
    plugin = IntegerPrecision(8, activation_bits=None, group="row", quantize_output=False)
    path = fit(module, plugin, tmp_path, 4, DataLoader(torch.randn(8, 16)))
    with torch.no_grad():
        with plugin.forward_context():
            expected = module.eval()(x)
        assert torch.equal(restore(getattr(modules, name)(seed=7), path)(x), expected)
        original = read(path, f"{modules.__name__}.{name}")
        assert torch.equal(original.model(x), expected) and original.config is None
