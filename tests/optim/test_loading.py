"""States that are not those of the parameters are refused with words, before anything changes, or changed later."""

import contextlib
import copy
import re

import pytest
import torch
from torch import nn

from lightning_lowbit.compilation import backend
from lightning_lowbit.optim import Adaptive
from tests.lightning_imports import LightningModule, pytorch, quiet_trainer
from tests.optim.conformance.entries import ENTRIES, assert_nothing_happened
from tests.optim.parameters import assert_same, make_parameters, set_gradients, snapshot, train
from tests.tables import each

STATES = ["StableSPAM", "StableSPAM fp8", "SPAM", "SPAM density", "LowBitAdamW fp32", "LowBitAdamW fp8"]
STATES += ["LowBitAdamW master", "Adaptive AdamW", "Adaptive AdamW fused", "Adaptive SGD"]
MAKERS = {name: ENTRIES[name] for name in STATES}
WITH_MOMENTS = {name: make for name, make in MAKERS.items() if not name.startswith("Adaptive")}
MATRICES = [(6, 200), (64, 64), (12, 5), (64,)]


def trained(name, shapes, names=None):
    """Parameters and their optimizer after two steps."""
    parameters = make_parameters(MAKERS[name].dtype, shapes)
    optimizer = MAKERS[name](parameters if names is None else zip(names, parameters, strict=True))
    train(optimizer, parameters, range(2))
    return parameters, optimizer


def refused(optimizer, parameters, saved):
    """Why a state is refused, which changes nothing."""
    before, groups = snapshot(optimizer, parameters), copy.deepcopy(optimizer.state_dict()["param_groups"])
    entries = {parameter: [*state] for parameter, state in optimizer.state.items()}
    with pytest.raises(ValueError) as raised:
        optimizer.load_state_dict(saved)
    assert_nothing_happened(optimizer, parameters, before, groups, "a refused state")
    assert entries == {parameter: [*state] for parameter, state in optimizer.state.items()}
    return str(raised.value)


@each("name", MAKERS)
@each(
    "shapes, others",
    [
        ([(64, 64), (64,)], [(64,), (64, 64)]),
        ([(6, 200), (3,)], [(600, 200), (3,)]),
        ([(600, 200), (3,)], [(6, 200), (3,)]),
        ([(128,)], [(129,)]),
        ([(6, 200)], [(200, 6)]),
        ([(2, 3, 130)], [(6, 130)]),
        ([()], [(1,)]),
    ],
)
def test_a_state_of_other_shapes_is_refused(name, shapes, others):
    _, saved = trained(name, shapes)
    parameters, optimizer = trained(name, others)
    why = refused(optimizer, parameters, saved.state_dict())
    assert "parameter 0 of group 0" in why and str(others[0]) in why, why
    assert "is needed" in why and "in the order of the saved run" in why, why


@each("name", MAKERS)
def test_a_state_of_other_groups_is_refused(name):
    parameters, optimizer = trained(name, MATRICES)
    others = make_parameters(parameters[0].dtype, MATRICES)
    for groups in ([others[:2]], [others[:1], others[1:]]):
        saved = MAKERS[name]([{"params": group} for group in groups]).state_dict()
        assert "has parameter groups of" in refused(optimizer, parameters, saved)


def test_the_message_names_the_parameter():
    _, saved = trained("StableSPAM", [(64, 64), (64,)])
    parameters, optimizer = trained("StableSPAM", [(64, 64), (32,)], ["first.weight", "norm.weight"])
    why = refused(optimizer, parameters, saved.state_dict())
    assert "parameter 1 of group 0 ('norm.weight', (32,))" in why, why
    assert "mean is a tensor of shape (64,), torch.float32, on cpu, and (32,), torch.float32 is needed" in why, why


