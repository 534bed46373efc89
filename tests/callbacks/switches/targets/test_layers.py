"""Switches of some layers."""

import pytest
import torch

from lightning_lowbit import FP4Precision, FP8Precision, LowBitPrecision, PrecisionSwitch, QAFSwitch, SpikeRollback
from lightning_lowbit.nn import OPERANDS, PRESETS, LinearCasts
from lightning_lowbit.precision.checkpoints.trained import primitive
from tests.callbacks.switches.runs import RESUMES, Scheduled, Witness, fit_fp4
from tests.lightning_imports import MisconfigurationException
from tests.precision.fp16.runs import assert_same
from tests.precision.regression_model import DOWN, LAYERS, On, Regression, flat, state, trainer
from tests.tables import each

pytestmark = RESUMES

HP = LinearCasts()
WEIGHTS_OF_DOWN = {f"{DOWN}/fprop_w", f"{DOWN}/dgrad_w"}  # smoothed, and scaled by themselves
NVFP4 = PRESETS["nvfp4"]()


def test_layers_that_match_get_other_casts_and_others_keep_theirs():
    seen = fit_fp4(PrecisionSwitch({"head": "bf16", "down_proj": "nvfp4-4over6", "mlp": "mxfp4"}, step=2))
    assert seen.of("head") == ["nvfp4"] * 2 + ["bf16"] * 4
    assert seen.of("mlp.down_proj") == ["nvfp4"] * 2 + ["nvfp4-4over6"] * 4, "the first pattern holds"
    assert seen.of("mlp.up_proj") == ["nvfp4"] * 2 + ["mxfp4"] * 4
    assert seen.of("first") == ["nvfp4"] * 6
    e1m2 = LinearCasts.of({"fprop_w": {"element": "e1m2"}})
    seen = fit_fp4(PrecisionSwitch({"head": {"fprop_w": {"element": "e1m2"}}, "first": e1m2}, step=1))
    assert seen.casts[1]["head"] == seen.casts[1]["first"] == e1m2


def test_phases_and_mappings_compose():
    seen = fit_fp4(
        PrecisionSwitch({"head": "fqt"}, step=5),
        PrecisionSwitch({"head": "mxfp4", "first": "bf16"}, step=1),
        QAFSwitch(step=3),
        PrecisionSwitch({"head": "qaf"}, step=2),
        PrecisionSwitch("fqt", step=4),
    )
    assert seen.phases == ["fqt"] * 3 + ["qaf"] + ["fqt"] * 2
    qaf = NVFP4.phase("qaf")
    assert [casts["head"] for casts in seen.casts] == [NVFP4, PRESETS["mxfp4"](), qaf, qaf, qaf, NVFP4]
    assert [casts["first"] for casts in seen.casts] == [NVFP4] + [HP] * 5


@each("reverse", [False, True], fast=1)
def test_of_mappings_that_are_late_the_last_one_due_acts_last(reverse):
    """A run resumes with switches that it did not have: all act in its first step."""
    fit_fp4(keep="trained", max_steps=4)
    switches = [PrecisionSwitch({"head": "bf16"}, step=1), PrecisionSwitch({"head": "mxfp4"}, step=2)]
    seen = fit_fp4(*switches[:: -1 if reverse else 1], ckpt_path="4.ckpt")
    assert seen.of("head") == ["mxfp4"] * 2


def test_lambda_is_left_alone():
    seen = fit_fp4(PrecisionSwitch("fqt", step=0, steps=4), PrecisionSwitch({"head": "bf16"}, step=2))
    assert seen.blends == [0, 0.25, 0.5, 0.75, 1, 1]


@each("accumulate, steps", [(2, (2, 5)), (2, (1, 3, 4, 6)), (1, range(1, 7))], fast=1)
def test_resumes_with_the_casts_and_their_histories(accumulate, steps):
    """Delayed scaling comes and goes, and smoothing is there all the time."""
    kwargs = {"max_steps": 7, "accumulate_grad_batches": accumulate}

    def run(ckpt_path=None, keep=None):
        switches = [
            PrecisionSwitch({"head": "bf16", "mlp": "nvfp4"}, step=2, rewarm=3),
            PrecisionSwitch({"mlp": "fp8-delayed"}, step=4, moments="reset"),
        ]
        plugin = FP8Precision("delayed", smooth_swiglu="channel")
        seen = fit_fp4(*switches, plugin=plugin, ckpt_path=ckpt_path, keep=keep, **kwargs)
        return seen, state(plugin)

    seen, whole = run(keep="trained")
    assert list(whole["casts"]) == ["head"], "the MLP has the constructor's casts again"
    assert whole["amax_history"].keys() == {f"{name}/{o}" for name in LAYERS[:-1] for o in OPERANDS} - WEIGHTS_OF_DOWN
    for step in steps:
        resumed, resumed_state = run(f"{step}.ckpt")
        assert resumed.casts == seen.casts[step:], f"resumed after step {step}: other casts"
        assert torch.equal(resumed.weights, seen.weights), f"resumed after step {step}: other weights"
        for kind in ("amax_history", "channel_amax"):
            assert_same(resumed_state[kind], whole[kind], f"resumed after step {step}: {kind}")


