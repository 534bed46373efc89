"""DPO: the loss is that of the paper, the reference stays what it was, and fp16 loses gradients that are not scaled."""

import math
import re

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_lowbit import ConservativeGradScaler, LossScaleMonitor, LowBitPrecision, StaticGradScaler
from lightning_lowbit.recipes.tuning.preferences import PreferenceLM
from tests.lightning_imports import quiet_trainer
from tests.recipes.recipe_names import Logged, parts, write_small
from tests.tables import each

SIZE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}


def batch(length=17, number=0, size=4):
    """Tokens (size, length): what the data module makes, with a length of one token more than is read."""
    return torch.randint(0, 256, (size, length), generator=torch.Generator().manual_seed(number))


def model(beta=0.1, lr=1e-2, **kwargs):
    def optimizer(parameters):
        return torch.optim.AdamW(parameters, lr=lr, eps=1e-12, weight_decay=0)

    return PreferenceLM(beta, config=SIZE, seed=0, optimizer=optimizer, **kwargs)


def moved(beta=0.1, **kwargs):
    """A model that is no longer its reference."""
    made = model(beta, **kwargs)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return made


def trainer(*callbacks, **kwargs):
    return quiet_trainer(callbacks=[*callbacks], **{"devices": 1, "max_steps": 1, "log_every_n_steps": 1, **kwargs})


def fit(module, data, *callbacks, **kwargs):
    made = trainer(*callbacks, **kwargs)
    made.fit(module, *[DataLoader(data, batch_size=None)] * 2)
    return made


# --- the loss ---------------------------------------------------------------------------------------------------------


@each("beta", [1e-6, 1e-4, 0.1, 100.0])
def test_the_loss_begins_at_ln_2(beta):
    logged = fit(model(beta), [batch()]).callback_metrics
    assert torch.equal(logged["loss"], torch.tensor(math.log(2)))
    assert (logged["margin"], logged["accuracy"]) == (0, 0)


def log_probability(network, tokens, answer):
    """Of each token of the answer, after a pass of its own over those before it."""
    found = []
    for position in range(answer, len(tokens)):
        logits = network(input_ids=torch.tensor([tokens[:position]])).logits[0, -1].double()
        found.append((logits - logits.exp().sum().log())[tokens[position]].item())
    return sum(found) / len(found)


@pytest.mark.parametrize("length", [16, 17])
@torch.no_grad()
def test_the_loss_is_the_formula(length):
    beta, data, module = 3.0, batch(length), moved(3.0, lr=0.0)
    margins, answer = [], length // 2
    for preferred in data.tolist():
        other = preferred[:answer] + preferred[answer:][::-1]
        assert other != preferred
        ratios = [
            log_probability(module.model, tokens, answer) - log_probability(module.reference, tokens, answer)
            for tokens in (preferred, other)
        ]
        margins.append(ratios[0] - ratios[1])
    assert min(margins) < 0 < max(margins), "the pairs do not test what they should"

    def loss(beta):
        return sum(-math.log(1 / (1 + math.exp(-beta * margin))) for margin in margins) / len(margins)

    with torch.enable_grad():
        found = fit(module, [data]).callback_metrics
    accuracy = sum(margin > 0 for margin in margins) / len(margins)
    expected = {"loss": loss(beta), "margin": sum(margins) / len(margins), "accuracy": accuracy}
    expected |= {"val_loss": loss(1.0), "val_accuracy": accuracy}
    # Differences of log-probabilities of about 5 in float32, whose spacing there is 5e-7; a handful of them.
    assert {name: found[name].item() for name in expected} == pytest.approx(expected, rel=1e-5, abs=5e-6)


def test_validation_is_a_mean_over_pairs_with_a_smaller_last_batch():
    module, data = moved(), [batch(), batch(number=1, size=1)]
    (found,) = trainer().validate(module, DataLoader(data, batch_size=None), verbose=False)
    (whole,) = trainer().validate(module, DataLoader([torch.cat(data)], batch_size=None), verbose=False)
    assert found == pytest.approx(whole, rel=1e-6)
    apart = [trainer().validate(module, DataLoader([one], batch_size=None), verbose=False)[0] for one in data]
    assert abs(sum(one["val_loss"] for one in apart) / 2 - whole["val_loss"]) > 1e-4, "the naive mean is the same"


def test_the_gradient_of_a_logit_is_as_small_as_the_module_says():
    """β/2 over the tokens of all answers, at most; and not far from that where the network is as it was drawn."""
    beta, module, data, logits = 0.1, model(), batch(), []

    def keep(_, __, output):
        output.retain_grad()
        logits.append(output)

    module.model.lm_head.register_forward_hook(keep)
    (-torch.nn.functional.logsigmoid(beta * module._margins(data)).mean()).backward()
    (found,) = logits
    largest, bound = found.grad.abs().max().item(), beta / 2 / data[:, 8:].numel()
    assert 0.9 * bound < largest <= bound


