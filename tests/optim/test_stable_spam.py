"""StableSPAM against golden vectors and the slow reference, and the contract every optimizer here keeps."""

import copy
import io
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lowbit.optim import StableSPAM, ada_clip_, ada_gn_, clipping, guards
from tests.references.stable_spam import Reference, step_all

ORACLE = Path(__file__).parents[1] / "data" / "stable_spam.npz"
SHAPES = [(), (1,), (7,), (0,), (0, 3), (5, 6), (3, 2, 2, 2)]


def make_parameters(dtype: torch.dtype = torch.float32, shapes: list[tuple[int, ...]] = SHAPES) -> list[Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_gradients(parameters: list[Parameter], seed: int) -> None:
    """Heavy-tailed gradients, so that AdaClip clips and AdaGN scales."""
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = (torch.randn(p.shape, generator=generator) * torch.randn(p.shape, generator=generator) ** 4).to(
            p.dtype
        )


def train(optimizer: StableSPAM, parameters: list[Parameter], steps: range) -> None:
    for step in steps:
        set_gradients(parameters, seed=step)
        optimizer.step()


def snapshot(optimizer: StableSPAM, parameters: list[Parameter]) -> list[Tensor]:
    """Copies of every parameter and all its state."""
    tensors = [t for p in parameters for t in (p.detach(), *optimizer.state[p].values())]
    return [tensor.clone() for tensor in tensors]


def assert_same(left: list[Tensor], right: list[Tensor], message: str) -> None:
    assert len(left) == len(right), f"{message}: {len(left)} tensors against {len(right)}"
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        assert a.dtype == b.dtype and torch.equal(a, b), f"{message}: tensor {index} differs: {a} {b}"


@pytest.mark.parametrize("decay_index", [0, 1])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("resets", [True, False])
def test_oracle(dtype: torch.dtype, tolerance: float, decay_index: int, resets: bool) -> None:
    with np.load(ORACLE) as file:
        oracle = dict(file)
    hyper = {name: oracle[f"hyper/{name}"].item() for name in ("lr", "eps", "gamma1", "gamma2", "gamma3")}
    beta1, beta2 = oracle["hyper/beta1"].item(), oracle["hyper/beta2"].item()
    interval = oracle["hyper/reset_interval"].item() if resets else 10**6
    parameters = [Parameter(torch.tensor(oracle[f"p{i}/init"], dtype=dtype)) for i in range(3)]
    weight_decay = oracle["hyper/weight_decays"][decay_index].item()
    optimizer = StableSPAM(
        parameters, betas=(beta1, beta2), weight_decay=weight_decay, reset_interval=interval, **hyper
    )
    near = {"rtol": tolerance, "atol": tolerance}
    for step in range(oracle["hyper/steps"].item()):
        for i, p in enumerate(parameters):
            p.grad = torch.tensor(oracle[f"p{i}/grads"][step], dtype=dtype)
        optimizer.step()
        for i, p in enumerate(parameters):
            where, state = f"p{i} at step {step + 1}: ", optimizer.state[p]
            multiplier = state["norm_mean"] / (state["norm_mean_square"].sqrt() + hyper["eps"])
            key = "params" if resets else "params_no_reset"
            expected = oracle[f"p{i}/wd{decay_index}/{key}"][step]
            np.testing.assert_allclose(p.detach().numpy(), expected, **near, err_msg=where + "parameter")
            np.testing.assert_allclose(state["threshold"], oracle[f"p{i}/threshold"][step], **near, err_msg=where + "T")
            np.testing.assert_allclose(
                multiplier, oracle[f"p{i}/norm_multiplier"][step], **near, err_msg=where + "AdaGN"
            )
            k = oracle[f"p{i}/adam_step"][step] if resets else step + 1
            assert state["steps_since_reset"] == k, f"{where}k is {state['steps_since_reset']}, not {k}"
    if resets:
        for i, p in enumerate(parameters):
            state, k = optimizer.state[p], optimizer.state[p]["steps_since_reset"].item()
            for name, beta, key in (("mean", beta1, "exp_avg"), ("mean_square", beta2, "exp_avg_sq")):
                expected = oracle[f"p{i}/wd{decay_index}/final_{key}"] / (1 - beta**k)
                np.testing.assert_allclose(state[name], expected, **near, err_msg=f"p{i}: final {name}")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-11)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1, "reset_interval": 3},
        {"gamma1": 0.85, "gamma2": 0.99999},
        {"betas": (0.0, 0.0), "gamma1": 0},
    ],
    ids=["defaults", "decay and resets", "bf16 preset", "no memory"],
)
def test_reference(
    dtype: torch.dtype, tolerance: float, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clipping, "PIECE_ON_CPU", 8)  # so that even small tensors are worked on in pieces
    parameters = make_parameters(dtype)
    references = [Reference(p, lr=1e-2, **options) for p in parameters]
    optimizer = StableSPAM(parameters, lr=1e-2, **options)
    for step in range(10):
        set_gradients(parameters, seed=step)
        parameters[2].grad = None if step in (3, 4) else parameters[2].grad
        if step == 5:
            for p in parameters:
                p.grad = torch.zeros_like(p)
        if step == 6:
            parameters[-1].grad = torch.full_like(parameters[-1], math.nan)
        grad = parameters[-2].grad
        assert grad is not None
        parameters[-2].grad = grad.t().contiguous().t()  # non-contiguous
        step_all(references, [p.grad for p in parameters])
        optimizer.step()
        for p, reference in zip(parameters, references, strict=True):
            torch.testing.assert_close(
                p.detach().double(), reference.parameter, rtol=tolerance, atol=tolerance,
                msg=lambda text, at=(step, tuple(p.shape)): f"step, shape = {at}: {text}",
            )  # fmt: skip


