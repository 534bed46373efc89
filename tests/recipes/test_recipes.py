"""Every recipe and overlay: two steps of a small version, and its full size without memory for the numbers."""

import os
import re
import signal
from itertools import product
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Callback

from lightning_lowbit import Adaptive, PrecisionSummary, cli
from lightning_lowbit.cli import run
from lightning_lowbit.cli.configs import merge_all, recipes
from lightning_lowbit.nn import LinearCasts
from lightning_lowbit.nn.casts.linear_casts import PRESETS
from lightning_lowbit.nn.casts.traits import GEMMS
from lightning_lowbit.precision import LowBitPrecision
from tests.cli.run.commands import scalars
from tests.recipes.data.streams import write_c4
from tests.recipes.recipe_names import OVERLAYS, RECIPES, RULES, STUDIES, parts, run_json, save_pretrained, write_small
from tests.tables import each

# Millions of parameters; of dpo with the reference.
SIZES = {"c4": 58.07, "llama_130m": 134.11, "llama_350m": 367.97, "llama_1b": 1339, "llama_7b": 6738}
SIZES |= {"multi_node": 6738, "bitnet": 3.35, "olmoe": 10.63, "dpo": 0.935, "small_long": 0.2}

# Casts that overlays make of the recipe's, where they are no preset of the same name.
CHANGES = {
    "fp8": LinearCasts.preset("fp8-delayed"),
    "averis": LinearCasts.preset("nvfp4").replace(subtract_mean=GEMMS),
    "dge": LinearCasts.preset("nvfp4").replace(surrogate={"fprop_w": "dge"}),
    "dequantized": LinearCasts.preset("nvfp4").with_backward("dequantized"),
    "trust": LinearCasts.preset("nvfp4").replace(surrogate={"fprop_x": "trust", "fprop_w": "trust"}),
    **{f"int{bits}_qat": LinearCasts.preset(f"int{bits}") for bits in (2, 3, 4)},
    "e1m2_qat": LinearCasts.preset("e1m2"),
    "bitnet": LinearCasts.preset("ternary"),
    "dpo": LinearCasts(),
    "stable_ternary": LinearCasts.of({"preset": "ternary", "fprop_w": {"scale": {"factor": 1.1547}}}),
}

# Optimizers that overlays put in the place of the recipe's Stable-SPAM.
OPTIMIZERS = {
    **dict.fromkeys(("adamw", "bitnet", "stable_ternary", "dpo"), "AdamW"),
    "spam": "SPAM",
    "lion": "Lion",
    "muon": "Muon",
    "lion_adaptive": "Adaptive of Lion",
    "adam_mini": "Adam_mini",
    "adam_mini_adaptive": "Adaptive of Adam_mini",
}

# Casts that overlays make of those of some layers.
SOME_LAYERS = {
    "smooth_swiglu": (r"\.down_proj$", LinearCasts.preset("nvfp4").replace(smooth="channel")),
    "w3_bf16": (r"\.down_proj$", LinearCasts()),
    "edges_bf16": (r"\.layers\.[03]\.", LinearCasts()),
}

# What else some overlays need for it: rows are shorter than their groups, and Adam-mini is told the size of the model.
GROUPS = "trainer: {plugins: {init_args: {group: 16}}}"
HEADS = "{init_args: {dim: 32, n_heads: 2}}"

FITTING = {
    **dict.fromkeys(("int4_qat", "int3_qat", "int2_qat"), GROUPS),
    "adam_mini": f"model: {{init_args: {{optimizer: {HEADS}}}}}",
    "adam_mini_adaptive": f"model: {{init_args: {{optimizer: {{init_args: {{base: {HEADS}}}}}}}}}",
}

# These are no language models, or need weights: they have their own tests.
APART = ("quadratic", "digits", "series", "continual_qat", "distill", "lora")
APART += ("control", "ant", "half_cheetah", "hopper")
BASES = {"multi_node": ["c4", "llama_7b"], **{name: ["c4"] for name in OVERLAYS if name.startswith("llama")}}
# Configurations of each recipe alone and of each overlay on a recipe that it suits.
COMBINATIONS = {name: [name] for name in RECIPES if name not in APART} | {
    name: [*BASES.get(name, ["quickstart"]), name] for name in OVERLAYS if not name.startswith(APART)
}
ONE_DEVICE = [name for name in COMBINATIONS if name != "multi_node"]  # what a single process can train


def kind(config):
    """What a YAML sets and of which classes, without the other values."""
    if isinstance(config, list):
        return [*map(kind, config)]
    if not isinstance(config, dict):
        return None
    return {key: value if key == "class_path" else kind(value) for key, value in config.items()}


def one_of_each_kind(names):
    return {str(kind(yaml.safe_load(recipes()[name].read_text()))): name for name in names}.values()