@each("beta", [0, -0.1, math.inf, math.nan, True, "0.1", None])
def test_a_bad_beta(beta):
    message = f"beta is what multiplies the margin, above 0; got {beta!r}."
    with pytest.raises(ValueError, match=re.escape(message)):
        PreferenceLM(beta, config=SIZE)


# --- training ---------------------------------------------------------------------------------------------------------


def test_it_learns_in_a_few_steps():
    logged = Logged()
    fit(model(1.0), [batch(number=number) for number in range(2)], logged, max_steps=10)
    first, *_, last = logged.steps
    assert (first["accuracy"], last["accuracy"], last["val_accuracy"]) == (0, 1, 1)
    assert last["margin"] > 0.1 and last["loss"] < math.log(2) - 0.05


def test_the_reference_is_frozen_and_in_the_checkpoint():
    module = model(1.0, lr=0.1)
    modes = []
    module.reference.register_forward_pre_hook(lambda network, _: modes.append(network.training))
    before = {name: value.clone() for name, value in module.reference.state_dict().items()}
    made = fit(module, [batch()], max_epochs=3, max_steps=3)
    assert len(modes) > 3 and not any(modes), "with dropout the reference would not be the same each time"
    assert not any(parameter.requires_grad for parameter in module.reference.parameters())
    trained = {id(parameter) for group in made.optimizers[0].param_groups for parameter in group["params"]}
    assert trained == {id(parameter) for parameter in module.model.parameters()}

    made.save_checkpoint("model.ckpt")
    loaded = PreferenceLM.load_from_checkpoint("model.ckpt", weights_only=True)
    assert loaded.beta == 1.0
    for name, value in before.items():
        assert torch.equal(module.reference.get_parameter(name), value), f"{name} of the reference has moved"
        assert torch.equal(loaded.reference.get_parameter(name), value), f"{name} of the reference is another one"
        assert torch.equal(loaded.model.get_parameter(name), module.model.get_parameter(name)), name
    assert not torch.equal(loaded.model.lm_head.weight, loaded.reference.lm_head.weight), "nothing was learned"


@each("share", [0.0, 0.25, 1.0])
def test_zero_gradients_are_those_of_the_model(share):
    class Zeros(PreferenceLM):
        def on_before_optimizer_step(self, optimizer):
            for parameter in self.model.parameters():
                flat = parameter.grad.fill_(1.0).view(-1)
                flat[: round(share * flat.numel())] = 0  # numbers of elements that 4 divides
            super().on_before_optimizer_step(optimizer)

    logged = fit(Zeros(config=SIZE), [batch()]).callback_metrics
    assert logged["zero_gradients"].item() == pytest.approx(share)


# --- fp16 -------------------------------------------------------------------------------------------------------------


def test_gradients_that_vanish_in_fp16_unless_the_loss_is_scaled():
    """Without a scale none reaches a layer below the last; with it, those of tokens that are not in the text are 0."""
    zeros, moves = {}, {}
    scalers = {"1": StaticGradScaler(1, device="cpu"), "2^18": ConservativeGradScaler(preset="tiny-loss", device="cpu")}
    for name, scaler in scalers.items():
        logged, module = Logged(), model(1e-4, lr=1e-3)
        weight = module.model.model.layers[0].mlp.gate_proj.weight
        before = weight.detach().clone()
        plugin = LowBitPrecision("bf16", compute_dtype="fp16", scaler=scaler, skip=["reference"])
        fit(module, [batch(33, size=8)], logged, plugins=[plugin], max_epochs=3, max_steps=3)
        assert plugin.skipped_steps == 0
        zeros[name] = logged.steps[0]["zero_gradients"]
        moves[name] = ((weight - before).abs() > 0.1 * 3 * 1e-3).float().mean().item()  # a tenth of what Adam moves by
    assert zeros["1"] > 0.8 > 0.2 > zeros["2^18"], zeros
    assert moves["1"] == 0 and moves["2^18"] > 0.9, moves


# --- the recipes ------------------------------------------------------------------------------------------------------


@pytest.mark.fast("configs0-262144")
@pytest.mark.parametrize(("configs", "scale"), [(("dpo",), 2**18), (("quickstart", "fp16"), 2**16)])
def test_the_scalers_of_the_recipes(configs, scale):
    write_small()
    parsed = parts(*configs, "small.yaml")
    plugin = parsed.trainer.precision_plugin
    assert plugin.compute_dtype == torch.float16
    assert (type(plugin.scaler), plugin.scaler.get_scale()) == (ConservativeGradScaler, scale)
    assert [type(one) for one in parsed.trainer.callbacks].count(LossScaleMonitor) == 1
    assert len(parsed.trainer.callbacks) > 5, "the overlay's callbacks took the place of the recipe's"
    if configs == ("dpo",):
        assert (type(parsed.model), parsed.model.beta) == (PreferenceLM, 1e-4)
        planned = plugin.plan(parsed.model)
        assert len(planned) == 7 and not any("reference" in name for name in planned)
