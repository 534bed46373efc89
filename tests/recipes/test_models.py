"""The model: its weights, its metrics, and that a YAML can build it."""

import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from torch.utils.data import DataLoader

from lightning_lowbit import WeightDecaySwitch
from lightning_lowbit.recipes.data import TextDataModule
from lightning_lowbit.recipes.models import NETWORKS, CausalLM, network_config
from lightning_lowbit.recipes.schedules import TwoStageLinear, WarmupCosine, WarmupSchedule
from lightning_lowbit.recipes.series.forecaster import Forecaster
from lightning_lowbit.recipes.tuning.preferences import PreferenceLM
from lightning_lowbit.recipes.vision import ImageClassifier
from tests.lightning_imports import quiet_trainer
from tests.tables import each

SIZE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY = {"config": SIZE}
SCHEDULES = WarmupSchedule.__subclasses__()


def batches(number, last=4, length=16):
    generator = torch.Generator().manual_seed(0)
    sizes = [4] * (number - 1) + [last]
    return [torch.randint(0, 256, (size, length + 1), generator=generator) for size in sizes]


def trainer(**arguments):
    return quiet_trainer(**{"devices": 1, **arguments})


def test_weights_depend_on_the_seed_alone():
    models = []
    for global_seed, seed in ((1, 0), (2, 0), (2, 1)):
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        models.append(CausalLM(**TINY, seed=seed).state_dict())
        assert torch.equal(torch.get_rng_state(), before)
    one, same, other = models
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["model.lm_head.weight"], other["model.lm_head.weight"])


def test_seeds_that_generators_do_not_take_are_refused():
    for made in (lambda seed: CausalLM(**TINY, seed=seed), lambda seed: TextDataModule(seed=seed)):
        for seed in (-1, 2**32, 1.5):
            with pytest.raises(ValueError, match=f"seed is a whole number, 0 or more and at most .*; got {seed}"):
                made(seed)


# Hidden, intermediate, heads, layers and vocabulary: Stable-SPAM, table A.1; LLaMA-7B; and our own.
NETWORK_SIZES = {
    "llama-60m": (512, 1376, 8, 8, 32000),
    "llama-130m": (768, 2048, 12, 12, 32000),
    "llama-350m": (1024, 2736, 16, 24, 32000),
    "llama-1b": (2048, 5461, 32, 24, 32000),
    "llama-7b": (4096, 11008, 32, 32, 32000),
    "llama-small": (256, 704, 4, 4, 256),
    "bitnet-small": (256, 704, 4, 4, 256),
}


def test_sizes_of_networks():
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    for network, sizes in NETWORK_SIZES.items():
        config = network_config(network)
        assert tuple(getattr(config, name) for name in names) == sizes and not config.tie_word_embeddings, network
        assert config.num_key_value_heads == config.num_attention_heads, network
    assert set(NETWORKS) == {"olmoe-small", *NETWORK_SIZES}
    for model, number in ((CausalLM(), 3_344_640), (CausalLM("bitnet-small"), 3_348_480)):
        assert sum(parameter.numel() for parameter in model.parameters()) == number
        assert all(size % 64 == 0 for parameter in model.parameters() for size in parameter.shape)
        assert model.model.lm_head.weight is not model.model.model.embed_tokens.weight
    tied = CausalLM(config={**SIZE, "tie_word_embeddings": True}).model
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


def test_any_causal_language_model_of_transformers(tmp_path):
    tokens = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
    by_type = CausalLM("gpt2", {"n_layer": 1, "n_embd": 32, "n_head": 2, **tokens})
    assert type(by_type.model).__name__ == "GPT2LMHeadModel"
    alias = CausalLM("qwen3", {**SIZE, "num_key_value_heads": 1, "head_dim": 16, **tokens})
    assert type(alias.model).__name__ == "Qwen3ForCausalLM"
    by_type.model.save_pretrained(tmp_path / "saved")
    for path in (tmp_path / "saved", tmp_path / "saved" / "config.json"):
        drawn = CausalLM(str(path), seed=1)
        assert type(drawn.model).__name__ == "GPT2LMHeadModel" and drawn.model.config.n_embd == 32
        assert not torch.equal(drawn.model.lm_head.weight, by_type.model.lm_head.weight)
    loaded = CausalLM(str(tmp_path / "saved"), pretrained=True)
    assert all(module.training for module in loaded.model.modules()), "it would be fine-tuned without dropout"
    (batch,) = batches(1)
    with torch.no_grad():
        assert torch.equal(loaded.eval()._loss(batch), by_type.eval()._loss(batch))
    loaded._loss(batch).backward()