def damages(name):
    """Ways to spoil a state: of entries that the optimizer itself keeps, of what holds them, and of groups."""
    entry = "threshold" if name.startswith("Adaptive") else "mean"
    return {
        "missing": lambda saved: saved["state"][0].pop(entry),
        "a number": lambda saved: saved["state"][0].update({entry: 3}),
        "nothing": lambda saved: saved["state"][0].update({entry: None}),
        "a list": lambda saved: saved["state"][0].update({entry: [1.0]}),
        "bools": lambda saved: saved["state"][0].update({entry: saved["state"][0][entry].bool()}),
        "complex": lambda saved: saved["state"][0].update({entry: saved["state"][0][entry].float() * 1j}),
        "sparse": lambda saved: saved["state"][0].update({entry: saved["state"][0][entry].to_sparse()}),
        "without numbers": lambda saved: saved["state"][0].update({entry: saved["state"][0][entry].to("meta")}),
        "steps in float": lambda saved: saved["state"][0].update(steps=torch.tensor(2.0)),
        "many steps": lambda saved: saved["state"][0].update(steps=torch.tensor([2, 3])),
        "no entries": lambda saved: saved["state"].update({0: 3}),
        "no state": lambda saved: saved.pop("state"),
        "no groups": lambda saved: saved.pop("param_groups"),
        "a state as a list": lambda saved: saved.update(state=[]),
        "groups as numbers": lambda saved: saved.update(param_groups=[1]),
        "a group without parameters": lambda saved: saved["param_groups"][0].pop("params"),
        "parameters twice": lambda saved: saved["param_groups"][0].update(params=[0, 0, 1, 2]),
        "parameters as a number": lambda saved: saved["param_groups"][0].update(params=4),
        "names of others": lambda saved: saved["param_groups"][0].update(param_names=["a"]),
        "a rule without a name": lambda saved: saved["param_groups"][0].update(element_clip=3),
        "a decay above 1": lambda saved: saved["param_groups"][0].update(gamma3=10**400),
        "a rate of NaN": lambda saved: saved["param_groups"][0].update(max_norm=float("nan")),
    }


@each("name", ["StableSPAM", "SPAM density", "LowBitAdamW master", "Adaptive AdamW"])
@each("what", damages("StableSPAM"))
def test_a_damaged_state_is_refused(name, what):
    if name.startswith(("SPAM", "LowBit")) and what == "a rate of NaN":
        what = "a rule without a name"  # the same option is there
    parameters, optimizer = trained(name, MATRICES)
    saved = copy.deepcopy(optimizer.state_dict())
    damages(name)[what](saved)
    assert refused(optimizer, parameters, saved).endswith(".")


@each("saved", [None, 3, [], "state", {}, {"state": {}}])
def test_what_is_no_state_is_refused(saved):
    for name in MAKERS:
        parameters, optimizer = trained(name, MATRICES)
        assert "state_dict() gave" in refused(optimizer, parameters, saved)


@each("name", WITH_MOMENTS)
def test_entries_that_nobody_reads_are_refused(name):
    parameters, optimizer = trained(name, MATRICES)
    more = {**optimizer.state_dict()["state"][0], "exp_avg": torch.ones(3)}
    for change in ({0: more}, {99: {}}, {"x": torch.ones(3)}):
        saved = optimizer.state_dict()
        saved["state"] = {**saved["state"], **change}
        assert "exp_avg" in (why := refused(optimizer, parameters, saved)) or "damaged" in why


@each("name", [*MAKERS, "Muon"])
@each("other", [*MAKERS, "Muon", "AdamW", "SGD", "Adagrad", "Adam", "NAdam", "RAdam", "Adamax"])
def test_a_state_of_another_optimizer_goes_on_or_is_refused(name, other):
    """What goes on is of the same class with the same rules, or of the wrapped optimizer alone."""
    dtype = torch.bfloat16 if "master" in name or "master" in other else torch.float32
    parameters, others = make_parameters(dtype, MATRICES), make_parameters(dtype, MATRICES)
    optimizer, saved = ENTRIES[name](parameters), (ENTRIES.get(other) or getattr(torch.optim, other))(others)
    train(optimizer, parameters, range(2))
    train(saved, others, range(2))
    adam, sgd = {"AdamW", "Adaptive AdamW", "Adaptive AdamW fused"}, {"Adaptive SGD", "SGD"}
    alike = next((kin for kin in (adam, sgd) if name in kin), {name})
    if other in alike:
        optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
        train(optimizer, parameters, [2])
        counts = optimizer.state[parameters[0]]
        assert counts["steps"] == (3 if other in ENTRIES else 1) and counts.get("step", 3) == 3, counts
    else:
        why = refused(optimizer, parameters, copy.deepcopy(saved.state_dict()))
        assert "another optimizer" in why or re.search(r"saved state has (\w+)=.*, this \w+ \1=.*saved value", why), why


