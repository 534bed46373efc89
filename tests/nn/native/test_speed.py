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
    """Says that products take these spans, again and again, and counts how often it is read.

    It is read once at the start; then twice for each of three products, and once before each round.
    """

    def __init__(self, *rounds, share=1.0):
        self.spans = itertools.chain(itertools.chain(*rounds), itertools.repeat(1.0))
        self.share, self.seconds, self.computed, self.reads = share, 0.0, 0.0, 0

    def __call__(self):
        self.reads += 1
        if self.reads > 1 and self._is_stop():
            span = next(self.spans)
            self.seconds += span
            self.computed += span * self.share
        return self.seconds, self.computed

    def _is_stop(self):
        return self._place() in (1, 3, 5)

    def _place(self):
        """Reads 2 to 13 are of the two rounds that come whatever the time is; then one tells the time."""
        place = self.reads - 2
        return place % 6 if place < 12 else (place - 12) % 7 - 1


ROUNDS = [3.0, 8.0, 5.0], [2.0, 7.0, 6.0]


@each("dtype", [torch.bfloat16, torch.float32])
def test_the_shortest_time_of_each_product_counts(dtype):
    assert measure(dtype, Clock(*ROUNDS)) == Times(native=2.0, emulated=7.0, unquantized=5.0)


def test_rounds_go_on_while_there_is_time():
    brief = [0.01, 0.01, 0.01]
    clock = Clock(*[brief] * 100)
    assert measure(torch.float32, clock) == pytest.approx((0.01, 0.01, 0.01, True))
    assert clock.seconds == pytest.approx(0.21)


def test_a_busy_machine_is_noticed():
    assert measure(torch.float32, Clock(*ROUNDS, share=0.5)).is_quiet is False


def test_nothing_else_sees_the_measurement():
    state = torch.get_rng_state()
    with FlopCounterMode(display=False) as counter, torch.autocast("cpu", torch.bfloat16):
        measure(torch.float32, Clock(*ROUNDS))
    assert counter.get_total_flops() == 0
    assert torch.equal(torch.get_rng_state(), state)


@pytest.fixture
def forgotten():
    """Times are asked for as in a new process, within a test and after it."""
    measured.cache_clear()
    yield measured.cache_clear
    measured.cache_clear()


def test_a_machine_measures_once(cache, forgotten):
    clock = Clock(*ROUNDS)
    times = measured(torch.float32, 1, True, clock)
    forgotten()
    reads = clock.reads
    assert measured(torch.float32, 1, True, clock) == times
    assert clock.reads == reads > 0


def test_a_process_measures_once_where_no_folder_keeps_figures(cache, forgotten):
    cache.touch()
    clock = Clock(*ROUNDS)
    times = measured(torch.float32, 1, True, clock)
    reads = clock.reads
    assert measured(torch.float32, 1, True, clock) == times
    assert clock.reads == reads


@each("other", [(torch.bfloat16, 1, True), (torch.float32, 2, True), (torch.float32, 1, False)])
def test_each_dtype_and_number_of_threads_has_its_own_times(cache, forgotten, other):
    forgotten()
    measured(torch.float32, 1, True, Clock(*ROUNDS))
    clock = Clock(*ROUNDS)
    measured(*other, clock)
    assert clock.reads > 0


def test_times_of_a_busy_machine_are_not_kept(cache, forgotten):
    measured(torch.float32, 1, True, Clock(*ROUNDS, share=0.5))
    forgotten()
    assert measured(torch.float32, 1, True, Clock(*ROUNDS)).is_quiet


def test_a_damaged_file_is_measured_again(cache, forgotten):
    measured(torch.float32, 1, True, Clock(*ROUNDS))
    (path,) = cache.glob("*.json")
    path.write_text(path.read_text()[:-1])
    forgotten()
    clock = Clock([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert measured(torch.float32, 1, True, clock) == Times(1.0, 2.0, 3.0)


def words(*times, threads=1, is_native=True):
    return str(Speed("AVX2", threads, torch.bfloat16, Times(*times), is_native))


def test_words():
    text = (
        "Native on this CPU: GEMMs of codes by AVX2, measured here at 1.50 times the speed of bfloat16 and 1.75 times "
        "that of the emulation (NVFP4 with its casts, 512 × 512 × 512, 1 thread)."
    )
    assert words(2.0, 3.5, 3.0) == text
    assert words(2.0, 3.5, 3.0, threads=2) == text.replace("1 thread", "2 threads")


def test_an_emulation_that_is_faster_is_said_with_the_setting_that_takes_it():
    advice = " The emulation is faster here: backend='emulated' takes it."
    assert words(4.0, 2.0, 1.0).endswith(f"1 thread).{advice}")
    assert advice not in words(2.0, 3.0, 1.0), "slower than bfloat16, and faster than the emulation"
    assert advice not in words(1.02, 1.0, 2.0), "a tie"


def test_gemms_that_are_left_out_and_faster_are_said_with_the_setting_that_takes_them():
    advice = " They are faster here: backend='native' takes them."
    text = words(2.0, 3.0, 1.0, is_native=False)
    assert text.startswith("Left out on this CPU: ") and text.endswith(advice)
    assert advice not in words(2.0, 1.0, 1.0, is_native=False)


def test_a_busy_machine_is_said_and_gives_no_advice():
    text = words(4.0, 2.0, 1.0, False)
    assert text.endswith("Their speed was not measured: other processes took the cores meanwhile.")
    assert "times" not in text and "backend='emulated'" not in text


def test_there_is_no_speed_where_codes_are_not_multiplied():
    def no(dtype):
        pytest.fail(f"{dtype} is measured")

    with times_from(no):
        assert cpu_speed(torch.float16) is None
        with backend("eager"):
            assert cpu_speed(torch.float32) is None


def test_a_source_of_times_stands_for_the_measurement():
    asked = []
    with times_from(lambda dtype: asked.append(dtype) or Times(1.0, 2.0, 3.0)):
        assert cpu_speed(torch.float32) == Speed(instructions(), 1, torch.float32, Times(1.0, 2.0, 3.0))
    assert asked == [torch.float32]
    assert cpu_speed(torch.float32).times != Times(1.0, 2.0, 3.0), "the context has ended"


def test_products_are_those_of_a_layer():
    """The native one and the emulated one are equal up to the order of sums, and near the unquantized one."""
    native, emulated, unquantized = (product() for product in speed._products(torch.float32))
    torch.testing.assert_close(native, emulated, rtol=1e-4, atol=1e-3)
    assert 0.05 < (native - unquantized).norm() / unquantized.norm() < 0.2
