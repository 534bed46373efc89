"""Checkpoints in real processes: resumed under other strategies, made one file, and after a process was killed."""

import signal
import time
from contextlib import chdir

import pytest
import torch
import torch.distributed as dist

from lightning_lowbit import restore
from lightning_lowbit.precision.checkpoints.files import consolidate
from tests.launch import LIMIT, launch, start
from tests.pairwise import selected
from tests.precision.checkpoints import ranks as checkpoints
from tests.precision.checkpoints import ranks_killed
from tests.precision.checkpoints.ranks import HALF, MICRO_BATCHES, accumulates, path_of, resumed, train
from tests.ranks import RANKS

pytestmark = [
    pytest.mark.filterwarnings("ignore:The checkpoint was trained on . data-parallel ranks"),  # of as many rows
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    # DCP of torch 2.13 says so where there is no process group; Lightning's consolidation has none on purpose.
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
]

# Writers are named by what they train and their strategy. These are those that all others are compared with.
COMPARED = [(kind, writer) for kind in checkpoints.KINDS for writer in ("one", "ddp")]


def of_writers(*writers):
    return pytest.mark.parametrize("writer", writers, ids=": ".join)


def in_this_process(strategy, kind, folder, monkeypatch, ckpt_path=None):
    with chdir(folder), monkeypatch.context() as patch:
        if strategy == "one":
            return train(strategy, kind, ckpt_path)
        for name, value in {"LOCAL_RANK": "0", "NODE_RANK": "0", "WORLD_SIZE": "1"}.items():
            patch.setenv(name, value)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            return train(strategy, kind, ckpt_path)
        finally:
            dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def results(request, folder):
    """Of all runs that tests need, those of both ranks put together."""
    pairs = selected(request, "pair")
    writers = dict.fromkeys([*COMPARED, *selected(request, "writer"), *(pair[:2] for pair in pairs)])
    found = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        for kind, writer in writers:
            if writer in checkpoints.ALONE:
                found[path_of(writer, kind)] = in_this_process(writer, kind, folder, monkeypatch)
    names = [path_of(writer, kind) for kind, writer in writers]
    ranks = launch("tests.precision.checkpoints.ranks", RANKS, folder, *names, *(resumed(*pair) for pair in pairs))
    for name, of_first in ranks[0].items():
        losses = {place: loss for rank in ranks for place, loss in rank[name]["losses"].items()}
        found[name] = of_first | {"losses": losses}
        for rank in ranks:
            assert_equal(rank[name]["weights"], of_first["weights"])
            assert plain(rank[name]["state"]) == plain(of_first["state"]), f"ranks know different things: {name}"
    return found


def assert_equal(found, wanted, tolerance=0.0):
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def plain(state):
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, torch.Tensor) else state


def from_half(losses):
    return {place: loss for place, loss in sorted(losses.items()) if place >= HALF * MICRO_BATCHES}


@pytest.mark.fast(
    *(f"fp8: {writer}" for writer in ("ddp", "fsdp1", "fsdp2", "fsdp2 file", "tensor parallel")),
    *("fp16: ddp", "fp16: fsdp2 file"),
)
@of_writers(*((kind, writer) for kind, writers in checkpoints.READERS.items() for writer in writers))
def test_all_strategies_train_the_same(results, writer):
    kind, strategy = writer
    one, run = (results[path_of(name, kind)] for name in ("one", strategy))
    assert len(run["losses"]) == checkpoints.STEPS * MICRO_BATCHES
    assert_equal(dict(sorted(run["losses"].items())), one["losses"], 1e-5)


def test_what_is_saved_is_not_what_a_run_starts_with(results):
    """Or else nothing would be shown."""
    fp8, fp16 = (results[path_of("ddp", kind)]["state"] for kind in ("fp8", "fp16"))
    assert fp8["plugin"]["step"] == HALF and fp8["plugin"]["amax_history"]
    assert list(fp8["plugin"]["casts"]) == ["body.0"]
    for state in (fp8, fp16):
        assert 0 < state["plugin"]["blend"] < 1
        assert state["monitor"]["running"]["averaged"] > 0
    assert fp16["plugin"]["skipped_steps"] == 1
    assert fp16["plugin"]["scaler"]["scale"] != 256


