"""GPT-2 goes on to learn from your text, and takes 4-bit weights on the way. It prints the loss before and after.

python gpt2_finetuning.py --text my_texts/ --steps 500 --output gpt2-int4
"""

import argparse
from collections.abc import Sequence

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_lowbit import IntegerPrecision, LowBitProgressBar, PrecisionSwitch
from lightning_lowbit.recipes.data import TextDataModule


class Finetuned(LightningModule):
    """A causal language model of transformers; batches are tokens, one more than the context."""

    def __init__(self, name: str, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).train()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.network(batch, labels=batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)  # Stable-SPAM ended behind it in fine-tuning


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt2", help="a name on the Hub, or a folder")
    parser.add_argument("--text", required=True, help="a file or a folder of text")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--output", default="gpt2-int4", help="the checkpoint, without its suffix")
    options = parser.parse_args(arguments)
    seed_everything(0, verbose=False)
    data = TextDataModule(options.text, options.model, sequence_length=options.length, batch_size=4, val_fraction=0.1)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    trainer = Trainer(
        max_steps=options.steps,
        # 4-bit weights, a scale for 32 of them; 8-bit activations. The output layer shares the embedding's weight.
        plugins=[IntegerPrecision(4, 8, 32, activation_group="row", scale_format="bf16", skip=["lm_head"])],
        # Gradually over the first half: for ternary weights this ended ahead of a sudden start.
        callbacks=[PrecisionSwitch("fqt", at=0, over=0.5), LowBitProgressBar(10)],
        gradient_clip_val=1.0,
        **quiet,
    )
    model = Finetuned(options.model, lr=5e-5)
    (before,) = Trainer(**quiet).validate(model, data, verbose=False)
    trainer.fit(model, data)
    (after,) = trainer.validate(model, data, verbose=False)
    print(f"loss before, in high precision: {before['loss']:.3f}; after, in 4 bits: {after['loss']:.3f}")
    trainer.save_checkpoint(f"{options.output}.ckpt")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    start = tokenizer("The", return_tensors="pt").to(model.device)
    words = model.network.generate(**start, max_new_tokens=40, do_sample=True, pad_token_id=tokenizer.eos_token_id)
    print(tokenizer.decode(words[0]))
    print(f"to ship it: lowbit export {options.output}.ckpt --module gpt2_finetuning.Finetuned --format int4 …")


if __name__ == "__main__":
    main()
