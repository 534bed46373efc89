"""What other callbacks contribute to the report, and values that are not finite."""

import math
import statistics
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lowbit import FP4Precision, LinearCasts, PrecisionSummary, TernaryPrecision
from lightning_lowbit.callbacks.run_report import RunReport
from lightning_lowbit.nn import OPERANDS
from lightning_lowbit.nn.casts.presets import PRESETS
from lightning_lowbit.report import history as run_history
from lightning_lowbit.report.contents import in_words
from lightning_lowbit.report.history import History
from lightning_lowbit.report.html import Section, Table, Text
from tests.callbacks.run_report.runs import Known, both, load, page, steps, trainer
from tests.lightning_imports import Callback, quiet_trainer
from tests.precision.ranks_coverage_line import Special
from tests.report.test_html import EVIL


class Contributes(Callback):
    def __init__(self, name, fails=False):
        self.name, self.fails = name, fails

    @property
    def state_key(self):
        return self.name

    def report_sections(self, trainer):
        if self.fails:
            raise RuntimeError(f"{self.name} has no sections")
        yield Section(self.name, [Text(EVIL), Table(["layer"], [[EVIL]])])

    def report_data(self, trainer):
        if self.fails:
            raise RuntimeError(f"{self.name} has no data")
        return {self.name: {"share": torch.tensor(0.5), "bad": math.nan, "list": (1, None, True, Path("x"))}}


class Little(Known):
    """Most of its products are those of layers that are not quantized."""

    def __init__(self):
        super().__init__()
        self.rest = torch.nn.Sequential(Special(32, 64), Special(64, 32))

    def training_step(self, batch, batch_idx):
        return super().training_step(self.rest(batch), batch_idx)


def test_a_summary_gives_alert_page_and_file_one_coverage():
    summary = PrecisionSummary(quiet=True)
    run, text = both(Little(), summary, max_steps=1)
    (alert,) = run["alerts"]
    share = f"Coverage: {summary.coverage().share:.1%} of "
    assert alert.startswith(share) and "rest.{0-1} (a subclass of nn.Linear" in alert
    assert text.count(share) == 2 and run["coverage"] == summary.coverage().share
    trainer(PrecisionSummary(quiet=True), plugins=[TernaryPrecision(quantize_output=True)], max_steps=1).fit(Known())
    assert load("version_1")["coverage"] == 0.5 and not load("version_1")["alerts"], "what its casts leave is meant so"


def test_alerts_come_first():
    class Alarmed(Contributes):
        def report_alerts(self, trainer):
            return [f"{self.name} is wrong {EVIL}"]

    run, text = both(Little(), Alarmed("Alpha"), Alarmed("Omega"))
    little, *others = run["alerts"]
    assert "of the weights of matrix products" in little and "such as rest." in little
    assert run["coverage"] is None, "FLOPs were not counted"
    assert others == [f"Alpha is wrong {EVIL}", f"Omega is wrong {EVIL}"]
    places = [text.index(part) for part in ("Alerts", little, *others, "Optimization")]
    assert places == sorted(places)


def test_every_preset_is_explained():
    for preset in PRESETS:
        casts = LinearCasts.preset(preset)
        for cast in filter(None, map(casts.cast_of, OPERANDS)):
            text = in_words(cast)
            assert cast.element in text and cast.scale.format in text
            assert ("stochastic" in text) == cast.draws
            assert ("in passes in bfloat16 what enters the GEMM is rounded" in text) == cast.round_to_bfloat16


def test_throughput_while_compiling_does_not_stretch_the_axis():
    class Compiles(Known):
        def on_train_batch_end(self, *_):
            self.log("tokens/s", torch.tensor(10.0 * self.k if self.k < 3 else 1000.0 + self.k))

    run, text = both(Compiles())
    assert "Not drawn, since a run begins with compiling: 10 at step 1, 20 at step 2." in text
    assert [value for _, value in run["history"]["tokens/s"]][:2] == [10.0, 20.0], "run.json has all"
    trainer(default_root_dir="fine").fit(Known())
    assert "Not drawn" in page("fine")[0], "100 where 350 is usual"


def test_sections_and_data_of_other_callbacks():
    run, text = both(None, Contributes("Alpha"), Contributes("broken", fails=True), Contributes("Omega"))
    places = [text.index(part) for part in ("Other metrics", "Alpha", "Omega", "Environment", "Configuration")]
    assert places == sorted(places)
    assert "broken has no sections" in text and "broken has no data" in text
    expected = {"share": 0.5, "bad": None, "list": [1, None, True, "x"]}
    assert run["summary"] == {"Alpha": expected, "Omega": expected}


