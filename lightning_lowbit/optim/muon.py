"""Muon for the hidden matrices of a network, and Adam for all else, in one optimizer.

    rules         g ← factor·clip(g)                                              (as for Adam, see `adam`)
    momentum      M ← M + w·(g − M),    D = (1 − μ)·g + μ·(1 − μᵏ⁺¹)·M            Nesterov's; without, D = M
    direction     O ≈ U·Vᵀ of D = U·S·Vᵀ, by Newton–Schulz
    step          p ← p·(1 − lr·λ) − lr·s·O,    s = 0.2·√max(rows, columns), or √max(1, rows/columns)

M is bias-corrected, with the w of Adam's μ. (1 − μᵏ⁺¹)·M is the average that Muon's authors have.

Sources: Muon (K. Jordan et al., kellerjordan.github.io/posts/muon) for the iteration and its coefficients; Moonlight
(arXiv 2502.16982), section 2.2, for s = 0.2·√max(rows, columns), with which Adam's learning rate and decay serve both.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lightning_lowbit._torch.sharding import is_flattened
from lightning_lowbit.distributed import gathered, part_of, replicas_of
from lightning_lowbit.optim.adam import ClippedAdam, weigh
from lightning_lowbit.optim.moments import DenseMoments, FP8Momentum, Momentum
from lightning_lowbit.optim.passes import Batch, Member, elements_at_once, rows_of
from lightning_lowbit.optim.rules import ELEMENT_RULES, MUON, OPTIONS, Numbers, options_among
from lightning_lowbit.patterns import matching, select
from lightning_lowbit.units import has_units

#: Patterns of names of parameters that Adam moves by default: embeddings, heads, and tables that multiply nothing.
ADAM_NAMES = (
    *(".*embed.*", "(.*_)?emb", "wte", "wpe", r"shared\.weight", "pos.*enc.*"),
    *("(.*_)?head", "classifier", "score", "cls", "fc", "qa_outputs"),
    *(".*bias.*", "A_log"),
)

#: Patterns of names of parameters that are stacks of matrices by default.
STACK_NAMES = (".*experts",)

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_MOMENTA = {"fp32": Momentum(), "fp8": FP8Momentum()}


class Muon(ClippedAdam):
    """Muon for matrices and Adam for all other parameters, whole or sharded by FSDP2 or tensor parallelism.

    Matrices are parameters of two dimensions whose names `adam_names` does not match, and stacks of matrices those of
    three with names in `stack_names`; with one row or column they are vectors. Look at `matrices`: an embedding called
    ``net.0.weight`` is taken for one. Each rank computes the directions of some of the matrices that it has a part of,
    or, under DDP, all of.

    Args:
        params: named parameters, as ``model.named_parameters()``, or groups of these. Parameters without names need
            ``adam_names=[]``.
        lr: learning rate; a float or a 0-d tensor.
        betas: β1, β2 of Adam's moments.
        eps: ε, in Adam's denominator.
        weight_decay: λ, decoupled; Moonlight, section 2.2: 0.1.
        momentum: μ.
        nesterov: looks one step ahead.
        ns_steps: steps of Newton–Schulz, in bf16 on devices with its instructions.
        adjust_lr_fn: s: ``"match_rms_adamw"``, 0.2·√max(rows, columns); or ``"original"``, √max(1, rows/columns), which
            needs a higher learning rate than Adam's, so groups.
        adam_names: regular expressions of parameters that Adam moves: each matches whole parts of a name, as
            ``"lm_head"`` does that of ``model.lm_head.weight``. None: `ADAM_NAMES`, embeddings, heads and biases.
        stack_names: the same, of parameters ``[experts, rows, columns]``. None: `STACK_NAMES`.
        element_clip: ``"ada_clip"``, with ``gamma3``, or None.
        norm_clip: ``"ada_gn"``, with ``gamma1`` and ``gamma2``; ``"grad_clip"``, with ``max_norm``; or None.
        gamma1, gamma2, gamma3, max_norm: as for `StableSPAM`.
        maximize: ascend.
        moments: ``"fp32"``, or ``"fp8"`` with 1.03 bytes per element of a matrix of Muon instead of 4, and 2.06 of
            Adam's instead of 8.

    Raises:
        ValueError: an option out of range; no matrix, parameters without names, or a pattern that matches none; and, in
            `step`, as for `StableSPAM`, and under FSDP1, where no rank has rows of a matrix.

    Examples:
        >>> optimizer = Muon(model.named_parameters(), lr=1e-3, weight_decay=0.1)
    """

    DEFAULTS = {**ClippedAdam.DEFAULTS, **{name: OPTIONS[name].default for name in MUON}}

    _adams: frozenset[int] = frozenset()  # ids of parameters that Adam moves because of their names
    _stacks: frozenset[int] = frozenset()

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        adam_names: Sequence[str] | None = None,
        stack_names: Sequence[str] | None = None,
        element_clip: str | None = None,
        norm_clip: str | None = None,
        gamma1: float = 0.7,
        gamma2: float = 0.9,
        gamma3: float = 0.999,
        max_norm: float = 1.0,
        maximize: bool = False,
        moments: str = "fp32",
    ) -> None:
        super().__init__(params, **options_among(locals()))
        names = [name for group in self.param_groups for name in group.get("param_names", ())]
        for argument, patterns in (("adam_names", adam_names), ("stack_names", stack_names)):
            select(names, patterns or (), argument, "parameter")
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if not (self.matrices() or any(map(is_flattened, parameters))):
            raise ValueError(
                "Muon got no matrix: no parameter has two dimensions above 1 and a name that adam_names does not "
                "match. Use StableSPAM or LowBitAdamW."
            )

    def matrices(self) -> list[Tensor]:
        """Returns the parameters that Muon moves, matrices and stacks of them; Adam moves the others."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        return [parameter for parameter in parameters if self._is_matrix(parameter, parameter.shape)]

    def _is_matrix(self, parameter: Tensor, shape: torch.Size) -> bool:
        dims = (2, 3) if id(parameter) in self._stacks else (2,)  # a stack may also be a list of layers
        return len(shape) in dims and min(shape[-2:]) > 1 and id(parameter) not in self._adams

    def _check_options(self, options: Mapping[str, Any]) -> None:
        super()._check_options(options)
        values = {name: options[name] for name in ("master_weights", "density", "element_clip")}
        if values["master_weights"] is not None or values["density"] != 1 or values["element_clip"] == "spike_clip":
            raise ValueError(
                "Muon keeps one moment of all elements of a matrix, without master_weights, density, and SpikeClip, "
                f"which needs the second moment; got {values}."
            )

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        names, patterns = group.get("param_names"), {name: group[name] for name in ("adam_names", "stack_names")}
        if names is None and (patterns["adam_names"] not in ([], ()) or patterns["stack_names"]):
            raise ValueError(
                "Muon tells embeddings and heads, which Adam moves, from other matrices by their names: give it "
                "model.named_parameters(), or groups of named parameters. (LightningCLI's own key optimizer gives it "
                "none: take an argument optimizer: OptimizerCallable in the model.) Or pass adam_names=[], and no "
                "stack_names, for parameters without names: it then moves all matrices."
            )
        for argument, value in patterns.items():
            if value is not self.defaults[argument]:  # the constructor's are for all groups together
                select(names or (), value or (), argument, "parameter of its group")

    def _remember_parameters(self) -> None:
        super()._remember_parameters()
        self._adams = self._ids("adam_names", ADAM_NAMES)
        self._stacks = self._ids("stack_names", STACK_NAMES)

    def _ids(self, argument: str, default: Sequence[str]) -> frozenset[int]:
        """Returns ids of the parameters whose names a group's patterns match."""
        ids: set[int] = set()
        for group in self.param_groups:
            by_name = dict(zip(group.get("param_names", ()), map(id, group["params"]), strict=False))
            patterns = default if group[argument] is None else group[argument]
            ids.update(by_name[name] for pattern in patterns for name in matching(pattern, [*by_name]))
        return frozenset(ids)

    def _moments(self, parameter: Tensor, shape: torch.Size, group: Mapping[str, Any]) -> DenseMoments:
        return (
            _MOMENTA[group["moments"]]
            if self._is_matrix(parameter, shape)
            else super()._moments(parameter, shape, group)
        )

    def _fault(self, saved: Any, parameter: Tensor, group: Mapping[str, Any]) -> str:
        fault, is_matrix = super()._fault(saved, parameter, group), self._is_matrix(parameter, parameter.shape)
        if fault and isinstance(saved, dict) and saved and is_matrix == ("mean_square" in saved):
            former, now = ("Adam", "Muon") if is_matrix else ("Muon", "Adam")
            return f"{former} moved it, and {now} would now, by its name, adam_names and stack_names ({fault})"
        return fault

    def _update(self, batch: Batch) -> None:
        if batch.members[0].moments.has_mean_square:
            super()._update(batch)
        else:
            _update(batch)