def test_non_contiguous_parameters_are_worked_on_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clipping, "PIECE_ON_CPU", 8)
    strided = Parameter(torch.randn(6, 5).t())
    plain = Parameter(strided.detach().clone(memory_format=torch.contiguous_format))
    train(StableSPAM([strided]), [strided], range(4))
    train(StableSPAM([plain]), [plain], range(4))
    torch.testing.assert_close(strided.detach(), plain.detach(), msg="the memory layout changed the trajectory")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
def test_non_finite_step_is_skipped_whole(bad: float, first: bool) -> None:
    parameters = make_parameters()
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "weight_decay": 0.5}]
    optimizer = StableSPAM(groups, weight_decay=0.1, reset_interval=4)
    untouched = copy.deepcopy(parameters), copy.deepcopy(optimizer)
    if not first:
        train(optimizer, parameters, range(3))  # the next step would be a reset
        untouched = copy.deepcopy((parameters, optimizer))
    before = [p.detach().clone() for p in parameters]
    set_gradients(parameters, seed=9)
    last = parameters[-1].grad
    assert last is not None
    last.view(-1)[3] = bad
    optimizer.step()
    assert_same([p.detach() for p in parameters], before, "a skipped step moved a parameter")
    # The state, too, is as if the step had never been: both go on alike, bit for bit.
    train(optimizer, parameters, range(3, 8))
    if first:
        untouched = untouched[0], StableSPAM(
            [{"params": untouched[0][:3]}, {"params": untouched[0][3:], "weight_decay": 0.5}],
            weight_decay=0.1, reset_interval=4,
        )  # fmt: skip
    train(untouched[1], untouched[0], range(3, 8))
    assert_same(snapshot(optimizer, parameters), snapshot(untouched[1], untouched[0]), "a skipped step left traces")


@pytest.mark.parametrize("scale", [3e38, 1e30, 1e-30, 1e-38, 1e-44])
@pytest.mark.parametrize("history", [0, 3])
@pytest.mark.parametrize("gamma2", [0.9, 0.0])  # at 0, AdaGN blows a vanishing gradient up by 1/ε
def test_extreme_but_finite_gradients_train(scale: float, history: int, gamma2: float) -> None:
    """n² overflows fp32 from n = 1.8e19 and vanishes below 1e-23; neither may skip a step or leave a NaN."""
    parameter = Parameter(torch.ones(4, 8))
    optimizer = StableSPAM([parameter], lr=1e-2, gamma2=gamma2)
    train(optimizer, [parameter], range(history))
    pattern = torch.linspace(-1, 1, 32).reshape(4, 8)
    before = parameter.detach().clone()
    parameter.grad = pattern * scale
    optimizer.step()
    state = optimizer.state[parameter]
    assert all(value.isfinite().all() for value in (parameter, *state.values())), f"not finite: {parameter} {state}"
    assert state["steps"] == history + 1, "a finite step was skipped"
    if scale > 1 and not history:
        assert torch.equal((before - parameter.detach()).sign(), pattern.sign()), "the update lost its direction"
    train(optimizer, [parameter], range(10, 13))
    assert parameter.isfinite().all(), "the extreme step poisoned later ones"