# Of YAMLs that differ in values alone, which test_full_size sees, the first and the last.
RUNNING = sorted({*one_of_each_kind(ONE_DEVICE), *one_of_each_kind(ONE_DEVICE[::-1])})


@pytest.mark.fast("c4")
@pytest.mark.parametrize("name", RUNNING)
def test_two_steps(name):
    configs = COMBINATIONS[name]
    if "c4" in configs:
        write_c4((6, 6), 4, text="document {0}. " * 20)
    write_small("hf:./c4:en" if "c4" in configs else "text.txt")
    Path("fitting.yaml").write_text(FITTING.get(name, "{}"))
    fits([*configs, "small.yaml", "fitting.yaml"])


def fits(configs):
    """Two steps of a run, and what they leave behind: its folder."""
    result = run_json(*configs)
    folder = Path("runs") / "+".join(config.removesuffix(".yaml") for config in configs) / "version_0"
    assert result["status"] == "finished" and result["steps"] == 2
    assert (folder / "report.html").exists() and (folder / "checkpoints").exists()
    assert 0 < result["metrics"]["val_loss"] < 11
    return folder


@pytest.mark.fast("llama")
@pytest.mark.parametrize("network", ["llama", "qwen2"])
def test_continual_qat_starts_from_the_weights_in_a_folder(network, monkeypatch):
    model = save_pretrained("model", network)
    write_small()
    Path("groups.yaml").write_text(GROUPS)
    before, blends = [], []

    def note(self, trainer, pl_module):
        before.extend(parameter.detach().clone() for parameter in pl_module.model.parameters())

    set_blend = LowBitPrecision.set_blend
    monkeypatch.setattr(LowBitPrecision, "set_blend", lambda self, λ: (blends.append(λ), set_blend(self, λ))[1])
    monkeypatch.setattr(PrecisionSummary, "on_train_start", note)
    fits(["continual_qat", "small.yaml", "groups.yaml"])
    for found, (name, expected) in zip(before, model.named_parameters(), strict=True):
        assert torch.equal(found, expected), f"{name} is not that of the folder"
    assert blends[-2:] == [0, 1], "λ did not rise over the first of two steps"


@pytest.mark.slow
@pytest.mark.parametrize("overlays", [[], ["distill_int4", "groups.yaml"]], ids=["nvfp4", "int4"])
def test_distillation_leaves_the_teacher_as_it_is_in_the_folder(overlays):
    model = save_pretrained("model", "llama")
    write_small()
    Path("groups.yaml").write_text(GROUPS)
    folder = fits(["distill", *overlays, "small.yaml"])
    (checkpoint,) = folder.glob("checkpoints/last*")
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    for name, expected in model.named_parameters():
        assert torch.equal(state[f"teacher.{name}"], expected), name
        assert not torch.equal(state[f"model.{name}"], expected), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT reads it
@pytest.mark.parametrize("overlays", [[], ["lora_bf16"], ["lora_int4"]], ids=["nvfp4", "bf16", "int4"])
def test_lora_trains_adapters_alone(overlays):
    pytest.importorskip("peft")
    model = save_pretrained("model", "llama")
    write_small()
    folder = fits(["lora", *overlays, "small.yaml"])
    (checkpoint,) = folder.glob("checkpoints/last*")
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert any("lora_B" in name and value.any() for name, value in state.items())
    for name, expected in model.named_parameters():
        (found,) = [value for key, value in state.items() if key.replace(".base_layer", "").endswith(name)]
        is_packed = "_proj" in name and overlays != ["lora_bf16"]
        assert found.dtype == torch.uint8 if is_packed else torch.equal(found, expected), name


@pytest.mark.fast("adam_mini_adaptive")
@pytest.mark.parametrize("name", COMBINATIONS)
def test_full_size(name):
    with torch.device("meta"):
        parsed = parts(*COMBINATIONS[name])
        optimizer = parsed.model.make_optimizer(list(parsed.model.named_parameters()))
    assert all(parameter.is_meta for parameter in parsed.model.parameters())
    size = sum(parameter.numel() for parameter in parsed.model.parameters()) / 1e6
    assert size == pytest.approx(SIZES.get(name, 3.34), rel=0.01)
    plugin = parsed.trainer.precision_plugin
    assert isinstance(plugin, LowBitPrecision)
    preset = name.replace("_", "-")
    casts = CHANGES.get(name) or LinearCasts.preset(preset if preset in PRESETS else "nvfp4")
    planned = plugin.plan(parsed.model)
    assert len(planned) == (6 if name == "olmoe" else 7) * parsed.model.model.config.num_hidden_layers
    pattern, others = SOME_LAYERS.get(name, ("never", None))
    assert planned == {layer: others if re.search(pattern, layer) else casts for layer in planned}
    assert (others in planned.values()) == (name in SOME_LAYERS)
    assert described(optimizer) == OPTIMIZERS.get(name, "StableSPAM")
    if described(optimizer) == "StableSPAM":
        (group,) = optimizer.param_groups
        assert (group["element_clip"], group["norm_clip"]) == RULES.get(name, RULES["stable_spam"])
        assert group["reset_interval"] == 1000
    if "Adam_mini" in described(optimizer):
        wrapped, network = getattr(optimizer, "optimizer", optimizer), parsed.model.model.config
        assert (wrapped.dim, wrapped.n_heads) == (network.hidden_size, network.num_attention_heads)
    assert plugin.compute_dtype == (torch.float16 if name in ("dpo", "fp16") else torch.bfloat16)
    assert parsed.trainer.gradient_clip_val == {"gradclip": 1.0, "stable_ternary": 0.8}.get(name)
    assert not Path("runs").exists()