@each(
    "arguments, message",
    [
        ({"network": "llama-60"}, "network: there is no 'llama-60'. Did you mean 'llama-60m'?"),
        ({"network": "bitnet-smal"}, "Did you mean 'bitnet-small'? Give one of llama-small, bitnet-small, llama-60m,"),
        ({"network": "vit"}, "network: there is no 'vit'"),
        ({"network": "./nowhere"}, "an existing folder with a config.json"),
        ({"network": "empty"}, "has no configuration that transformers can read"),
        ({"config": {"hidden_sise": 32}}, "Unknown value of LlamaConfig 'hidden_sise'. Did you mean 'hidden_size'?"),
        ({"network": "bitnet-small", "config": {"hidden_sise": 32}}, "Unknown value of BitNetConfig 'hidden_sise'."),
        ({"network": "gpt2", "config": {"n_lyer": 1}}, "Did you mean 'n_layer'?"),
        ({"network": "half", "pretrained": True}, "transformers can load none from 'half'"),
    ],
)
def test_a_wrong_network(arguments, message):
    Path("empty").mkdir(exist_ok=True)
    network_config("llama-small").save_pretrained("half")  # a configuration without weights
    with pytest.raises(ValueError, match=re.escape(message)):
        CausalLM(**arguments)


@each(
    "name, value, message",
    [
        ("vocab_size", 257, "vocab_size is 256, fewer than the 257 tokens of the data's tokenizer"),
        ("sequence_length", 1025, "max_position_embeddings is 1024, fewer than the 1025 tokens of a sequence"),
    ],
)
def test_data_that_the_network_cannot_take(name, value, message):
    module = LightningDataModule()
    setattr(module, name, value)
    module.train_dataloader = module.val_dataloader = lambda: pytest.fail("came too far")
    with pytest.raises(ValueError, match=re.escape(message)):
        trainer(max_steps=1).fit(CausalLM(**TINY), datamodule=module)


def test_on_the_meta_device_only_shapes_are_made():
    with torch.device("meta"):
        model = CausalLM("llama-7b")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == 6_738_415_616


def test_loss_is_float32_and_each_token_predicts_the_next():
    model = CausalLM(**TINY)
    (batch,) = batches(1)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(batch[:, :-1]).dtype == torch.bfloat16
        assert model._loss(batch).dtype == torch.float32
    log_probabilities = model(batch)[:, :-1].log_softmax(-1)
    expected = -log_probabilities.gather(-1, batch[:, 1:, None]).mean()
    torch.testing.assert_close(model._loss(batch), expected)


def test_gradient_checkpointing_changes_no_gradient():
    gradients = []
    for checkpointing in (False, True):
        model = CausalLM(**TINY, gradient_checkpointing=checkpointing)
        model._loss(batches(1)[0]).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*gradients)


def test_validation_is_a_mean_over_tokens_with_a_smaller_last_batch():
    model, data = CausalLM(**TINY), batches(3, last=1)
    (metrics,) = trainer().validate(model, DataLoader(data, batch_size=None), verbose=False)
    whole = model._loss(torch.cat(data)).item()
    assert metrics["val_loss"] == pytest.approx(whole, rel=1e-6)
    assert metrics["val_perplexity"] == pytest.approx(math.exp(metrics["val_loss"]), rel=1e-6)
    assert abs(sum(model._loss(batch).item() for batch in data) / 3 - whole) > 1e-4  # the naive mean differs

    torch.nn.init.constant_(model.model.lm_head.weight, math.nan)
    (metrics,) = trainer().validate(model, DataLoader(batches(1), batch_size=None), verbose=False)
    assert math.isnan(metrics["val_loss"]) and math.isnan(metrics["val_perplexity"]), "a loss that is no number shows"


