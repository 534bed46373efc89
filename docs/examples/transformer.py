"""A transformer of your own on local text, in FP4. It prints its loss, then text that it writes. Minutes on a CPU.

python transformer.py --text FOLDER --steps 300
"""

import argparse
from collections.abc import Sequence

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn

from lightning_lowbit import FP4Precision, LowBitProgressBar, StableSPAM
from lightning_lowbit.recipes.data import TextDataModule

CONTEXT, WIDTH, HEADS, LAYERS = 128, 128, 4, 3


class Block(nn.Module):
    """Attention and a perceptron, each on normalized input and added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Writer(LightningModule):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.bytes(tokens) + self.places.weight[: tokens.shape[1]])).float()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[:, :-1]).mT, batch[:, 1:])
        self.log("loss", loss, prog_bar=True)
        return loss

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return StableSPAM(self.parameters(), lr=1e-3, weight_decay=0.1)  # ahead of AdamW in four bits


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", help="a file or a folder; by default the source of Python's standard library")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args(arguments)
    seed_everything(0, verbose=False)
    # All layers but the head. If the model will run in bf16, add the callback PrecisionSwitch("hp-forward", at=0.8).
    quiet = {"logger": False, "enable_model_summary": False, "callbacks": [LowBitProgressBar(refresh_rate=10)]}
    trainer = Trainer(max_steps=options.steps, plugins=[FP4Precision("nvfp4")], **quiet)
    data = TextDataModule(options.text, sequence_length=CONTEXT, batch_size=16)
    trainer.fit(model := Writer(), data)
    (metrics,) = trainer.validate(model, data, verbose=False)
    print(f"validation: {metrics['loss']:.2f} nats for a byte; chance has 5.55")
    tokens = torch.tensor([list(b"def ")], device=model.device)
    with torch.no_grad():
        for _ in range(200):
            chances = (model(tokens[:, -CONTEXT:])[0, -1] / 0.7).softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1)[None]], 1)
    print(bytes(tokens[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