def test_amaxes_of_other_layers_go_on():
    """Weights stay, so that every history depends on the step alone."""

    class Still(Regression):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.0)

    def histories(*switches):
        plugin = FP8Precision("delayed", compute_dtype="fp32", exact=True)
        fit_fp4(*switches, model=Still(), plugin=plugin)
        return state(plugin)["amax_history"]

    whole = histories()
    switched = histories(PrecisionSwitch({"first": "nvfp4"}, step=3), PrecisionSwitch({"first": "fqt"}, step=4))
    assert whole.keys() == switched.keys()
    for name, history in whole.items():
        if name.startswith("first/"):
            expected = 2 if history.any() else 0  # no gradient of the input is asked for
            assert switched[name].count_nonzero() == expected, f"{name}: of the last two steps"
        elif name.endswith(("_w", "first/fprop_x")):
            assert torch.equal(switched[name], history), f"{name} has not gone on"
        else:
            assert switched[name].count_nonzero() == history.count_nonzero(), f"{name} has not gone on"


@each("preset", PRESETS)
def test_casts_of_a_checkpoint_are_primitives(preset, tmp_path):
    casts = PRESETS[preset]()
    torch.save(primitive(casts), tmp_path / "x.pt")
    assert LinearCasts.of(torch.load(tmp_path / "x.pt", weights_only=True)) == casts


def test_another_run_begins_with_the_constructors_casts():
    plugin, model = FP4Precision(overrides={"first": "mxfp4"}, quantize_output=True), Regression()
    for _ in range(2):
        seen = fit_fp4(PrecisionSwitch({"head": "bf16", "first": "bf16"}, step=3), plugin=plugin, model=model)
        assert seen.of("head") == ["nvfp4"] * 3 + ["bf16"] * 3
        assert seen.of("first") == ["mxfp4"] * 3 + ["bf16"] * 3


def test_the_same_trainer_goes_on():
    plugin, model, seen = FP8Precision("delayed"), Regression(), Witness()
    switch = PrecisionSwitch({"head": "bf16"}, step=1, moments="reset")
    made = trainer(plugin, callbacks=[switch, seen], max_steps=-1, max_epochs=1)
    for epochs in (1, 2):
        made.fit_loop.max_epochs = epochs
        made.fit(model)
    assert seen.of("head") == ["fp8-delayed", *["bf16"] * 3]


def test_the_same_trainer_goes_back_to_an_earlier_checkpoint(tmp_path):
    model, seen = Scheduled(), Witness(keep="trained")
    switch = PrecisionSwitch({"head": "bf16"}, step=3, rewarm=2)
    made = trainer(FP4Precision(quantize_output=True), callbacks=[switch, seen], max_steps=6, limit_train_batches=64)
    made.fit(model)
    assert seen.of("head") == ["nvfp4"] * 3 + ["bf16"] * 3
    rates, before = list(model.rates), len(seen.casts)
    made.fit(model, ckpt_path="1.ckpt")
    assert seen.of("head")[before:] == ["nvfp4"] * 2 + ["bf16"] * 3
    assert model.rates[before:] == rates[1:], "other learning rates"
    assert switch._record is not None
    assert switch._record["step"] == 3


def test_a_checkpoint_with_casts_of_layers_that_are_not_converted(tmp_path):
    fit_fp4(PrecisionSwitch({"head": "bf16"}, step=1), keep="trained")
    plugin = FP4Precision(skip=["head"])
    with pytest.warns(UserWarning, match="layers that this run does not convert: head; they stay in high precision"):
        seen = fit_fp4(PrecisionSwitch({"first": "bf16"}, step=4), plugin=plugin, ckpt_path="3.ckpt")
    assert seen.of("first") == ["nvfp4", "bf16", "bf16"]
    assert list(state(plugin)["casts"]) == ["first"]