def test_names_and_values_of_any_kind():
    class Odd(Known):
        def training_step(self, batch, batch_idx):
            self.log(EVIL, torch.tensor(1.0))
            self.log("breaks", torch.tensor(math.inf if self.trainer.global_step >= 3 else 2.0))
            self.log("half", torch.tensor(0.5, dtype=torch.bfloat16))
            self.log("double", torch.tensor(0.1, dtype=torch.float64))
            return super().training_step(batch, batch_idx)

    run, text = both(Odd())
    assert run["history"]["breaks"] == [[1, 2.0], [2, 2.0], [3, 2.0], [4, None], [5, None], [6, None]]
    assert (run["metrics"]["breaks"], run["metrics"]["half"], run["metrics"]["double"]) == (None, 0.5, 0.1)
    assert "3 values not finite, first at step 4" in text and EVIL in text


def test_a_history_is_bounded_and_evenly_thinned():
    history = History()
    for step in range(1, 10_001):
        history.add("a", step, torch.tensor(float(step if step != 4321 else -1)))
    points = history.points()["a"]
    found = [step for step, _ in points]
    assert 900 < len(points) <= run_history.MOST_POINTS
    assert (found[0], found[-1]) == (1, 10_000)
    gaps = [b - a for a, b in zip(found, found[1:], strict=False)]
    assert max(gaps) <= 4 * statistics.median(gaps)
    assert history.extremes["a"] == (-1.0, 10_000.0), "the best value is lost with its point"
    other = History()
    other.load_state_dict(history.state_dict())
    assert other.points() == history.points()
    assert not other.add("a", 10_000, torch.tensor(0.0))
    assert other.add("a", 10_001, torch.tensor(0.0))


def test_metrics_of_many_layers_share_a_bound():
    history = History(most_of_layers=2000)
    for step in range(1, 1001):
        history.add("loss", step, torch.tensor(0.0))
        for layer in range(10):
            history.add(f"sqnr/fprop_x/{layer}", step, torch.tensor(float(step)))
    points = history.points()
    assert len(points.pop("loss")) == 1000
    assert {points[name][-1] for name in points} == {(1000, 1000.0)}
    assert {100 <= len(of_layer) <= 200 for of_layer in points.values()} == {True}, "2000 points for 10 layers"


def test_hundreds_of_metrics_are_not_copied_in_each_step():
    history, copies = History(), []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.stack.default:
                copies.append(len(args[0]))
            return func(*args, **(kwargs or {}))

    with Copies():
        for step in range(1, 13):
            for layer in range(100):
                history.add(f"sqnr/fprop_x/{layer}", step, torch.tensor(0.0))
    assert copies == [400, 400, 400]


def test_later_changes_do_not_reach_what_is_recorded():
    history, value = History(), torch.tensor([3.0], requires_grad=True)
    history.add("a", 1, value)
    value.data.zero_()
    assert history.points() == {"a": [(1, 3.0)]}


class NoSync(TorchDispatchMode):
    """Refuses what makes the host wait for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default), func
        return func(*args, **(kwargs or {}))


NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def test_recording_waits_for_no_device(accelerator):
    hooks = ["on_train_batch_start", "on_train_batch_end", "on_train_epoch_end", "on_validation_start"]

    def watched(hook):
        def method(self, *args):
            with NoSync(), strict() if accelerator == "cuda" else nullcontext():
                getattr(RunReport, hook)(self, *args)

        return method

    @contextmanager
    def strict():
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    report_class = type("Watched", (RunReport,), {hook: watched(hook) for hook in [*hooks, "on_validation_end"]})

    class OnDevice(Known):
        def training_step(self, batch, batch_idx):
            self.log("level", batch.mean())
            return super().training_step(batch, batch_idx)

    options = {"accelerator": accelerator, "devices": 1, "max_steps": 6, "log_every_n_steps": 1, "limit_val_batches": 1}
    quiet_trainer(FP4Precision(quantize_output=True), callbacks=[report_class()], **options).fit(OnDevice())
    assert steps(load(), "level") == [1, 2, 3, 4, 5, 6]
    with pytest.raises(AssertionError), NoSync():
        torch.ones(()).item()
