"""Which of the two Lightnings is used."""

from lightning_lowbit._lightning import _decide


def test_the_lightning_that_was_imported_first_is_used():
    both = ["lightning", "lightning.pytorch", "pytorch_lightning"]
    table = [
        ([], "lightning.pytorch"),
        (["lightning.fabric", "lightning_fabric"], "lightning.pytorch"),
        (["pytorch_lightning"], "pytorch_lightning"),
        (["lightning.fabric", "pytorch_lightning"], "pytorch_lightning"),
        (["lightning.pytorch"], "lightning.pytorch"),
        (both, "lightning.pytorch"),
        (both[::-1], "pytorch_lightning"),
    ]
    for imported, used in table:
        assert _decide(["os", *imported, "torch"]) == used, imported
