"""The state of histories: plain tensors, with which training goes on bit for bit, and refused by anything else.

And whose histories are when models are copied, converted anew or moved.
"""

import copy
import io

import pytest
import torch
from torch import Tensor, nn

from lightning_lowbit import LinearCasts, convert
from lightning_lowbit.nn import OPERANDS, AmaxHistories, smooth_swiglu
from lightning_lowbit.nn.layers.layer import quantized_layers
from tests.nn.amax.histories import (
    E4M3,
    IN,
    NVFP4,
    OUT,
    TOKENS,
    delayed,
    filled,
    gated,
    remembered,
    same_states,
    steps_of,
    trained,
)
from tests.nn.layers import every, gradients, identical
from tests.tables import each


def test_state_is_plain_tensors():
    casts = LinearCasts(fprop_x=delayed(history=3), wgrad_g=delayed("e5m2", history=5))
    model, histories = trained(every(delayed(history=2)), steps=1, overrides={"second": casts, "head": "fp8-current"})
    expected = {f"first/{name}": 2 for name in OPERANDS} | {"second/fprop_x": 3, "second/wgrad_g": 5}
    state = histories.state_dict()
    assert list(state) == ["amax_history", "channel_amax", "gradient_scale"]
    assert {name: tensor.numel() for name, tensor in state["amax_history"].items()} == expected
    assert state["channel_amax"] == {}
    for name, tensor in state["amax_history"].items():
        assert (type(tensor), tensor.dtype, tensor.device.type, tensor.dim()) == (Tensor, torch.float32, "cpu", 1), name
        assert tensor.untyped_storage().nbytes() == 4 * len(tensor), f"{name} drags other tensors into the file"
        tensor.fill_(7)
    assert all(7 not in history for history in remembered(histories).values()), "the state is not a copy"


def test_names_are_those_of_the_unwrapped_model():
    model = nn.Sequential(torch.compile(convert(nn.Linear(8, 8), LinearCasts(fprop_x=E4M3))))
    assert list(AmaxHistories(model).state_dict()["amax_history"]) == ["0/fprop_x"]


@pytest.mark.parametrize("casts", ["fp8-delayed", "mixed"])
def test_a_loaded_state_goes_on_bit_for_bit(casts):
    setup = {}
    if casts == "mixed":
        setup = {"casts": every(delayed(history=2)), "overrides": {"second": NVFP4.replace(dgrad_g=None)}}
    model, histories = trained(**setup)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "lightning_lowbit": histories.state_dict()}, file)
    expected = steps_of(model, histories, range(3, 6))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed, resumed_histories = trained(steps=0, **setup)
    gradients(resumed, filled((16, 32), 100.0))  # of a step under way, which loading forgets
    resumed.load_state_dict(saved["model"])
    resumed_histories.load_state_dict(saved["lightning_lowbit"])
    found = steps_of(resumed, resumed_histories, range(3, 6))
    for step, results in enumerate(found):
        identical(results, expected[step], f"step {step} after loading")
    same_states(resumed_histories, histories, "later")
    anew, anew_histories = trained(steps=0, **setup)
    assert not torch.equal(steps_of(anew, anew_histories, range(3, 4))[0]["y"], expected[0]["y"]), "nothing to resume"


def test_smoothed_channels_are_state():
    model, histories = gated()
    seen = []
    model.down_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    for micro_batch in range(2):
        model(filled((TOKENS, 16), 2.0, micro_batch)).sum().backward()
    histories.advance_()
    state = histories.state_dict()
    assert list(state["channel_amax"]) == ["down_proj"]
    assert torch.equal(state["channel_amax"]["down_proj"], torch.cat(seen).abs().amax(0)), "of another input"
    assert "down_proj/fprop_w" not in state["amax_history"], "the smoothed weight has its own scale"
    other, loaded = gated()
    loaded.load_state_dict(state)
    same_states(loaded, histories)
    x = filled((TOKENS, 16), 0.01, 3)
    for one in (histories, loaded):
        one.recording = False
    assert torch.equal(other(x), model(x)), "evaluates with other channels"
    assert not torch.equal(gated()[0](x), model(x)), "the sample does not tell"
    for one in (histories, loaded):
        one.advance_()
        same_states(one, loaded, "evaluation was staged")
    assert torch.equal(histories.state_dict()["channel_amax"]["down_proj"], state["channel_amax"]["down_proj"])


@each(
    ("save", "load", "words"),  # who saved the state, who loads it, and what the message says
    [
        (trained, lambda: trained(every(delayed(history=8))), ["of first/fprop_x has 16 steps, and this run's 8"]),
        (
            trained,
            lambda: trained(overrides={"head": every(E4M3).replace(wgrad_x=delayed(history=17))}),
            ["amax_history of head/wgrad_x has 16 steps, and this run's 17"],
        ),
        (
            lambda: trained(skip=["second"]),
            trained,
            ["missing there", "second/dgrad_g, second/dgrad_w, second/fprop_w, second/fprop_x, second/wgrad_g"],
        ),
        (trained, lambda: trained(skip=["head"]), ["not in this model", "head/fprop_x"]),
        (
            lambda: trained(LinearCasts(fprop_x=E4M3)),
            lambda: trained(LinearCasts(fprop_w=E4M3)),
            ["missing there: first/fprop_w, head/fprop_w, second/fprop_w; not in this model: first/fprop_x"],
        ),
        (lambda: trained("fp8-current"), trained, ["missing there", "and 12 more"]),
        (
            lambda: gated("fp8-current", smooth=None),
            lambda: gated("fp8-current"),
            ["channel_amax is that of other layers", "missing there: down_proj"],
        ),
        (
            lambda: gated("fp8-current", 32),
            lambda: gated("fp8-current"),
            ["channel_amax of down_proj has 32 channels, and this run's 24"],
        ),
    ],
)
def test_a_state_of_something_else_is_refused_whole(save, load, words):
    model, histories = load()
    amaxes = [layer.lowbit.amaxes for layer in quantized_layers(model).values() if layer.lowbit.amaxes]
    before = histories.state_dict(), [one.in_force.clone() for one in amaxes]
    with pytest.raises(ValueError, match="fresh_histories=True") as error:
        histories.load_state_dict(save()[1].state_dict())
    for part in words:
        assert part in str(error.value)
    for kind, tensors in before[0].items():
        identical(histories.state_dict()[kind], tensors, f"{kind} has been changed:")
    assert all(map(torch.equal, [one.in_force for one in amaxes], before[1]))