def test_zero_gradient_moves_only_by_weight_decay() -> None:
    parameter = Parameter(torch.ones(3))
    optimizer = StableSPAM([parameter], lr=0.5, weight_decay=0.5)
    parameter.grad = torch.zeros(3)
    optimizer.step()
    assert torch.equal(parameter.detach(), torch.full((3,), 0.75)), f"got {parameter.detach()}, wanted 0.75"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_gradients_are_left_alone_and_statistics_are_wide(dtype: torch.dtype) -> None:
    parameters = make_parameters(dtype)
    optimizer = StableSPAM(parameters)
    for step in range(3):
        set_gradients(parameters, seed=step)
        gradients = [p.grad for p in parameters]
        copies = [g.clone() for g in gradients if g is not None]
        optimizer.step()
        for p, gradient, expected in zip(parameters, gradients, copies, strict=True):
            assert p.grad is gradient and torch.equal(p.grad, expected), f"p.grad changed for shape {tuple(p.shape)}"
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for p in parameters:
        dtypes = {name: value.dtype for name, value in optimizer.state[p].items() if "steps" not in name}
        assert set(dtypes.values()) == {wide}, f"statistics of a {dtype} parameter are {dtypes}, wanted {wide}"
        assert p.dtype == dtype and p.isfinite().all()


def test_bf16_update_is_the_fp32_update_rounded_once() -> None:
    low = make_parameters(torch.bfloat16)
    high = [Parameter(p.detach().float()) for p in low]
    set_gradients(low, seed=0)
    for p, q in zip(low, high, strict=True):
        assert p.grad is not None
        q.grad = p.grad.float()
    StableSPAM(low, lr=0.1, weight_decay=0.1).step()
    StableSPAM(high, lr=0.1, weight_decay=0.1).step()
    assert_same([p.detach() for p in low], [q.detach().bfloat16() for q in high], "bf16 is not fp32 rounded")


