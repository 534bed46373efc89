"""Several configurations put together into one, and recipes by name."""

from itertools import product
from pathlib import Path

import pytest
import yaml

from lightning_lowbit.cli.configs import (
    combined_name,
    find_config,
    merge,
    merge_all,
    merge_configs,
    options_with_lists,
    read_config,
    recipes,
    with_lists,
)
from lightning_lowbit.cli.lab.compare import study
from lightning_lowbit.nn import OPERANDS
from tests.tables import each


def plugin(class_path, **arguments):
    return {"class_path": class_path, "init_args": arguments}


def test_mappings_merge_key_by_key():
    base = {"trainer": {"max_steps": 1, "plugins": plugin("P", x=1)}}
    merged = merge(base, {"trainer": {"plugins": {"init_args": {"y": 2}}}})
    assert merged == {"trainer": {"max_steps": 1, "plugins": plugin("P", x=1, y=2)}}
    assert base["trainer"]["plugins"]["init_args"] == {"x": 1}, "an argument was changed"
    assert merge(base, {"trainer": {"max_steps": 2}})["trainer"]["max_steps"] == 2


def test_callbacks_are_appended_and_never_lost_nor_added_again():
    for base, overlay in product((["a"], "a"), (["b"], "b")):
        assert merge({"callbacks": base}, {"callbacks": overlay}) == {"callbacks": ["a", "b"]}
        assert merge({"callbacks": base}, {"callbacks": None}) == {"callbacks": None}, "null is how to leave them out"
        assert merge({"callbacks": None}, {"callbacks": overlay}) == {"callbacks": overlay}
    assert merge({"other": ["a"]}, {"other": ["b"]}) == {"other": ["b"]}
    summary, switch = {"class_path": "S"}, plugin("Q", at=0.9)
    merged = merge({"callbacks": [summary, switch]}, {"callbacks": [plugin("Q", at=0.5), summary]})
    assert merged == {"callbacks": [summary, switch, plugin("Q", at=0.5)]}


def test_a_null_at_the_head_drops_the_callbacks_before_it():
    summary, switch = {"class_path": "S"}, plugin("Q", at=0.9)
    assert merge({"callbacks": [switch, summary]}, {"callbacks": [None, summary]}) == {"callbacks": [summary]}
    assert merge({}, {"trainer": {"callbacks": [None, summary]}}) == {"trainer": {"callbacks": [summary]}}
    Path("mine.yaml").write_text("trainer: {callbacks: [null, mine.First]}")
    for configs in (["quickstart", "mine.yaml"], ["mine.yaml"], ["nvfp4", "mine.yaml"]):
        assert merge_all(configs)["trainer"]["callbacks"] == ["mine.First"]
    after = merge_all(["quickstart", "mine.yaml", "qaf"])["trainer"]["callbacks"]
    assert after == ["mine.First", plugin("lightning_lowbit.QAFSwitch", at=0.9)], "what comes after it is added"


def test_the_one_plugin_of_a_list_is_changed():
    merged = merge({"plugins": [plugin("P", x=1)]}, {"plugins": {"init_args": {"y": 2}}})
    assert merged == {"plugins": plugin("P", x=1, y=2)}
    with pytest.raises(ValueError, match="trainer.plugins lists 2"):
        merge({"plugins": [plugin("P"), plugin("Q")]}, {"plugins": {"init_args": {"y": 2}}})


def test_fields_of_casts_change_the_preset_before_them():
    fields = {"fprop_x": {"rounding": "stochastic"}}
    assert merge({"casts": "nvfp4"}, {"casts": fields}) == {"casts": {"preset": "nvfp4", **fields}}
    assert merge({"casts": "nvfp4"}, {"casts": {"preset": "mxfp4"}}) == {"casts": {"preset": "mxfp4"}}
    assert merge({"casts": {"preset": "nvfp4", **fields}}, {"casts": "bf16"}) == {"casts": "bf16"}
    assert merge({}, {"casts": fields}) == {"casts": fields}
    assert merge({"other": "nvfp4"}, {"other": fields}) == {"other": fields}
    assert merge({"attention": "nvfp4"}, {"attention": fields}) == {"attention": {"preset": "nvfp4", **fields}}
    merged = merge({"overrides": {"mlp": "nvfp4"}}, {"overrides": {"mlp": fields, "head": fields}})
    assert merged == {"overrides": {"mlp": {"preset": "nvfp4", **fields}, "head": fields}}
    six = {operand: {"element": "e2m1", "scale": {"format": "e8m0", "block": 32}} for operand in OPERANDS}
    for base in ("nvfp4", {"preset": "nvfp4", "hadamard": {"wgrad": 16}}):
        assert merge({"casts": base}, {"casts": six}) == {"casts": six}, "six casts in full keep nothing"


