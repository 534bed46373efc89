"""Gradient descent on a quadratic loss with an error in every gradient: the cost of noise, and of bias.

On L(θ) = λ/2 ‖θ‖² in d dimensions the gradient is g = λθ. A step of η with an error ε makes

    θ  ->  θ - η (g + ε) = (1 - ηλ) θ - η ε

Noise has E ε = 0 and the standard deviation k σ_critical, with σ_critical = ‖g‖ / √(3d) (FP4 All the Way, arXiv
2505.19115, section 4 and figure 4). Bias has E ε = m with ‖m‖ = μ (appendix B.2); its loss ends at μ² / (2λ). See
``docs/guides/noise_and_bias.md``.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_lowbit._lightning import LightningModule, rank_zero_info
from lightning_lowbit.report.blocks import Chart
from lightning_lowbit.report.pictures import write_picture

NOISE, BIASED, UNBIASED = "noise", "biased", "unbiased"


class Curve(NamedTuple):
    """One run of gradient descent.

    Attributes:
        error: ``"noise"`` shrinks with the gradient; ``"biased"`` and ``"unbiased"`` errors have constant size.
        size: k for noise, else μ, the root mean square length.
        step: ηλ, the step in units of 1/λ.
    """

    error: str
    size: float
    step: float

    @property
    def name(self) -> str:
        """The key that its loss is logged under."""
        return f"loss/{self.error}_{self.size:g}/step_{self.step:g}"


class Quadratic(LightningModule):
    """All runs at once: each is a row of the float64 matrix ``points`` (curves, dimensions), with the minimum at 0.

    They start at the same random point with loss 1. Logs the loss of each run before the step, by the names of
    ``curves``, and draws ``quadratic.png`` into the run's folder when fit ends. Needs ``max_steps``, and no data.

    Args:
        noises: values of k; by default those of figure 4, and 0.
        errors: values of μ, each both as bias, equal in all dimensions, and as unbiased noise.
        steps: values of ηλ; each is combined with all errors.
        dimensions: d.
        curvature: λ.

    Raises:
        ValueError: the loss has no dimensions or no minimum.
    """

    # (curves, 1): of each curve, or 0 where its error is of another kind.
    step: Tensor
    noise: Tensor
    biased: Tensor
    unbiased: Tensor

    def __init__(
        self,
        noises: Sequence[float] = (2, 1, 0.5, 0),
        errors: Sequence[float] = (0.1,),
        steps: Sequence[float] = (1, 0.1),
        dimensions: int = 1000,
        curvature: float = 1.0,
    ) -> None:
        super().__init__()
        if dimensions < 1 or curvature <= 0:
            raise ValueError(
                "A quadratic loss needs at least one dimension and a positive curvature; got "
                f"dimensions={dimensions}, curvature={curvature}."
            )
        self.dimensions, self.curvature = dimensions, curvature
        self.curves = [Curve(NOISE, size, step) for step in steps for size in noises]
        self.curves += [Curve(kind, size, step) for step in steps for size in errors for kind in (BIASED, UNBIASED)]
        self.history: list[Tensor] = []
        start = torch.randn(dimensions, dtype=torch.float64)
        start *= math.sqrt(2 / curvature) / start.norm()
        self.points = nn.Parameter(start.repeat(len(self.curves), 1))
        self.register_buffer("step", self._column(curve.step for curve in self.curves), persistent=False)
        for kind in (NOISE, BIASED, UNBIASED):
            sizes = (curve.size if curve.error == kind else 0.0 for curve in self.curves)
            self.register_buffer(kind, self._column(sizes), persistent=False)

    @staticmethod
    def _column(values: Iterable[float]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.float64)[:, None]

    def forward(self) -> Tensor:
        return self.curvature / 2 * self.points.square().sum(1)

    def train_dataloader(self) -> Iterable[int]:
        return range(self.trainer.max_steps)

    def on_fit_start(self) -> None:
        self.history.clear()

    def training_step(self, batch: int, batch_idx: int) -> Tensor:
        losses = self()
        self.history.append(losses.detach())
        names = (curve.name for curve in self.curves)
        self.log_dict(dict(zip(names, losses.detach(), strict=True)), batch_size=1)
        return losses.sum()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        gradient = self.points.grad
        assert gradient is not None
        # The root mean square length of the noise is √d times its standard deviation, and σ_critical √d = ‖g‖ / √3.
        length = self.noise * gradient.norm(dim=1, keepdim=True) / math.sqrt(3) + self.unbiased
        gradient += (length * torch.randn_like(gradient) + self.biased) / math.sqrt(self.dimensions)
        gradient *= self.step

    def configure_optimizers(self) -> Optimizer:
        """SGD with the learning rate 1/λ, so that a gradient scaled by ηλ makes a step of η."""
        return SGD([self.points], lr=1 / self.curvature)

    def losses(self) -> dict[Curve, Tensor]:
        """Returns the loss of each curve before each step of the last fit and after it, (steps + 1,)."""
        return dict(zip(self.curves, torch.stack(self.history).cpu().T, strict=True))

    def on_fit_end(self) -> None:
        self.history.append(self().detach())
        folder = self.trainer.log_dir
        if folder is not None and self.trainer.is_global_zero:
            path = Path(folder) / "quadratic.png"
            write_picture(path, *charts(self.losses(), self.curvature))
            rank_zero_info(f"The losses are drawn in {path}")


# --- the picture ------------------------------------------------------------------------------------------------------

_FIRST, _WINDOW = 40, (1e-12, 1e6)  # steps and losses that are drawn with noise


def charts(losses: Mapping[Curve, Tensor], curvature: float) -> tuple[Chart, Chart]:
    """Returns the losses over steps with noise, and with errors of constant size, beside the floors of bias."""
    last = max(len(values) for values in losses.values()) - 1
    sizes = dict.fromkeys(curve.size for curve in losses if curve.error == BIASED)
    noise: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    constant = noise | {f"μ²/2λ, μ = {size:g}": ((0, last), [size**2 / (2 * curvature)] * 2) for size in sizes}
    for (error, size, step), values in losses.items():
        name = f"{f'k = {size:g}' if error == NOISE else f'{error}, μ = {size:g}'}, η = {step:g}/λ"
        shown = values[: _FIRST + 1] if error == NOISE else values
        (noise if error == NOISE else constant)[name] = range(len(shown)), shown.tolist()
    title = r"Noise of $k\,\sigma_\mathrm{critical}$"
    return (
        Chart(title, noise, "loss", log=True, limits=_WINDOW),
        Chart("Errors of constant size μ", constant, "loss", log=True),
    )
