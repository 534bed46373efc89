"""The ``lowbit`` command.

lowbit ls                                            recipes, overlays and studies
lowbit cp quickstart mine.yaml                       a copy to change
lowbit fit --config quickstart                       runs a recipe
lowbit fit --config quickstart --config bf16         an overlay on top of it
lowbit fit --config mine.yaml --trainer.max_steps 50
lowbit compare --config quickstart --vary bf16,nvfp4 --seeds 0,1,2
lowbit compare --study scale_formats                 runs a study
lowbit estimate --config c4 --config llama_7b --devices 256 --strategy fsdp
"""

from lightning_lowbit.cli.command import main

__all__ = ["main"]
