"""One item in the place of a list, and nothing else in the place of anything."""

from lightning_lowbit.cli.configs import merge_all, options_with_lists, with_lists
from tests.tables import each

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
    def plugin(skip):
        arguments = {"casts": "nvfp4", "skip": skip, "overrides": {"up": "bf16"}}
        return {"trainer": {"plugins": [{"class_path": "lightning_lowbit.FP4Precision", "init_args": arguments}]}}

    assert with_lists(plugin("lm_head")) == with_lists(plugin(["lm_head"])) == plugin(["lm_head"])
    unknown = {"class_path": "no_such_module.Plugin", "init_args": {"skip": "lm_head"}}
    assert with_lists(unknown) == unknown