def test_a_resumed_run_leaves_the_phase_as_it_was_saved():
    """Unless a switch is no longer there that has acted since."""

    def by_hand(trainer, *_):
        if trainer.global_step == 2:
            trainer.precision_plugin.set_phase("hp-forward")

    switch = QAFSwitch(step=1, rewarm=2)
    assert fit_fp4(switch, On(on_train_batch_start=by_hand), keep="trained").phases == [
        "fqt",
        "qaf",
        *["hp-forward"] * 4,
    ]
    assert fit_fp4(switch, ckpt_path="3.ckpt").phases == ["hp-forward"] * 3
    last = PrecisionSwitch("bf16", step=2)
    assert fit_fp4(switch, last, keep="trained").phases == ["fqt", "qaf", *["bf16"] * 4]
    assert fit_fp4(switch, last, ckpt_path="3.ckpt").phases == ["bf16"] * 3
    assert fit_fp4(switch, ckpt_path="3.ckpt").phases == ["qaf"] * 3


def test_a_switch_that_is_due_later_in_a_longer_run_says_so_and_acts_again():
    to_fqt = On(on_train_start=lambda trainer, _: trainer.precision_plugin.set_phase("fqt"))
    fit_fp4(QAFSwitch(at=0.5), max_steps=4, keep="trained")
    for back, phases in (([to_fqt], ["fqt"] * 2 + ["qaf"] * 6), ([], ["qaf"] * 8)):
        with pytest.warns(UserWarning, match="in phase 'qaf' already.*due at step 6"):
            assert fit_fp4(QAFSwitch(at=0.5), *back, max_steps=12, ckpt_path="4.ckpt").phases == phases


def test_a_rollback_from_after_a_switch_to_before_it():
    """Histories of layers that have other casts since are passed over."""

    class Bad(Regression):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (float("nan") if self.trainer.global_step == 4 else 1)

    rollback = SpikeRollback(warmup_steps=50, every_n_steps=50)
    switches = [PrecisionSwitch({"head": "bf16"}, step=2), PrecisionSwitch({"first": "nvfp4"}, step=3)]
    plugin = FP8Precision("delayed")
    with pytest.warns(UserWarning, match="continues with the weights of step 0"):
        seen = fit_fp4(*switches, rollback, model=Bad(), plugin=plugin, max_steps=9)
    assert seen.of("head")[-1] == "bf16"
    names = {name.partition("/")[0] for name in state(plugin)["amax_history"]}
    assert names == {name for name in LAYERS if name.startswith("mlp")}


@each(
    "plugin, to, message",
    [
        ({}, {"heed": "bf16"}, r"to={'heed': 'bf16'}\) .*: casts: the pattern 'heed' matches no converted layer"),
        ({}, {"gate_proj": "bf16", "mlp": "mxfp4", "head": "bf16"}, "head, left in high precision by skip or only"),
        ({}, {"mlp": "mxfp4", "gate_proj": "bf16"}, "'gate_proj' gives no layer its casts: .* names .*put it first"),
        ({"backend": "native"}, {"first": "mxfp6"}, "cannot be: backend='native', but fprop of first has no native"),
    ],
)
def test_casts_that_cannot_be(plugin, to, message):
    seen = Witness()
    with pytest.raises(MisconfigurationException, match=message):
        fit_fp4(PrecisionSwitch(to, step=2), seen, plugin=LowBitPrecision("bf16", skip=["head"], **plugin))
    assert not seen.casts


def test_by_hand_before_there_is_a_model():
    with pytest.raises(MisconfigurationException, match="none has been converted yet. Give the plugin overrides"):
        FP4Precision(quantize_output=True).set_casts({"head": "bf16"})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch looks at it itself
@each("changes", [False, True])
def test_compiled_before_training_it_computes_the_same(changes):
    """One graph for each precision, and none for going back."""
    from torch._dynamo.utils import counters

    def train(compiled):
        model = Regression()
        if compiled:
            model.mlp.compile(backend="eager")
        to = {"mlp": "mxfp4"} if changes else "qaf"
        back = {"mlp": "fqt"} if changes else "fqt"
        fit_fp4(PrecisionSwitch(to, step=2), PrecisionSwitch(back, step=4), model=model)
        return flat(model)

    counters.clear()
    torch._dynamo.reset()
    eager, compiled = train(False), train(True)
    assert torch.equal(eager, compiled)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"], dict(counters["graph_break"])