def test_another_class_keeps_the_arguments_that_it_takes_as_well():
    spam = plugin("lightning_lowbit.StableSPAM", lr=0.1, betas=[0.8, 0.9], gamma1=0.5)
    assert merge(spam, {"class_path": "torch.optim.AdamW"}) == plugin("torch.optim.AdamW", lr=0.1, betas=[0.8, 0.9])
    assert merge(spam, plugin("torch.optim.AdamW", lr=0.2)) == plugin("torch.optim.AdamW", lr=0.2, betas=[0.8, 0.9])
    unknown = merge(spam, {"class_path": "AdamW"})
    assert unknown == plugin("AdamW", **spam["init_args"]), "the parser knows short names, and says what does not fit"
    assert merge(spam, {"class_path": "collections.OrderedDict"}) == {"class_path": "collections.OrderedDict"}
    fp4 = plugin("lightning_lowbit.FP4Precision", skip=["lm_head"], rounding={"wgrad_x": "nearest"})
    merged = merge({"plugins": fp4}, {"plugins": plugin("lightning_lowbit.FP8Precision", scaling="row")})
    assert merged == {"plugins": plugin("lightning_lowbit.FP8Precision", scaling="row", skip=["lm_head"])}
    bf16 = plugin("lightning_lowbit.LowBitPrecision", casts="bf16")
    assert merge(fp4, bf16) == plugin("lightning_lowbit.LowBitPrecision", casts="bf16", skip=["lm_head"])


def test_each_combination_has_a_folder_also_with_a_piece_on_top():
    Path("mine.yaml").write_text("trainer: {default_root_dir: here}")
    assert merge_all(["quickstart", "mine.yaml"])["trainer"]["default_root_dir"] == "here"
    Path("none.yaml").write_text("trainer: null")
    assert merge_all(["none.yaml"])["trainer"] == {"default_root_dir": "runs/none"}
    piece = {"model": {"init_args": {"optimizer": {"init_args": {"lr": 0.5}}}}}
    config = merge_all(["quickstart", piece, "adamw"])
    optimizer = config["model"]["init_args"]["optimizer"]
    assert optimizer == plugin("torch.optim.AdamW", lr=0.5, betas=[0.9, 0.95], weight_decay=0.1)
    assert config["trainer"]["default_root_dir"] == "runs/quickstart+adamw"


def test_overlays_compose():
    config = merge_all(["c4", "llama_350m", "adamw", "bf16", "qaf"])
    assert config["model"]["init_args"]["network"] == "llama-350m"
    optimizer = config["model"]["init_args"]["optimizer"]
    assert optimizer == plugin("torch.optim.AdamW", lr=4e-4, betas=[0.9, 0.999], weight_decay=0.0)
    assert config["trainer"]["plugins"] == plugin("lightning_lowbit.LowBitPrecision", casts="bf16", skip=["lm_head"])
    names = [callback["class_path"] for callback in config["trainer"]["callbacks"]]
    assert names[-1] == "lightning_lowbit.QAFSwitch" and "lightning_lowbit.RunReport" in names


def test_an_overlay_stands_after_the_recipe(tmp_path):
    (mine := tmp_path / "mine.yaml").write_text("model: package.Model")
    for recipe in ("quickstart", str(mine)):
        with pytest.raises(ValueError, match="The overlay bf16 stands before the recipe .*: give it after"):
            merge_all(["bf16", recipe])
    merge_all(["quickstart", "bf16", str(mine)])  # what changes the model of a recipe


def test_an_overlay_that_later_ones_replace_is_refused():
    def command(pair):
        return ["fit", *(f"--config={name}" for name in ("quickstart", *pair.split("+")))]

    for pair in ("averis+mxfp4", "averis+fp8", "nvfp4+bf16", "muon+adamw", "qaf+study"):
        former, later = pair.split("+")
        told = (
            f"The overlay {later} replaces all that the overlay {former} before it changes: .* or give {former} after"
        )
        with pytest.raises(ValueError, match=told):
            merge_configs(command(pair), Path("merged.yaml"))
        with pytest.raises(ValueError, match=told):
            study.product(["quickstart"], [[pair]], [], [0])
    for pair in ("mxfp4+averis", "bf16+adamw", "study+qaf", "stable_ternary+adamw"):
        merge_configs(command(pair), Path("merged.yaml"))
        study.product(["quickstart", "bf16"], [[pair]], [], [0])


def test_command_line():
    merged = Path("merged.yaml")
    arguments = ["fit", "--trainer.max_steps=3", "--config", "quickstart", "-c", "bf16", "--config=qaf"]
    assert merge_configs(arguments, merged) == ["fit", "--config", "merged.yaml", "--trainer.max_steps=3"]
    assert yaml.safe_load(merged.read_text())["trainer"]["default_root_dir"] == "runs/quickstart+bf16+qaf"
    assert merge_configs(["fit", "--help"], merged) == ["fit", "--help"]


