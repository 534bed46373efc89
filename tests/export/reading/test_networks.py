"""Networks of ``transformers`` of other kinds than plain language models: exported and compared, or refused."""

import pytest
import torch

from lightning_lowbit import Cast, LinearCasts, LowBitPrecision, Scale, export_checkpoint
from tests.export.reading.own_modules import Network
from tests.lightning_imports import quiet_trainer

MODULE = "tests.export.reading.own_modules.Network"
WEIGHTS = LinearCasts(fprop_w=Cast("int4", Scale("fp32", 32)), dgrad_w="fprop")

pytestmark = pytest.mark.filterwarnings("ignore:The checkpoint does not tell its tokenizer")


@pytest.fixture
def trained(tmp_path):
    """A function that trains a kind of network for a step, and returns its checkpoint."""

    def train(kind, casts):
        plugin = LowBitPrecision(casts, skip=["lm_head"] * (kind != "vit"), compute_dtype="bf16")
        trainer = quiet_trainer(max_steps=1, plugins=plugin, limit_val_batches=0)
        trainer.fit(Network(kind), torch.utils.data.DataLoader(torch.randn(2, 768), batch_size=2))
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return tmp_path / "last.ckpt"

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


def test_the_first_output_of_an_image_model_is_compared(trained, tmp_path):
    pytest.importorskip("onnxruntime")
    limits = {"weights": 0.05, "nvfp4": 0.15}  # inputs in four bits round otherwise where they lie between two values
    for kind, casts in (("weights", WEIGHTS), ("nvfp4", "nvfp4")):
        checkpoint, options = trained("vit", casts), {"module": MODULE, "shape": [1, 3, 16, 16]}
        exported = export_checkpoint(checkpoint, "onnx", tmp_path / kind, **options)
        assert exported.outputs is not None and exported.outputs < limits[kind]
