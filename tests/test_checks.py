"""What may have been meant."""

import pytest

from lightning_lowbit.checks import choose, near, nearest
from lightning_lowbit.cli.configs import recipes
from lightning_lowbit.nn import PRESETS


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("fp4", "nvfp4"),  # and not ufp4, which is spelled as much alike
        ("fp8", "fp8-delayed"),
        ("int", "int8"),
        ("mx", "mxfp4"),
        ("nvfp5", "nvfp4"),
        ("NVFP4", "nvfp4"),
        ("nvidia", "nvfp4-nvidia"),
        ("tenary", "ternary"),
    ],
)
def test_a_part_of_a_name_stands_for_it(given: str, meant: str) -> None:
    assert near(given, PRESETS) == [meant]
    with pytest.raises(ValueError, match=f"Unknown preset '{given}'. Did you mean '{meant}'"):
        choose("preset", given, PRESETS)


def test_nothing_is_near() -> None:
    assert nearest("xyz", PRESETS) == nearest("x", ["fprop_x"]) == nearest("", PRESETS) == ""


def test_several_are_named_once_each() -> None:
    assert near("llama", recipes(), most=3) == ["llama_130m", "llama_1b", "llama_350m"]
    assert nearest("fp", ["fp8", "nvfp4", "fp16"], most=2) == " Did you mean 'fp8' or 'fp16'?"
