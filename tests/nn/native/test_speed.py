"""How fast a CPU multiplies codes: measured by a clock, kept on the machine, said in words."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_lowbit.kernels import backend
from lightning_lowbit.kernels.cpu.gemms import instructions
from lightning_lowbit.nn.layers import speed
from lightning_lowbit.nn.layers.speed import Speed, Times, cpu_speed, measure, measured, times_from
from tests.kernels.library.conftest import cache as cache  # a fixture
from tests.tables import each

pytestmark = pytest.mark.skipif(instructions() is None, reason="the C++ kernels cannot be built")


class Clock:
    """Says that products take these spans, again and again, and counts how often it is read: once at the start, then
    twice for each of three products, and once before each round."""

    def __init__(self, *rounds, share=1.0):
        self.spans = itertools.chain(itertools.chain(*rounds), itertools.repeat(1.0))
        self.share, self.seconds, self.computed, self.reads = share, 0.0, 0.0, 0

    def __call__(self):
        self.reads += 1
        place = self.reads - 2  # reads 2 to 13 are of the two rounds that come whatever the time is; then one tells it
        place = place % 6 if place < 12 else (place - 12) % 7 - 1
        if self.reads > 1 and place in (1, 3, 5):
            span = next(self.spans)
            self.seconds += span
            self.computed += span * self.share
        return self.seconds, self.computed


ROUNDS = [3.0, 8.0, 5.0], [2.0, 7.0, 6.0]


@each("dtype", [torch.bfloat16, torch.float32])
def test_the_shortest_time_of_each_product_counts_and_rounds_go_on_while_there_is_time(dtype):
    assert measure(dtype, Clock(*ROUNDS)) == Times(native=2.0, emulated=7.0, unquantized=5.0)
    clock = Clock(*[[0.01, 0.01, 0.01]] * 100)
    assert measure(dtype, clock) == pytest.approx((0.01, 0.01, 0.01, True))
    assert clock.seconds == pytest.approx(0.21)


def test_nothing_else_sees_the_measurement():
    state = torch.get_rng_state()
    with FlopCounterMode(display=False) as counter, torch.autocast("cpu", torch.bfloat16):
        measure(torch.float32, Clock(*ROUNDS))
    assert counter.get_total_flops() == 0
    assert torch.equal(torch.get_rng_state(), state)


@pytest.fixture
def ask(cache):
    """Asks for times by a new clock, as in a new process: those, and whether they were measured."""

    def ask(dtype=torch.float32, threads=1, is_native=True, *, share=1.0, rounds=ROUNDS):
        measured.cache_clear()
        clock = Clock(*rounds, share=share)
        times = measured(dtype, threads, is_native, clock)
        return times, clock.reads > 0

    yield ask
    measured.cache_clear()


def test_a_machine_measures_once_each_dtype_and_number_of_threads(ask):
    times, was_measured = ask()
    assert was_measured and ask() == (times, False)
    for other in ((torch.bfloat16, 1, True), (torch.float32, 2, True), (torch.float32, 1, False)):
        assert ask(*other)[1], other


def test_a_process_measures_once_where_no_folder_keeps_figures(cache, ask):
    cache.touch()
    assert ask()[1] and ask()[1]
    clock = Clock(*ROUNDS)
    times, reads = measured(torch.float32, 1, True, clock), clock.reads
    assert measured(torch.float32, 1, True, clock) == times and clock.reads == reads


def test_times_of_a_busy_machine_or_a_damaged_file_are_measured_again(cache, ask):
    assert not ask(share=0.5)[0].is_quiet
    assert ask()[0].is_quiet
    (path,) = cache.glob("*.json")
    path.write_text(path.read_text()[:-1])
    assert ask(rounds=[[1.0, 2.0, 3.0]] * 2) == (Times(1.0, 2.0, 3.0), True)


EMULATED = " The emulation is faster here: backend='emulated' takes it."
NATIVE = " They are faster here: backend='native' takes them."


@each(
    ("times", "is_native", "advice"),
    [
        ((4.0, 2.0, 1.0), True, EMULATED),
        ((2.0, 3.0, 1.0), True, None),  # slower than bfloat16, and faster than the emulation
        ((1.02, 1.0, 2.0), True, None),  # a tie
        ((2.0, 3.5, 3.0), True, None),
        ((2.0, 3.0, 1.0), False, NATIVE),
        ((2.0, 1.0, 1.0), False, None),
    ],
)
def test_what_is_faster_is_said_with_the_setting_that_takes_it(times, is_native, advice):
    text = str(Speed("AVX2", 2, torch.bfloat16, Times(*times), is_native))
    assert text.startswith("Native on this CPU: " if is_native else "Left out on this CPU: ")
    assert text.endswith(f"2 threads).{advice or ''}")


def test_words():
    assert str(Speed("AVX2", 1, torch.bfloat16, Times(2.0, 3.5, 3.0), True)) == (
        "Native on this CPU: GEMMs of codes by AVX2, measured here at 1.50 times the speed of bfloat16 and 1.75 times "
        "that of the emulation (NVFP4 with its casts, 512 × 512 × 512, 1 thread)."
    )
    busy = str(Speed("AVX2", 1, torch.bfloat16, Times(4.0, 2.0, 1.0, False), True))
    assert busy.endswith("Their speed was not measured: other processes took the cores meanwhile.")
    assert "times" not in busy and "backend='emulated'" not in busy


def test_a_source_of_times_stands_for_the_measurement_where_codes_are_multiplied():
    asked = []
    with times_from(lambda dtype: asked.append(dtype) or Times(1.0, 2.0, 3.0)):
        assert cpu_speed(torch.float16) is None
        with backend("eager"):
            assert cpu_speed(torch.float32) is None
        assert not asked
        assert cpu_speed(torch.float32) == Speed(instructions(), 1, torch.float32, Times(1.0, 2.0, 3.0))
    assert asked == [torch.float32]
    assert cpu_speed(torch.float32).times != Times(1.0, 2.0, 3.0), "the context has ended"


def test_products_are_those_of_a_layer():
    """The native one and the emulated one are equal up to the order of sums, and near the unquantized one."""
    native, emulated, unquantized = (product() for product in speed._products(torch.float32))
    torch.testing.assert_close(native, emulated, rtol=1e-4, atol=1e-3)
    assert 0.05 < (native - unquantized).norm() / unquantized.norm() < 0.2