def test_the_order_of_patterns_stays(tmp_path):
    """The first pattern that matches a layer holds."""
    (mine := tmp_path / "mine.yaml").write_text(
        "trainer: {plugins: {init_args: {overrides: {up_proj: mxfp8, layers.0: bf16, down_proj: bf16}}}}"
    )
    merge_configs(["fit", "--config", "quickstart", "--config", str(mine)], Path("merged.yaml"))
    arguments = yaml.safe_load(Path("merged.yaml").read_text())["trainer"]["plugins"]["init_args"]
    assert [*arguments["overrides"]] == ["up_proj", "layers.0", "down_proj"]


def test_find_config():
    assert find_config("quickstart") == recipes()["quickstart"]
    assert find_config("nvfp4-nvidia") == recipes()["nvfp4_nvidia"], "as the preset is written"
    assert combined_name(["quickstart", "nvfp4-nvidia"]) == "quickstart+nvfp4_nvidia", "one folder for both spellings"
    Path("quickstart").write_text("{}")
    assert find_config("quickstart") == Path("quickstart"), "a file comes first"
    with pytest.raises(FileNotFoundError, match="Did you mean 'llama_350m' or 'llama_130m'"):
        find_config("llama_30m")


def test_a_file_whose_ending_is_missing_is_named():
    Path("mine.yaml").touch()
    with pytest.raises(FileNotFoundError, match=r"--config mine: no such file.* Did you mean 'mine.yaml'\?"):
        find_config("mine")


def test_a_key_may_stand_in_a_mapping_once():
    Path("anchors.yaml").write_text("a: &a {x: 1}\nb: {<<: *a, x: 2}\nc: {x: 3}")
    assert read_config(Path("anchors.yaml")) == {"a": {"x": 1}, "b": {"x": 2}, "c": {"x": 3}}
    Path("twice.yaml").write_text("trainer: {plugins: P}\nmodel: M\ntrainer: {max_steps: 3}")
    with pytest.raises(ValueError, match="found the key 'trainer' twice .*line 3"):
        read_config(Path("twice.yaml"))


# --- one item in the place of a list ---

PLUGIN, SKIP = "--trainer.plugins", "--trainer.plugins.init_args.skip"
FP8 = "lightning_lowbit.FP8Precision"
NORMS = "--trainer.callbacks+=lightning_lowbit.GradientNormMonitor"


@each(
    ("given", "made"),
    [
        ([SKIP, "lm_head"], [SKIP, "[lm_head]"]),
        ([f"{SKIP}=lm_head"], [f"{SKIP}=[lm_head]"]),
        ([f"{PLUGIN}.only=up|down"], [f"{PLUGIN}.only=[up|down]"]),
        ([SKIP, r"layers\.-1"], [SKIP, r"[layers\.-1]"]),
        ([SKIP, "a: [b"], [SKIP, "['a: [b']"]),
        ([f"{PLUGIN}={FP8}", SKIP, "up"], [f"{PLUGIN}={FP8}", SKIP, "[up]"]),
        ([f"{PLUGIN}.class_path", FP8, f"{PLUGIN}.skip=up"], [f"{PLUGIN}.class_path", FP8, f"{PLUGIN}.skip=[up]"]),
        ([PLUGIN, "FP8Precision", SKIP, "up"], [PLUGIN, "FP8Precision", SKIP, "[up]"]),
        ([NORMS, "--trainer.callbacks.layers", "up"], [NORMS, "--trainer.callbacks.layers", "[up]"]),
    ],
)  # fmt: skip
def test_an_item_on_the_command_line(given, made):
    assert options_with_lists(["fit", *given], merge_all(["quickstart"])) == ["fit", *made]


@each(
    "given",
    [
        *([SKIP, "[lm_head]"], [SKIP, "null"], [SKIP, "{a: b}"], [SKIP], [SKIP, "--seed_everything", "1"]),
        *([f"{SKIP}+=lm_head"], [f"{SKIP}+", "lm_head"]),
        *([f"{PLUGIN}.init_args.casts", "nvfp4"], [f"{PLUGIN}.init_args.no_such_argument", "1"]),
        *(["--trainer.max_steps", "3"], ["--data.init_args.path", "text"]),
        ["--model.init_args.optimizer.init_args.betas", "0.9"],  # a pair, of which one is not enough
        ["--trainer.plugins=no_such_module.Plugin", f"{PLUGIN}.skip=a"],
    ],
)
def test_everything_else_is_left_alone(given):
    assert options_with_lists(["fit", *given], merge_all(["quickstart"])) == ["fit", *given]


def test_an_item_in_yaml():
    one, listed = (
        {"plugins": [plugin("lightning_lowbit.FP4Precision", casts="nvfp4", skip=skip, overrides={"up": "bf16"})]}
        for skip in ("lm_head", ["lm_head"])
    )
    assert with_lists(one) == with_lists(listed) == listed
    unknown = plugin("no_such_module.Plugin", skip="lm_head")
    assert with_lists(unknown) == unknown