def test_bf16_preset_multiplier_is_accurate() -> None:
    """1 − γ2ᵗ in fp32, taken literally, is off by more than 1e-3 here."""
    parameter, generator = Parameter(torch.zeros(1)), torch.Generator().manual_seed(0)
    optimizer = StableSPAM([parameter], preset="bf16")
    reference = Reference(parameter, gamma1=0.85, gamma2=0.99999)
    for step in range(300):
        parameter.grad = torch.randn(1, generator=generator).exp()
        optimizer.step()
        reference.step(parameter.grad)
        state = optimizer.state[parameter]
        multiplier = (state["norm_mean"] / (state["norm_mean_square"].sqrt() + 1e-8)).item()
        error = abs(multiplier / reference.multiplier - 1)
        assert error < 1e-6, f"step {step + 1}: {multiplier} against {reference.multiplier}, relative error {error}"


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.7, 0.999, 0.99999])
def test_averaging_weight(decay: float) -> None:
    for before in (0, 1, 2, 10, 1000, 10**6):
        weight = clipping.averaging_weight(decay, torch.tensor(before), torch.float32).item()
        exact = math.expm1(math.log(decay)) / math.expm1((before + 1) * math.log(decay)) if decay else 1.0
        assert abs(weight / exact - 1) < 1e-6, f"γ = {decay}, t = {before + 1}: weight {weight}, exactly {exact}"
    assert clipping.averaging_weight(decay, torch.tensor(0), torch.float32) == 1, "the first weight must be exactly 1"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rules_in_place(dtype: torch.dtype) -> None:
    gradient = torch.tensor([[1.0, -8.0], [4.0, 0.5]], dtype=dtype)
    maximum, threshold = clipping.absolute_maximum(gradient).float(), torch.tensor(2.0)
    clipped = ada_clip_(gradient, threshold, clipping.clip_ratio(maximum, threshold))
    assert clipped is gradient and gradient.tolist() == [[1, -2], [1, 0.5]], f"AdaClip gave {gradient}"
    norm = torch.tensor([2.5, 0.0])
    ratio = clipping.norm_ratio(norm, torch.tensor([5.0, 5.0]), torch.tensor([25.0, 25.0]), 0.0)
    assert ratio.tolist() == pytest.approx([0.4, 0]), f"AdaGN's ratio is m/√v/n, and 0 where n = 0; got {ratio}"
    norm_after = ada_gn_(gradient, ratio[0]).float().norm()
    torch.testing.assert_close(norm_after, torch.tensor(1.0), rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_is_bit_for_bit(dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"weight_decay": 0.1, "reset_interval": 4}
    parameters = make_parameters(dtype)
    optimizer = StableSPAM(parameters, **options)
    train(optimizer, parameters, range(6))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed_parameters = [Parameter(p.detach().clone()) for p in parameters]
    resumed = StableSPAM(resumed_parameters, lr=7.0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for p, q in zip(parameters, resumed_parameters, strict=True):
        saved, loaded = optimizer.state[p], resumed.state[q]
        assert {k: v.dtype for k, v in saved.items()} == {k: v.dtype for k, v in loaded.items()}, (
            "loading cast the state"
        )
    assert_same(snapshot(resumed, resumed_parameters), snapshot(optimizer, parameters), "loading changed the state")
    train(optimizer, parameters, range(6, 12))
    train(resumed, resumed_parameters, range(6, 12))
    assert_same(snapshot(resumed, resumed_parameters), snapshot(optimizer, parameters), "the resumed run differs")


def test_loaded_state_is_a_copy_and_pre_hooks_count() -> None:
    parameters = make_parameters()
    optimizer = StableSPAM(parameters)
    train(optimizer, parameters, range(2))
    saved = optimizer.state_dict()
    other = StableSPAM(make_parameters())

    def count_from_ten(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = {index: {**entry, "steps": torch.tensor(10)} for index, entry in state_dict["state"].items()}
        return {**state_dict, "state": state}

    other.register_load_state_dict_pre_hook(count_from_ten)
    other.load_state_dict(saved)
    assert all(state["steps"] == 10 for state in other.state.values()), "the user's pre-hook was ignored"
    pointers = {value.data_ptr() for state in optimizer.state.values() for value in state.values() if value.numel()}
    shared = [v for s in other.state.values() for v in s.values() if v.numel() and v.data_ptr() in pointers]
    assert not shared, "two optimizers share state tensors after load_state_dict"


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_deepcopy_and_pickle(duplicate: Any) -> None:
    parameters = make_parameters()
    optimizer = StableSPAM(parameters)
    train(optimizer, parameters, range(2))
    twins, twin = duplicate((parameters, optimizer))
    train(optimizer, parameters, range(2, 5))
    train(twin, twins, range(2, 5))
    assert_same(snapshot(twin, twins), snapshot(optimizer, parameters), "the copy trains differently")


def test_options_are_read_from_the_group_at_each_step_and_groups_can_be_added() -> None:
    first, second = Parameter(torch.ones(4)), Parameter(torch.ones(4))
    optimizer = StableSPAM([first], lr=1e-2)
    train(optimizer, [first], range(2))
    optimizer.add_param_group({"params": [second], "lr": 1e-3, "reset_interval": 2})
    train(optimizer, [first, second], range(2, 4))
    assert optimizer.state[first]["steps"] == 4 and optimizer.state[second]["steps"] == 2, "counters are per parameter"
    assert optimizer.state[second]["steps_since_reset"] == 1, "the added group's reset_interval was ignored"
    before = first.detach().clone()
    for name, value in {"lr": 0.5, "betas": (0.0, 0.0), "gamma1": 0.0, "gamma2": 0.0, "weight_decay": 0.5}.items():
        optimizer.param_groups[0][name] = value
    train(optimizer, [first], range(4, 5))
    assert first.grad is not None
    expected = before * 0.75 - 0.5 * first.grad.sign()  # without memory Adam's update is the sign
    torch.testing.assert_close(first.detach(), expected, rtol=1e-4, atol=1e-4, msg="a changed option was not read")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lr_may_be_a_tensor(dtype: torch.dtype) -> None:
    with_float, with_tensor = make_parameters(), make_parameters()
    train(StableSPAM(with_float, lr=0.01, weight_decay=0.1), with_float, range(3))
    optimizer = StableSPAM(with_tensor, lr=torch.tensor(0.01, dtype=dtype), weight_decay=0.1)
    train(optimizer, with_tensor, range(3))
    for p, q in zip(with_float, with_tensor, strict=True):
        torch.testing.assert_close(p, q, msg="a tensor lr gives another trajectory than the same float")


def test_closure_runs_first_with_gradients_enabled() -> None:
    parameter = Parameter(torch.ones(3))
    optimizer = StableSPAM([parameter], lr=0.1)

    def closure() -> Any:
        assert torch.is_grad_enabled(), "the closure runs without gradients"
        assert not optimizer.state, "state was read before the closure ran"
        optimizer.zero_grad()
        loss = (parameter**2).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
        assert not torch.is_grad_enabled()
    assert isinstance(loss, Tensor) and loss.item() == 3, f"the closure's loss came back as {loss}"
    torch.testing.assert_close(parameter.detach(), torch.full((3,), 0.9), msg="closure's gradient was not used")


def test_nothing_to_do() -> None:
    parameter = Parameter(torch.ones(3))
    optimizer = StableSPAM([parameter], weight_decay=0.1)
    assert optimizer.step() is None
    assert torch.equal(parameter.detach(), torch.ones(3)) and not optimizer.state, (
        "a parameter without grad was touched"
    )


class _NoHostSync(TorchDispatchMode):
    """Raises where a value would travel to the host, or a shape would depend on one."""

    FORBIDDEN = ("_local_scalar_dense", "item", "nonzero", "masked_select", "is_nonzero", "equal", "unique")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.FORBIDDEN, f"host sync: {func}"
        if name in ("index", "index_put_", "index_put"):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), f"boolean indexing: {func}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-2)], ids=["float", "tensor"])
def test_no_host_sync(dtype: torch.dtype, lr: float | Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "HOST_DEVICES", set())  # as on an accelerator: a CPU's results are always there
    parameters = make_parameters(dtype)
    optimizer = StableSPAM(parameters, lr=lr, weight_decay=0.1, reset_interval=2)
    for step in range(4):  # new state, a step, a reset, a skipped step
        set_gradients(parameters, seed=step)
        if step == 3:
            parameters[-1].grad = torch.full_like(parameters[-1], math.inf)
        with _NoHostSync():
            optimizer.step()
    with pytest.raises(AssertionError, match="host sync"), _NoHostSync():
        bool(torch.ones(()) > 0)  # the guard itself works


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -1.0), ("lr", math.nan), ("lr", math.inf), ("betas", (1.0, 0.9)), ("betas", (0.9, math.nan)),
        ("betas", (0.9,)), ("eps", 0.0), ("eps", -1e-8), ("weight_decay", -0.1), ("weight_decay", math.nan),
        ("gamma1", 1.0), ("gamma2", -0.1), ("gamma3", 1.5), ("reset_interval", 0), ("reset_interval", 2.5),
    ],
)  # fmt: skip
def test_bad_options_are_refused(name: str, value: Any) -> None:
    parameter = Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=f"StableSPAM needs {name} to be .*, got .*;"):
        StableSPAM([parameter], **{name: value})
    optimizer = StableSPAM([parameter])
    with pytest.raises(ValueError, match=f"StableSPAM needs {name} to be"):
        optimizer.add_param_group({"params": [Parameter(torch.ones(2))], name: value})
    assert len(optimizer.param_groups) == 1, "a refused group was added nevertheless"


