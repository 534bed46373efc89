"""Times of a device, and the two rates against which they stand: of copies and of GEMMs."""

import fcntl
import statistics
import tempfile
import time
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

SPIN = 2_000_000  # clocks for which the GPU waits, about a millisecond, while the host enqueues what is timed
LOCK = Path(tempfile.gettempdir()) / "lowbit_gpu_lock"


@contextmanager
def turn(alone):
    """Within this context one process measures alone, or several compile and warm up."""
    with open(LOCK, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(function, device, calls=10, rounds=20, largest=2.0):
    """The median time of a call on the device, which does not wait for the host; within ``largest`` seconds in all."""
    if device != "cuda":  # a rehearsal
        calls = rounds = 1
    function()
    synchronize(device)
    begin, times = time.monotonic(), []
    while len(times) < rounds and time.monotonic() - begin < largest or not times:
        times.append(_timed(function, device, calls) / calls)
    return statistics.median(times)


def _timed(function, device, calls):
    if device != "cuda":
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        return time.perf_counter() - begin
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SPIN)
    start.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


def captured(function, device):
    """A replay of a call, captured in a CUDA graph after three calls, and what the call returned; without a GPU the
    function itself."""
    if device != "cuda":
        return function, function()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        result = function()
    return graph.replay, result


def host_seconds(function, device, calls=20, rounds=5):
    """The median time that the host takes to enqueue a call, onto an empty queue."""
    if device != "cuda":
        calls = rounds = 1
    function()
    times = []
    for _ in range(rounds):
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        times.append((time.perf_counter() - begin) / calls)
    synchronize(device)
    return statistics.median(times)


def kernels_launched(function, device):
    """How many kernels and copies a call has the GPU run; None without one."""
    if device != "cuda":
        return None
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        function()
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in profiled.events())


def peak_bytes(function, device, clear=lambda: None):
    """The most memory of the GPU that a call holds beside what is there before, after ``clear``; None without a GPU."""
    if device != "cuda":
        return None
    function()
    clear()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@cache
def copy_rate(device):
    """Bytes per second that copies of 1 GiB (on a CPU 4 MiB) read and write."""
    source = torch.empty(2**30 if device == "cuda" else 2**22, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source), device, calls=4)


@cache
def gemm_rate(device, dtype=torch.bfloat16):
    """Operations per second of a GEMM of 8192 x 8192 x 8192 (on a CPU 128)."""
    size = 8192 if device == "cuda" else 128
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    if dtype == torch.float8_e4m3fn:
        one = torch.ones((), device=device)
        b = b.t()
        took = seconds(lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16), device, calls=4)
    elif dtype == torch.int8:
        b = b.t()
        took = seconds(lambda: torch._int_mm(a, b), device, calls=4)
    else:
        took = seconds(lambda: torch.mm(a, b), device, calls=4)
    return 2 * size**3 / took
