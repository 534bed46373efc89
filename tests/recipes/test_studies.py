"""Every study: its rows differ in what they say, and are the same wherever two studies share a name."""

import re
from pathlib import Path
from pydoc import locate

import pytest
import torch

from lightning_lowbit.cli import run
from lightning_lowbit.cli.lab.compare import command
from lightning_lowbit.cli.lab.compare.study import read_study
from lightning_lowbit.nn import LinearCasts
from lightning_lowbit.nn.casts.traits import OPERANDS
from lightning_lowbit.optim.adam import PRESETS as GAMMAS
from lightning_lowbit.recipes.spikes import GradientSpikes
from tests.recipes.recipe_names import RULES, STUDIES, save_pretrained
from tests.tables import each

FP4_STUDIES = ("scale_formats", "block_sizes", "stochastic_rounding", "nearest_rounding")


def runs_of(study):
    return command.runs_of(read_study(study).rows, Path("out"), ())


def casts_of(study):
    """By row, the casts."""
    arguments = {row.name: row.config["trainer"]["plugins"]["init_args"] for row in read_study(study).rows}
    return {name: LinearCasts.of(given["casts"]) for name, given in arguments.items()}


def differing(casts, other):
    return {operand for operand in OPERANDS if getattr(casts, operand) != getattr(other, operand)}


def short(part):
    """The name of a class in a configuration."""
    return part["class_path"].rpartition(".")[2]


def has_no_switch(row):
    """Whether one precision holds from first to last."""
    return not any(short(callback).endswith("Switch") for callback in row.config["trainer"]["callbacks"])


@each("name", FP4_STUDIES)
def test_the_rows_of_a_study_differ_in_their_casts_alone(name):
    study, casts = read_study(name), casts_of(name)
    assert study.name == name and study.baseline == "bf16"
    assert casts["bf16"] == LinearCasts() and casts["e4m3"] == LinearCasts.preset("nvfp4")
    assert len(set(casts.values())) == len(casts)
    assert {len(row.seeds) for row in study.rows if row.name in ("bf16", "e4m3")} == {3}
    for row in study.rows:
        del row.config["trainer"]["default_root_dir"], row.config["trainer"]["plugins"]["init_args"]["casts"]
        assert row.config["trainer"].pop("plugins")["init_args"] == {"skip": ["lm_head"]}
        assert row.config == study.rows[0].config
    assert has_no_switch(study.rows[0])


def test_the_rows_of_fp8_scalings():
    expected = {
        "bf16_400": ("LowBitPrecision", {"casts": "bf16"}),
        "fp8": ("FP8Precision", {"scaling": "delayed"}),
        "fp8_current": ("FP8Precision", {"scaling": "current"}),
        "fp8_row": ("FP8Precision", {"scaling": "row"}),
        "mxfp8": ("LowBitPrecision", {"casts": "mxfp8"}),
        "fp8+smooth_swiglu": ("FP8Precision", {"scaling": "delayed", "smooth_swiglu": "channel"}),
        "fp8+w3_bf16": ("FP8Precision", {"scaling": "delayed", "overrides": {"down_proj": "bf16"}}),
    }
    rows = {row.name: row for row in read_study("fp8_scalings").rows}
    assert rows.keys() == expected.keys()
    for name, row in rows.items():
        kind, arguments = expected[name]
        trainer = row.config["trainer"]
        assert short(trainer["plugins"]) == kind, name
        assert trainer["plugins"]["init_args"] == {**arguments, "skip": ["lm_head"]}, name
        assert trainer["max_steps"] == 400 and len(row.seeds) == 3 and has_no_switch(row), name