def _update(batch: Batch) -> None:
    """Applies Muon to a batch of matrices."""
    group, numbers = batch.group, batch.numbers
    weigh(batch, group["momentum"])
    ahead = (group["momentum"] * numbers["mean_weight"]).unbind()
    rows = [*rows_of(batch.decision())]
    ranks = batch.groups[0] if batch.groups else replicas_of([member.parameter for member in batch.members])
    rank, size = (0, 1) if ranks is None else (dist.get_rank(ranks), ranks.size())
    for places in _rounds(batch.members, size, elements_at_once(batch.device, on_cpu=0)):
        wholes = {i: gathered(batch.members[i].parameter, _direction(batch, i, rows[i], ahead[i])) for i in places}
        shares: dict[tuple[int, torch.Size], list[int]] = {}  # each rank orthogonalizes some, equal shapes in a stack
        for number, (i, whole) in enumerate(wholes.items()):
            shares.setdefault((number * size // len(places), whole.shape), []).append(i)
        stacks = {share: torch.stack([wholes.pop(i) for i in numbered]) for share, numbered in shares.items()}
        for share in stacks:
            if share[0] == rank:
                stacks[share] = orthogonalized(stacks[share], group["ns_steps"])
        for share, stack in stacks.items():
            if size > 1:
                dist.broadcast(stack, group=ranks, group_src=share[0])
            for i, orthogonal in zip(shares[share], stack, strict=True):
                _move(batch.members[i], orthogonal, rows[i], group["adjust_lr_fn"])
    numbers["steps_since_reset"] = numbers["steps_since_reset"] + numbers["taken"]


def _rounds(members: Sequence[Member], least: int, elements: int) -> Iterator[list[int]]:
    """Yields places of members, equal shapes side by side: as many as have that many elements, and at least so many."""
    places: list[int] = []
    room = elements
    for place in sorted(range(len(members)), key=lambda i: members[i].parameter.shape):
        size = members[place].parameter.numel()
        if len(places) >= least and size > room:
            yield places
            places, room = [], elements
        places.append(place)
        room -= size
    yield places


def _direction(batch: Batch, index: int, numbers: Numbers, ahead: Tensor) -> Tensor:
    """Takes a gradient into the mean; returns the direction of this rank's shard, in the dtype of the GEMMs."""
    moments, gradient, group = batch.members[index].moments, batch.gradients[index], batch.group
    clip, is_narrow = ELEMENT_RULES[batch.rules.elements.name].clip, batch.dtype == torch.float32
    dtype = torch.bfloat16 if is_narrow and has_units(torch.bfloat16, batch.device) else batch.dtype
    direction = torch.empty_like(gradient, dtype=dtype, memory_format=torch.contiguous_format)
    for g, target, piece in batch.passes.pieces(index, batch.decision(), gradient, direction):
        clipped, _ = clip(g.to(batch.dtype), numbers["limit"], numbers["ratio"], None)
        clipped = (clipped * numbers["factor"]).nan_to_num_(0.0, 0.0, 0.0)  # of a skipped step 0·NaN would be NaN
        mean = moments.mean(piece).lerp_(clipped, numbers["weight1"])
        target.copy_(clipped.mul_(1 - group["momentum"]).addcmul_(mean, ahead) if group["nesterov"] else mean)
        moments.store(piece, mean)
    return direction


def orthogonalized(matrices: Tensor, steps: int) -> Tensor:
    """Returns about U·Vᵀ of each matrix U·S·Vᵀ of [..., rows, columns]: its singular values are near 1."""
    if not matrices.numel():
        return matrices
    wide = torch.promote_types(matrices.dtype, torch.float32)
    norms = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True, dtype=wide)
    x = (matrices / norms.clamp_(min=torch.finfo(wide).tiny)).to(matrices.dtype)
    is_tall, is_one = x.shape[-2] > x.shape[-1], x.shape[:-2].numel() == 1
    x = x.mT if is_tall else x
    x, plus_product = (x.view(x.shape[-2:]), torch.addmm) if is_one else (x.flatten(0, -3), torch.baddbmm)
    a, b, c = _COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.mT
        x = plus_product(x, plus_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).contiguous().view(matrices.shape)


def _move(member: Member, orthogonal: Tensor, numbers: Numbers, adjust_lr_fn: str) -> None:
    """Moves a parameter's shard along a whole orthogonal matrix."""
    rows, columns = orthogonal.shape[-2:]
    scale = 0.2 * max(rows, columns) ** 0.5 if adjust_lr_fn == "match_rms_adamw" else max(1, rows / columns) ** 0.5
    direction = part_of(member.parameter, orthogonal).to(numbers["rate"].dtype)
    weights = member.shard.to(direction.dtype).mul_(1 - numbers["decay"]).sub_(direction * (numbers["rate"] * scale))
    if weights is not member.shard:
        member.shard.copy_(weights)