@each(
    "make, batch",
    [
        (lambda: CausalLM(**TINY), batches(1)[0]),
        (lambda: PreferenceLM(**TINY), batches(1)[0]),
        (lambda: ImageClassifier(), [torch.zeros(2, 1, 8, 8), torch.tensor([0, 1])]),
        (lambda: Forecaster(24, 4, {"num_hidden_layers": 1}), torch.arange(56.0).reshape(2, 28, 1)),
    ],
)
def test_a_validated_module_trains_and_is_validated_again(make, batch):
    module, loader = make(), DataLoader([batch], batch_size=None)
    trainer().validate(module, loader, verbose=False)
    run = trainer(max_steps=1)
    run.fit(module, loader, loader)
    if isinstance(module, CausalLM):
        module.val_loss.update(torch.tensor(1e9))  # as an interrupted validation leaves it
    (metrics,) = trainer().validate(module, loader, verbose=False)
    assert metrics["val_loss"] == pytest.approx(run.callback_metrics["val_loss"].item(), rel=1e-6)


class GradientNorms(CausalLM):
    """Notes the norm of the gradients as they are before clipping."""

    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        self.expected = torch.cat([parameter.grad.flatten() for parameter in self.parameters()]).norm()


@pytest.mark.parametrize(("network", "precision"), [("llama-small", "32-true"), ("bitnet-small", "bf16-mixed")])
def test_training_lowers_the_loss_and_logs(network, precision):
    model = GradientNorms(
        network,
        **TINY,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        scheduler=lambda optimizer: WarmupCosine(optimizer, warmup_steps=2),  # 12 steps: those of the run
    )
    before = model._loss(batches(1)[0]).item()
    run = trainer(max_epochs=12, log_every_n_steps=1, gradient_clip_val=0.5, precision=precision)
    run.fit(model, DataLoader(batches(1), batch_size=None), DataLoader(batches(1), batch_size=None))
    metrics = run.callback_metrics
    assert metrics["loss"] < before - 0.5
    torch.testing.assert_close(metrics["grad_norm"], model.expected)
    assert run.progress_bar_metrics.keys() >= {"loss", "grad_norm", "val_loss"}
    assert run.lr_scheduler_configs[0].interval == "step"
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-3)


@each("schedule", SCHEDULES)
def test_a_schedule_gets_the_length_of_the_run(schedule):
    """Optimizer steps, of which accumulation makes fewer than batches; one that is given stays; none is an error."""
    loaders = [DataLoader(batches(4), batch_size=None)] * 2
    for steps, expected in ((None, 6), (9, 9)):
        model = CausalLM(**TINY, scheduler=partial(schedule, warmup_steps=2, total_steps=steps))
        run = trainer(max_epochs=3, accumulate_grad_batches=2)
        run.fit(model, *loaders)
        assert run.global_step == 6 and run.lr_scheduler_configs[0].scheduler.total_steps == expected
    model = CausalLM(**TINY, scheduler=partial(schedule, warmup_steps=2))
    with pytest.raises(ValueError, match=f"{schedule.__name__} needs .* set max_steps, max_epochs or total_steps"):
        trainer(max_epochs=-1, max_time={"seconds": 1}).fit(model, *loaders)


class Notes(Callback):
    """The learning rate and the weight decay of each step."""

    def __init__(self):
        self.steps = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        (group,) = optimizer.param_groups
        self.steps.append((group["lr"], group["weight_decay"]))


@each("at, steps", [(0.5, 5), (0.5, 7), (0.4, 5)])
def test_the_second_stage_begins_where_weight_decay_falls(at, steps):
    model = CausalLM(
        **TINY,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1.0, weight_decay=0.1),
        scheduler=lambda optimizer: TwoStageLinear(optimizer, warmup_steps=1, at=at, second_peak=0.01),
    )
    notes = Notes()
    run = trainer(max_steps=steps, callbacks=[WeightDecaySwitch(at=at), notes])
    run.fit(model, *[DataLoader(batches(steps), batch_size=None)] * 2)
    assert len(notes.steps) == steps
    assert [decay for _, decay in notes.steps] == [0.1 if rate > 0.1 else 0.0 for rate, _ in notes.steps]
    assert {decay for _, decay in notes.steps} == {0.1, 0.0}