def test_the_rows_of_qat():
    study = read_study("qat")
    seen = {}
    for row in study.rows:
        assert row.config["trainer"]["max_steps"] == 400 and row.seeds == [0, 1, 2]
        plugin, optimizer = row.config["trainer"]["plugins"], row.config["model"]["init_args"]["optimizer"]
        arguments = plugin["init_args"]
        seen[row.name] = (arguments.get("weight_bits"), short(optimizer), optimizer["init_args"]["lr"])
        kinds = {"bf16": "LowBitPrecision", "tern": "TernaryPrecision"}
        assert short(plugin) == kinds.get(row.name[:4], "IntegerPrecision")
        assert arguments["skip"] == ["lm_head"] and arguments.get("activation_bits") in (None, 8, seen[row.name][0])
    names = {"adamw": "AdamW", "stable_spam": "StableSPAM"}
    bits = {"bf16": None, "int4": 4, "int3": 3, "int2": 2, "ternary": None}
    assert seen == {
        f"{precision}+{optimizer}@{rate}": (bits[precision], names[optimizer], float(rate))
        for rate in ("1e-3", "5e-3")
        for precision in bits
        for optimizer in names
    }


def test_the_rows_of_progressive():
    last = {}
    for row in read_study("progressive").rows:
        at_the_start = [switch for switch in callbacks_of(row, "PrecisionSwitch") if switch["at"] == 0]
        last[row.name] = (at_the_start[-1].get("over"), at_the_start[-1].get("schedule"))
    schedules = ("linear", "cosine", "sigmoid", "delayed")
    assert last == {"sudden": (None, None), **{name: (0.5, name) for name in schedules}}


def test_the_rows_of_loss_scaling_differ_in_the_scale_alone():
    scales, last = {}, read_study("loss_scaling").rows[-1].config
    for row in read_study("loss_scaling").rows:
        arguments = row.config["trainer"]["plugins"]["init_args"]
        dtype, scaler = arguments.pop("compute_dtype"), arguments.pop("scaler")
        made = None if scaler is None else locate(scaler["class_path"])(**scaler["init_args"], device="cpu")
        scales[row.name] = dtype, made and (type(made).__name__, made.get_scale())
        callbacks = [callback["class_path"] for callback in row.config["trainer"].pop("callbacks")]
        assert ("lightning_lowbit.LossScaleMonitor" in callbacks) == (dtype == "fp16"), row.name
        del row.config["trainer"]["default_root_dir"]
        assert row.config == last | {"trainer": row.config["trainer"]}, row.name
        assert row.seeds == [0, 1, 2]
    assert scales == {
        "dpo_bf16": ("bf16", None),
        **{f"dpo_scale_{scale}": ("fp16", ("StaticGradScaler", scale)) for scale in (1, 1024, 65536)},
        "dpo_tiny_loss": ("fp16", ("ConservativeGradScaler", 2**18)),
    }


def callbacks_of(row, name):
    """The arguments of the callbacks of a class."""
    given = [c.get("init_args", {}) for c in row.config["trainer"]["callbacks"] if short(c) == name]
    return [arguments if isinstance(arguments, dict) else arguments.as_dict() for arguments in given]


def test_the_rows_of_gradient_noise_differ_in_casts_and_switch():
    study, casts = read_study("gradient_noise"), casts_of("gradient_noise")
    nvfp4 = LinearCasts.preset("nvfp4")
    for row in study.rows:
        precision, _, target = row.name.removeprefix("noise_").partition("+")
        changed = {} if precision == "bf16" else differing(casts[row.name], nvfp4)
        assert set(changed) == ({"wgrad_g", "wgrad_x"} if precision == "int2" else set()), row.name
        assert (casts[row.name] == LinearCasts()) == (precision == "bf16")
        switches = [s for s in callbacks_of(row, "PrecisionSwitch") if s["to"] != "fqt"]
        when = {"below": {}} if precision == "int2" else {"at": 0.8}
        assert switches == ([{"to": target.replace("_", "-"), **when}] if target else []), row.name
        assert callbacks_of(row, "GradientNoiseMonitor") == [{"every_n_steps": 5}]
        assert row.seeds == [0, 1, 2] and row.config["model"] == study.rows[0].config["model"]
    targets = ("", "+qaf", "+hp_forward", "+bf16")
    assert set(casts) == {"noise_bf16", *(f"noise_{p}{target}" for p in ("nvfp4", "int2") for target in targets)}
    assert casts["noise_int2"].wgrad_g.element == casts["noise_int2"].wgrad_x.element == "int2"


