"""Gradient descent on a quadratic loss with an error in every gradient: the cost of noise, and of bias.

On L(θ) = λ/2 ‖θ‖² in d dimensions the gradient is g = λθ. A step of η with an error ε makes

    θ  ->  θ - η (g + ε) = (1 - ηλ) θ - η ε

Noise has E ε = 0 and the standard deviation k σ_critical, with σ_critical = ‖g‖ / √(3d) (FP4 All the Way, arXiv
2505.19115, section 4 and figure 4). Bias has E ε = m with ‖m‖ = μ (appendix B.2); its loss ends at μ² / (2λ). See
``docs/guides/noise_and_bias.md``.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_lowbit._lightning import LightningModule, rank_zero_info

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
            path.parent.mkdir(parents=True, exist_ok=True)
            draw(self.losses(), self.curvature).savefig(path, dpi=150)
            rank_zero_info(f"The losses are drawn in {path}")


# --- the picture ------------------------------------------------------------------------------------------------------

_DASHES = ("-", "--", "-.")  # of the steps
_WINDOW = {"xlim": (-1, 40), "ylim": (1e-12, 1e6)}  # of the left panel


def draw(losses: Mapping[Curve, Tensor], curvature: float) -> Figure:
    """Loss over steps: left with noise, right with errors of constant size; dotted lines are the floors of bias."""
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    step_sizes = dict.fromkeys(curve.step for curve in losses)
    dashes: dict[float, Any] = dict(zip(step_sizes, cycle(_DASHES), strict=False))
    for axes, errors in ((left, (NOISE,)), (right, (UNBIASED, BIASED))):
        shown = {curve: values for curve, values in losses.items() if curve.error in errors}
        kinds = dict.fromkeys((curve.error, curve.size) for curve in shown)
        colors = {kind: f"C{i}" for i, kind in enumerate(kinds)}
        for curve, values in shown.items():
            # Biased curves are drawn wide: they lie below unbiased ones that fluctuate about the same floor.
            look: dict[str, Any] = {"linewidth": 3, "alpha": 0.6} if curve.error == BIASED else {"linewidth": 1.4}
            color = colors[curve.error, curve.size]
            axes.plot(values, color=color, linestyle=dashes[curve.step], **look)
        handles = [Line2D([], [], color=color, label=_label(*kind)) for kind, color in colors.items()]
        handles += [Line2D([], [], color="0.4", linestyle=dashes[step], label=f"η = {step:g}/λ") for step in step_sizes]
        floors = [size**2 / (2 * curvature) for error, size in kinds if error == BIASED]
        dotted = [axes.axhline(floor, color="black", linestyle=":", label="μ²/2λ") for floor in floors]
        axes.legend(handles=handles + dotted[:1], frameon=False)
        axes.set(xlabel="step", ylabel="loss", yscale="log")
        axes.grid(alpha=0.3)
    left.set(title=r"Noise of $k\,\sigma_\mathrm{critical}$", **_WINDOW)
    right.set(title="Errors of constant size μ")
    return figure


def _label(error: str, size: float) -> str:
    return f"k = {size:g}" if error == NOISE else f"{error}, μ = {size:g}"