def described(optimizer):
    name = type(optimizer).__name__
    return f"{name} of {described(optimizer.optimizer)}" if isinstance(optimizer, Adaptive) else name


@each("recipe, name", product(["quickstart", "c4"], ["lion", "adam_mini"]))
def test_an_optimizer_and_the_one_behind_guards_are_the_same(recipe, name):
    """Of table 4.5, whatever the recipe, which has a learning rate, betas and a weight decay of its own."""
    plain, guarded = (merge_all([recipe, overlay])["model"]["init_args"] for overlay in (name, f"{name}_adaptive"))
    assert guarded["optimizer"]["init_args"] == {"base": plain["optimizer"]}


class Interrupt(Callback):
    """Ctrl-C before a step."""

    def __init__(self, step: int):
        self.step = step

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def _handler():
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)


OPTIONS = "--model.init_args.optimizer.init_args"


@pytest.mark.slow
@pytest.mark.usefixtures("_handler")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lion_adaptive", []),
        ("adam_mini_adaptive", []),
        ("stable_spam", [f"{OPTIONS}.moments=fp8", f"{OPTIONS}.reset_interval=3"]),
        ("spam", [f"{OPTIONS}.density=0.25", f"{OPTIONS}.reset_interval=3"]),
        ("dpo", ["--trainer.plugins.init_args.scaler.init_args.growth_interval=3"]),
    ],
)
def test_an_interrupted_run_goes_on_as_if_nothing_had_been(name, options):
    """With moments, switches, the reference of DPO, and its scale, which grows in the third step and in the sixth."""
    write_small()
    Path("fitting.yaml").write_text(FITTING.get(name, "{}"))
    configs = [f"--config={config}" for config in (*COMBINATIONS[name], "small.yaml", "fitting.yaml")]

    def fit(folder, *more):
        here = ["--trainer.max_steps=6", "--trainer.limit_val_batches=0", "--trainer.default_root_dir", folder]
        return cli.main(["fit", *configs, *options, *here, *more])

    assert fit("whole") == 0
    callback = "{class_path: tests.recipes.test_recipes.Interrupt, init_args: {step: 3}}"
    with pytest.raises(SystemExit):
        fit("parts", f"--trainer.callbacks+={callback}")
    assert fit("parts", "--ckpt_path=last") == 0
    scale = [f"loss_scale/{tag}" for tag in ("scale", "growth_tracker", "overflows", "skipped_steps")]
    for tag in ("loss", *(["margin", "zero_gradients", *scale] if name == "dpo" else [])):
        whole, rest = scalars("whole/version_0", tag), scalars("parts/version_1", tag)
        assert sorted(whole) == list(range(6))
        assert rest == {4: whole[4], 5: whole[5]}, f"{tag}: step 3 was finished, and then others followed"
    if name == "dpo":
        scales = scalars("whole/version_0", "loss_scale/scale")
        assert list(scales.values()) == [2**18] * 2 + [1.5 * 2**18] * 3 + [2.25 * 2**18]


@pytest.mark.slow
@pytest.mark.parametrize("casts", ["nvfp4", "ternary"])
def test_recipes_name_what_they_leave_out(casts):
    """Their layers, and what was published of them, do not depend on which one is taken for the output layer."""
    for name in ("quickstart", "c4", "bitnet", "digits", "series", "control"):
        made = run.make_on_meta(["fit", "--config", name, "--config", casts])
        (plugin,) = made.plugins
        named = plugin.plan(made.model)
        plugin.quantize_output = True
        assert named == plugin.plan(made.model) and plugin.leaves_output, name


def test_the_readme_lists_them_all():
    page = (Path(__file__).parent.parent.parent / "recipes" / "README.md").read_text()
    for title, names in {"Recipes": RECIPES, "Overlays": OVERLAYS, "Studies": STUDIES}.items():
        section = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
        assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == sorted(names), title