def test_the_rows_of_rollback_differ_in_what_is_spoilt_and_who_watches():
    study = read_study("rollback")
    for row in study.rows:
        spoilt = {"clean": [], "noise": [{"steps": [150]}]}
        spoilt |= {kind: [{"steps": [150], "kind": kind}] for kind in ("nan", "shuffle")}
        kind, _, rollback = row.name.removeprefix("rollback_").partition("+")
        assert callbacks_of(row, "CorruptBatches") == spoilt[kind]
        assert len(callbacks_of(row, "SpikeRollback")) == bool(rollback)
        trainer = row.config["trainer"]
        trainer["callbacks"] = [c for c in trainer["callbacks"] if not re.search("Corrupt|Rollback", c["class_path"])]
        del trainer["default_root_dir"]
        assert row.config == study.rows[0].config and row.seeds == [0, 1, 2]
    assert {row.name for row in study.rows} == {
        "rollback_clean",
        *(f"rollback_{kind}{how}" for kind in ("noise", "shuffle", "nan") for how in ("", "+rollback")),
        *(f"rollback_{kind}+often" for kind in ("noise", "nan")),
    }


def spikes_of(row):
    """Probability, factor, share and seed of each callback that makes spikes."""
    made = [GradientSpikes(**arguments) for arguments in callbacks_of(row, "GradientSpikes")]
    return [(spikes.probability, spikes.factor, spikes.share, spikes.seed) for spikes in made]


def check_optimizer(row, name, precision, lr=1e-3):
    """What Adam, SPAM and Stable-SPAM are in all three studies, defaults included; or a row of table 4.6."""
    optimizer = row.config["model"]["init_args"]["optimizer"]
    made = locate(optimizer["class_path"])([torch.nn.Parameter(torch.zeros(2, 2))], **optimizer["init_args"])
    (options,), kind = made.param_groups, type(made).__name__
    assert kind == {"adam": "AdamW", "spam": "SPAM"}.get(name, "StableSPAM"), row.name
    assert (options["lr"], list(options["betas"]), options["weight_decay"]) == (lr, [0.9, 0.999], 0), row.name
    if kind == "AdamW":
        return
    assert options["reset_interval"] == 100, row.name
    rules = (options["element_clip"], options["norm_clip"])
    if kind == "SPAM":
        assert rules == ("spike_clip", None) and (options["spike_threshold"], options["warmup_steps"]) == (5000, 30)
        return
    gammas = GAMMAS["bf16" if precision == "bf16" else "4-bit"]
    assert {name: options[name] for name in gammas} == gammas, f"{row.name} has not the values of its table"
    assert rules == RULES[name], row.name
    assert (options["warmup_steps"], options["total_steps"], options["matrices_only"]) == (0, None, False), row.name


PLUGINS = {"bf16": {"casts": "bf16"}, "int4": {"weight_bits": 4, "activation_bits": 4, "group": 128}}
PLUGINS["fp4"] = {"casts": "e1m2"}
SPIKES = {"spikes": [(0.01, 1000, 1, None)], "elements": [(0.01, 1000, 0.01, None)]}
SPIKED = ("adam", "adam+gradclip", "spam", "stable_spam")
RATED = ("bf16_adam", "bf16_stable_spam", "int4_adam", "int4_spam", "int4_stable_spam")
ROWS = {
    "spikes": [
        *(f"{precision}+{optimizer}" for precision in ("bf16", "int4") for optimizer in ("adam", "stable_spam")),
        *(f"{precision}+{optimizer}+spikes" for precision in ("bf16", "int4") for optimizer in SPIKED),
        *(f"int4+{optimizer}+elements" for optimizer in SPIKED),
    ],
    "learning_rates": [f"{name}@{rate}" for name in RATED for rate in ("5e-4", "1e-3", "2e-3", "5e-3", "1e-2")],
    "ablation": [f"{precision}+{name}" for precision in ("fp4", "bf16") for name in ("adam", *RULES)],  # of table 4.6
}