@each("name", ["StableSPAM", "Adaptive AdamW"])
def test_named_parameters_in_another_order_are_refused(name):
    """Also between groups. Other names for the same places go on."""
    shapes = [(64, 64), (64, 64), (64,)]
    _, saved = trained(name, shapes, ["_orig_mod.a", "b", "c"])
    parameters, optimizer = trained(name, shapes, ["b", "a", "c"])
    why = refused(optimizer, parameters, saved.state_dict())
    assert "in another order: place 0 is now that of 'b', and was that of 'a'" in why, why
    for names in (["a", "b", "c"], ["x", "a", "c"]):
        trained(name, shapes, names)[1].load_state_dict(saved.state_dict())


def test_statistics_in_another_precision_are_converted():
    parameters, optimizer = trained("StableSPAM", MATRICES)
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state.update({name: value.double() for name, value in state.items() if value.is_floating_point()})
    before = snapshot(optimizer, parameters)
    optimizer.load_state_dict(saved)
    assert_same(snapshot(optimizer, parameters), before, "statistics in float64 are those in float32")


# --- changed after loading ---

LATER = {
    "a moment is shorter": lambda o, p: o.state[p].update(mean=o.state[p]["mean"].new_zeros(3)),
    "a moment is longer": lambda o, p: o.state[p].update(mean_square=o.state[p]["mean_square"].new_zeros(10**4, 10)),
    "a moment is transposed": lambda o, p: o.state[p].update(mean=o.state[p]["mean"].new_zeros(5, 6)),
    "a moment's memory is another": lambda o, p: setattr(o.state[p]["mean"], "data", torch.zeros(2)),
    "a moment is a number": lambda o, p: o.state[p].update(mean=0.5),
    "a moment is of another dtype": lambda o, p: o.state[p].update(mean=o.state[p]["mean"].short()),
    "a moment is elsewhere": lambda o, p: o.state[p].update(mean=o.state[p]["mean"].to("meta")),
    "a counter has no number": lambda o, p: o.state[p].update(steps=torch.zeros(0, dtype=torch.int64)),
    "a counter is a float": lambda o, p: o.state[p].update(steps=torch.zeros(())),
    "a statistic is a vector": lambda o, p: o.state[p].update(threshold=torch.zeros(5)),
    "the parameter is larger": lambda o, p: setattr(p, "data", p.new_zeros(600, 500)),
    "the parameter is smaller": lambda o, p: setattr(p, "data", p.new_zeros(2)),
    "the gradient is smaller": lambda o, p: setattr(p.grad, "data", torch.zeros(2)),
    "the gradient is larger": lambda o, p: setattr(p.grad, "data", torch.zeros(60, 50)),
}


@each("code", ["cpp", "eager"])
@each("name", MAKERS)
@each("what", LATER)
def test_what_is_changed_later_never_reaches_a_kernel(code, name, what):
    if name.startswith("Adaptive") and "moment" in what:
        return  # those of the wrapped optimizer are its own
    parameters, optimizer = trained(name, [(6, 5), (4, 3)])
    set_gradients(parameters, seed=3)
    LATER[what](optimizer, parameters[0])
    # Plain torch itself refuses another device, and takes what broadcasts.
    loose = code == "eager" and any(word in what for word in ("counter", "statistic", "elsewhere"))
    with backend(code):
        if loose:
            with contextlib.suppress(RuntimeError):
                optimizer.step()
        else:
            with pytest.raises(ValueError, match="tensor of shape|a float"):
                optimizer.step()