def test_sparse_and_complex_gradients_are_refused() -> None:
    sparse, whole = Parameter(torch.ones(3, 2)), Parameter(torch.ones(2))
    sparse.grad, whole.grad = torch.eye(3, 2).to_sparse(), torch.ones(2)
    with pytest.raises(ValueError, match="dense, real gradients, got torch.sparse_coo.*sparse=False"):
        StableSPAM([whole, sparse]).step()
    assert torch.equal(whole.detach(), torch.ones(2)), "a refused step moved a parameter"
    number = Parameter(torch.ones(2, dtype=torch.complex64))
    number.grad = torch.ones_like(number)
    with pytest.raises(ValueError, match="complex64.*view_as_complex"):
        StableSPAM([number]).step()


class _Model(BoringModel):
    def configure_optimizers(self) -> Any:
        self.optimizer = StableSPAM(self.parameters(), lr=0.1, reset_interval=3)
        return [self.optimizer], [torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.5)]


def test_in_lightning_with_accumulation_and_scheduler(tmp_path: Path) -> None:
    model = _Model()
    before = copy.deepcopy(model.state_dict())
    trainer = Trainer(
        default_root_dir=tmp_path, accelerator="cpu", max_epochs=2, limit_train_batches=4, limit_val_batches=0,
        accumulate_grad_batches=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model)
    steps = {state["steps"].item() for state in model.optimizer.state.values()}
    assert steps == {4}, f"two epochs of four batches, accumulated by two, are four steps; counted {steps}"
    assert model.optimizer.param_groups[0]["lr"] == 0.025, "the scheduler did not halve lr after each of two epochs"
    assert not torch.equal(before["layer.weight"], model.state_dict()["layer.weight"]), "nothing was trained"