@pytest.mark.fast("ablation")
@pytest.mark.parametrize("name", ROWS)
def test_the_rows_of_a_study_of_optimizers_differ_in_what_they_say_alone(name):
    study = read_study(name)
    assert sorted(row.name for row in study.rows) == sorted(ROWS[name])
    for row in study.rows:
        precision, optimizer = re.match(r"([a-z\d]+)[+_]([a-z_]+)", row.name).groups()
        check_optimizer(row, optimizer, precision, float(row.name.partition("@")[2] or 1e-3))
        assert spikes_of(row) == SPIKES.get(row.name.split("+")[-1], []), row.name
        trainer = row.config["trainer"]
        assert trainer.pop("plugins")["init_args"] == {**PLUGINS[precision], "skip": ["lm_head"]}, row.name
        del trainer["default_root_dir"], row.config["model"]["init_args"]["optimizer"]
        assert trainer.pop("gradient_clip_val", None) == (1.0 if "gradclip+" in row.name else None), row.name
        # One that says what holds anyway: a row in four bits has it, one in bf16 has not.
        no_switch = {"class_path": "lightning_lowbit.PrecisionSwitch", "init_args": {"to": "fqt", "at": 0.9}}
        trainer["callbacks"] = [c for c in trainer["callbacks"] if short(c) != "GradientSpikes" and c != no_switch]
        assert row.config == study.rows[0].config, row.name
        assert len(row.seeds) == 3
    assert study.baseline.startswith("bf16") and study.rows[0].config["trainer"]["max_steps"] == 250
    assert has_no_switch(study.rows[0])


@pytest.mark.slow
def test_studies_share_what_has_the_same_name():
    runs = [run for name in STUDIES for run in runs_of(name)]
    recipes = {(run.folder, run.recipe) for run in runs}
    assert len(recipes) == len({folder for folder, _ in recipes}) < len(runs)


@pytest.mark.fast("ablation")
@pytest.mark.parametrize("name", STUDIES)
def test_a_row_of_each_study_parses(name):
    save_pretrained("model")
    Path("row.yaml").write_text(runs_of(name)[-1].recipe)
    run.check(["fit", "--config=row.yaml"])


def test_scale_formats_and_block_sizes_are_what_their_names_say():
    for row, casts in (casts_of("scale_formats") | casts_of("block_sizes")).items():
        if row == "bf16":
            continue
        scale_format, _, block = row.partition("_block")
        for operand in OPERANDS:
            scale = getattr(casts, operand).scale
            assert (scale.format, scale.block) == (scale_format, int(block or 16))
            assert scale.two_level == (scale_format != "e8m0")
            assert scale.rounding == ("rceil" if scale_format == "e8m0" else "nearest")
            assert getattr(casts, operand).rounding == getattr(LinearCasts.preset("nvfp4"), operand).rounding


@each(
    "study, prefix, others", [("stochastic_rounding", "sr", "nearest"), ("nearest_rounding", "nearest", "stochastic")]
)
def test_one_operand_at_a_time_rounds_otherwise(study, prefix, others):
    casts = casts_of(study)
    everywhere = casts[f"all_{others}"]
    assert {getattr(everywhere, operand).rounding for operand in OPERANDS} == {others}
    assert everywhere.fprop_x.scale == LinearCasts.preset("nvfp4").fprop_x.scale
    for operand in OPERANDS:
        one = casts[f"{prefix}_{operand}"]
        assert differing(one, everywhere) == {operand}
        assert getattr(one, operand).rounding != others
        assert getattr(one, operand).scale == getattr(everywhere, operand).scale
