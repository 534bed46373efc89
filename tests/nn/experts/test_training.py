"""Experts under a precision plugin: what is estimated, shown, measured, saved and resumed."""

import pytest
import torch
import torch.nn.functional as F

from lightning_lowbit import FP4Precision, FP8Precision, PrecisionSummary, QuantizationMonitor
from lightning_lowbit.callbacks.layer_table import layer_table
from lightning_lowbit.cli.lab.estimate.shapes import describe
from recipes.models import CausalLM
from tests.lightning_imports import LightningModule
from tests.nn.experts.models import CHOSEN, EXPERTS, settings, tiny
from tests.precision.regression_model import trainer
from tests.tables import each

STACK = "model.model.layers.0.mlp.experts.down_proj"


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = tiny("olmoe", num_hidden_layers=1)
        self.losses = []

    def training_step(self, batch, batch_idx):
        torch.manual_seed(self.global_step)
        tokens = torch.randint(0, 64, (2, 9))
        found = self.model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(found.flatten(0, 1).float(), tokens[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def train_dataloader(self):
        return torch.utils.data.DataLoader(range(8))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


def test_summaries_coverage_and_monitors_know_the_experts():
    model, monitor, summary = Model(), QuantizationMonitor(underflow_limit=1.0), PrecisionSummary(quiet=True)
    run = trainer(FP4Precision("nvfp4", quantize_output=True), callbacks=[summary, monitor], log_every_n_steps=1)
    run.fit(model)
    rows = {row[0]: row for row in layer_table(model).rows}
    assert rows[STACK][1:4] == ["GroupedProduct", "4 × (32 → 64)", "8.19 k"]
    assert rows[STACK][4] == "nvfp4"
    assert summary.coverage().share > 0.9
    assert monitor.report_data(run)["quantized_operands"]["layers"][STACK]["wgrad_g"]["sqnr"] > 5


@pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint that ended before the epoch ended")
def test_runs_go_on_from_checkpoints(tmp_path):
    makers = [lambda: FP4Precision("nvfp4", quantize_output=True), lambda: FP8Precision("delayed")]
    for number, make in enumerate(makers):
        path, whole, half, rest = tmp_path / f"{number}.ckpt", Model(), Model(), Model()
        trainer(make(), limit_train_batches=4, max_steps=4).fit(whole)
        run = trainer(make(), limit_train_batches=4, max_steps=2)
        run.fit(half)
        run.save_checkpoint(path)
        trainer(make(), limit_train_batches=4, max_steps=4).fit(rest, ckpt_path=path)
        assert half.losses + rest.losses == whole.losses
        state = torch.load(path, weights_only=True)
        assert {*state["state_dict"]} == {*Model().state_dict()}
        if number == 1:
            assert f"{STACK}/fprop_x" in state["lightning_lowbit"]["amax_history"]


@each(("name", "rows"), [("olmoe", CHOSEN), ("jetmoe", CHOSEN), ("llama4_text", EXPERTS)])
def test_estimates_count_the_rows_that_a_token_makes(name, rows):
    with torch.device("meta"):
        model = CausalLM(name, settings(name))
    found, _ = describe(model, FP4Precision("nvfp4", skip=["lm_head"]))
    stacks = [layer for layer in found.layers if layer.rows > 1]
    sizes = {tuple(sorted(p.shape[1:])) for p in model.parameters() if p.dim() == 3}
    assert {tuple(sorted((each.out_features, each.in_features))) for each in stacks} == sizes
    assert {layer.rows for layer in stacks} == {rows}
    assert all(arithmetic == "fp4" for layer in stacks for arithmetic in layer.arithmetic.values())