@each("name", MAKERS)
def test_gradients_and_parameters_have_the_signs_that_torch_reads(name):
    runs = []
    for is_marked in (False, True):
        parameters, optimizer = trained(name, [(6, 5), (4, 130)])
        for step in (2, 3):
            set_gradients(parameters, seed=step)
            if is_marked:
                for p in parameters:
                    p.grad = torch._neg_view(-p.grad)
                if step == 3 and "fused" not in name:  # torch's own fused step does not resolve them
                    parameters[0].data = torch._neg_view(-parameters[0].detach())
            optimizer.step()
        runs.append([p.detach().resolve_neg() for p in parameters])
    for found, wanted in zip(*reversed(runs), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_second_moments_of_a_wrapped_optimizer_have_its_dtype():
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        parameters = make_parameters(dtype, [(6, 5), (4,)])
        optimizer = Adaptive(torch.optim.AdamW(parameters, eps=1e-3), element_clip="spike_clip")
        train(optimizer, parameters, range(3))
        assert optimizer.state[parameters[0]]["exp_avg_sq"].dtype == dtype
        optimizer.state[parameters[0]]["exp_avg_sq"] = torch.zeros(3)
        set_gradients(parameters, seed=3)
        with pytest.raises(ValueError, match="SpikeClip compares the elements.*shape \\(3,\\)"):
            optimizer.step()


class SignDescent(torch.optim.Optimizer):
    """An optimizer of one's own, as few words as torch allows."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["last"] = parameter.grad.sign()
                parameter.sub_(group["lr"] * self.state[parameter]["last"])


@each("make", [SignDescent, torch.optim.Adafactor, torch.optim.AdamW, torch.optim.SGD])
def test_a_state_with_a_group_that_was_added_later_is_loaded(make):
    runs = []
    for _ in range(2):
        first, second = make_parameters(shapes=[(4, 3), (5,)])
        optimizer = Adaptive(make([first]))
        optimizer.add_param_group({"params": [second]})
        runs.append(([first, second], optimizer))
    train(runs[0][1], runs[0][0], range(3))
    runs[1][1].load_state_dict(copy.deepcopy(runs[0][1].state_dict()))
    for parameter, trained_one in zip(runs[1][0], runs[0][0], strict=True):
        parameter.data.copy_(trained_one)
    for parameters, optimizer in runs:
        train(optimizer, parameters, range(3, 5))
    assert_same(snapshot(runs[1][1], runs[1][0]), snapshot(runs[0][1], runs[0][0]), "it goes on otherwise")


# --- in Lightning ---


class Unfreezing(pytorch.callbacks.BaseFinetuning):
    """Gives the first layer to the optimizer in the second epoch."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.wide)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.wide, optimizer)


class FineTuned(LightningModule):
    def __init__(self, wrap):
        torch.manual_seed(0)
        super().__init__()
        self.wide, self.narrow, self.wrap = nn.Linear(16, 512), nn.Linear(512, 4), wrap

    def training_step(self, batch):
        return self.narrow(self.wide(batch)).square().mean()

    def configure_optimizers(self):
        return self.wrap(torch.optim.AdamW(self.narrow.parameters(), lr=1e-3))


def test_fine_tuning_resumes_as_with_the_wrapped_optimizer_alone(tmp_path):
    """Lightning then assigns the groups to the optimizer."""
    data = torch.utils.data.DataLoader(torch.randn(8, 16), batch_size=2)
    models = []
    for wrap in (lambda optimizer: optimizer, lambda optimizer: Adaptive(optimizer, element_clip=None, norm_clip=None)):
        for epochs in (2, 3):
            trainer = quiet_trainer(default_root_dir=tmp_path, max_epochs=epochs, callbacks=[Unfreezing()])
            model = FineTuned(wrap)
            trainer.fit(model, data, ckpt_path=None if epochs == 2 else tmp_path / "fine.ckpt")
            trainer.save_checkpoint(tmp_path / "fine.ckpt")
        assert len(trainer.optimizers[0].param_groups) == 2
        models.append([parameter.detach() for parameter in model.parameters()])
    assert_same(models[1], models[0], "another run")