@each("dtype", [torch.bfloat16, torch.float64])
def test_the_dtype_of_the_model_is_not_that_of_amaxes(dtype):
    model, histories = trained(steps=0)
    model.to(dtype)
    amax = 1.0 + 2**-7  # which both hold
    gradients(model, filled((16, 32), amax).to(dtype))
    histories.advance_()
    assert remembered(histories)["first/fprop_x"] == [amax]
    for tensor in (*histories.state_dict()["amax_history"].values(), *model.first.lowbit.amaxes[:4]):
        assert tensor.dtype == torch.float32


def test_copies_are_independent():
    model, histories = trained()
    before = histories.state_dict()["amax_history"]
    twin = copy.deepcopy(model)
    x = filled((16, 32), 50.0)
    fresh = convert(copy.deepcopy(model), "fp8-delayed")
    AmaxHistories(fresh)
    with pytest.warns(UserWarning, match="in a copy of the model that the plugin does not know"):
        found = gradients(twin, x)
    identical(found, gradients(fresh, x), "the copy has not its own amaxes")
    histories.advance_()
    identical(histories.state_dict()["amax_history"], before, "the copy staged it:")
    own = AmaxHistories(twin)
    own.load_state_dict(histories.state_dict())
    found = gradients(twin, x)
    identical(gradients(model, x), found, "with the same histories, the copy is scaled otherwise")
    histories.advance_()
    identical(gradients(twin, x), found, "the original stepped, and changed the copy")
    own.advance_()
    same_states(own, histories, "one by itself")


def test_histories_that_are_copied_with_their_model_are_those_of_the_copy():
    model, histories = copy.deepcopy(trained())
    gradients(model, filled((16, 32), 9.0))
    histories.advance_()
    assert remembered(histories)["first/fprop_x"][-1] == 9
    assert model.first.lowbit.amaxes.in_force[0] == 9


def test_new_histories_take_the_place_of_old_ones():
    model, old = trained()
    new = AmaxHistories(model)
    gradients(model, filled((16, 32), 9.0))
    old.advance_()
    assert len(remembered(old)["first/fprop_x"]) == 3, "the layers still stage into the old ones"
    assert model.first.lowbit.amaxes.in_force.tolist() == [0] * 6, "not empty"
    new.advance_()
    assert remembered(new)["first/fprop_x"] == [9]


def test_without_histories_is_refused():
    layer = convert(nn.Linear(IN, OUT), LinearCasts(dgrad_g=E4M3))
    with pytest.raises(ValueError, match=r"delayed scaling needs histories.*lightning_lowbit\.nn\.AmaxHistories"):
        layer(torch.ones(1, IN))


@pytest.mark.parametrize("change", ["convert", "smooth"])
def test_casts_that_the_histories_do_not_know_are_refused(change):
    """Other operands than those that are remembered would be scaled by their own amaxes for ever, without a word."""
    model, _ = gated(LinearCasts(fprop_x=E4M3), smooth=None)
    if change == "convert":
        convert(model, LinearCasts(fprop_x=E4M3, dgrad_g=E4M3))
    else:
        smooth_swiglu(model)
    with pytest.raises(ValueError, match="histories"):
        model(torch.ones(2, 16))
    histories = AmaxHistories(model)
    model(torch.ones(2, 16)).sum().backward()
    histories.advance_()
    assert ("down_proj/dgrad_g" in remembered(histories)) == (change == "convert")


def test_nothing_to_remember():
    model, _ = trained(steps=1)
    histories = AmaxHistories(convert(model, "fp8-current"))
    assert not histories and len(histories) == 0
    histories.advance_(lambda tensor: pytest.fail("there is nothing to reduce"))
    assert histories.state_dict() == {"amax_history": {}, "channel_amax": {}, "gradient_scale": {"loss": torch.ones(1)}}
    histories.load_state_dict(histories.state_dict())
    assert model.first.lowbit.amaxes is None, "it still holds those of former casts"


def test_the_first_pass_may_be_in_inference_mode():
    """Evaluation before training moves what layers hold to their device; training then fills it in place."""
    model, histories = trained(steps=0)
    with torch.inference_mode():
        histories.to_(torch.device("meta"))
    assert model.first.lowbit.amaxes.staged.device.type == "meta"
    assert not any(tensor.is_inference() for tensor in model.first.lowbit.amaxes[:4]), "cannot be changed any more"
    histories.advance_()


def test_moving_to_the_same_device_changes_nothing():
    model, histories = trained()
    before = model.first.lowbit.amaxes
    gradients(model, filled((16, 32), 9.0))
    histories.to_(torch.device("cpu"))
    assert all(a is b for a, b in zip(before, model.first.lowbit.amaxes, strict=True))
    histories.advance_()
    assert remembered(histories)["first/fprop_x"][-1] == 9