@pytest.mark.fast(
    "fp8: fsdp1, fsdp1",
    "fp8: fsdp2 file, fsdp1 file",
    "fp8: fsdp2, tensor parallel",
    "fp8: tensor parallel, fsdp2, one rank",
    "fp16: fsdp2 file, one",
)
@pytest.mark.parametrize("pair", checkpoints.PAIRS, ids=lambda pair: "{}: {}, {}".format(*pair))
def test_resumed_run_is_the_uninterrupted_one(results, folder, monkeypatch, pair):
    kind, writer, reader = pair
    path, whole = path_of(writer, kind), results[path_of(writer, kind)]
    if reader in checkpoints.ALONE:
        run = in_this_process(reader, kind, folder, monkeypatch, path)
    else:
        run = results[resumed(*pair)]
    tolerance = 0.0 if reader == writer else 1e-5
    found, saved = (plain(of["state"]["plugin"]) for of in (run, whole))
    found.pop("ranks", None), saved.pop("ranks", None)
    if accumulates(writer) != accumulates(reader):
        for state in (found, saved):
            for name in ("amax_history", "gradient_scale"):  # which then follow the run
                state.pop(name, None)
    assert found == saved
    assert run["state"]["monitor"] == whole["state"]["monitor"]
    assert_equal(from_half(run["losses"]), from_half(whole["losses"]), tolerance)
    assert_equal(run["weights"], whole["weights"], tolerance)


@pytest.mark.fast("fp8: fsdp2", "fp8: fsdp1")
@of_writers(("fp8", "fsdp2"), ("fp8", "tensor parallel"), ("fp8", "fsdp1"), ("fp16", "fsdp2"))
def test_shards_become_a_file_for_one_device(results, folder, monkeypatch, writer):
    kind, strategy = writer
    path, whole = path_of(strategy, kind), results[path_of(strategy, kind)]
    consolidate(folder / path, folder / f"{path}.consolidated")
    run = in_this_process("one", kind, folder, monkeypatch, f"{path}.consolidated")
    assert_equal(from_half(run["losses"]), from_half(whole["losses"]), 1e-5)
    assert_equal(run["weights"], whole["weights"], 1e-5)


@pytest.mark.fast("fp8: fsdp1", "fp8: fsdp2", "fp8: fsdp2 file", "fp8: tensor parallel")
@of_writers(*(("fp8", writer) for writer in ("fsdp1", "fsdp1 file", "fsdp2", "fsdp2 file", "tensor parallel")))
def test_shards_are_restored_without_a_trainer(results, folder, writer):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    paths = [folder / path_of(name, writer[0]) for name in ("one", writer[1])]
    one, found = (restore(checkpoints.Regression(torch.optim.SGD), path) for path in paths)
    assert_equal(found.state_dict(), one.state_dict(), 1e-5)
    assert [layer.casts for layer in found.body[::2]] == [layer.casts for layer in one.body[::2]]
    assert_equal(found(x), one(x), 1e-5)


def meet(folder, fate):
    """How both processes ended, and when: seconds since the first one did."""
    logs = [folder / f"{fate} {rank}.log" for rank in range(RANKS)]
    processes = [
        start(log, "tests.precision.checkpoints.ranks_killed", str(rank), str(folder), fate)
        for rank, log in enumerate(logs)
    ]
    ended = {}
    try:
        limit = time.monotonic() + LIMIT
        while len(ended) < RANKS and time.monotonic() < limit:
            for rank, process in enumerate(processes):
                if rank not in ended and process.exitcode is not None:
                    ended[rank] = time.monotonic()
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert len(ended) == RANKS, f"only the ranks {list(ended)} ended within {LIMIT} s"
    return [(process.exitcode, ended[rank] - min(ended.values())) for rank, process in enumerate(processes)]


@pytest.mark.slow
def test_killed_runs_go_on_as_if_nothing_had_happened(tmp_path):
    """Rank 1 is killed in a step, and then, when both have come back, while it saves."""
    for fate in ranks_killed.DIES:
        (first, seconds), (second, _) = meet(tmp_path, fate)
        told = (tmp_path / f"{fate} 0.log").read_text()
        assert second == -signal.SIGKILL, (tmp_path / f"{fate} 1.log").read_text()[-3000:]
        assert first == 1 and "RuntimeError" in told, told[-3000:]
        assert seconds < ranks_killed.NOTICED + 30, f"rank 0 went on for {seconds:.0f} s"
    left = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert left == ["last.ckpt"], "the rank that lives removes what was half written"
    codes = [code for code, _ in meet(tmp_path, "nothing")]
    assert codes == [0, 0], (tmp_path / "nothing 0.log").read_text()[-3000:]
    for rank in range(RANKS):
        resumed, whole = (
            torch.load(tmp_path / f"{name} {rank}.pt", weights_only=True) for name in ("nothing", "uninterrupted")
        )
        assert (resumed["came from"], whole["came from"]) == (4, 0)
        assert_equal(resumed["weights"], whole["weights"])
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["last.ckpt"]
