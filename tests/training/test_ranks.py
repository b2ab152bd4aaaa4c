"""Several ranks against one: the same curve, the same weights, resumed on any number of them."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import TCPStore
from torch.multiprocessing import start_processes

from dspark.core.errors import ConfigError
from dspark.data.packing import pack, share_of
from dspark.training.ranks import ALONE, Ranks, join, own_device
from dspark.training.schedule import validation_rounds
from dspark.training.state import load_state
from dspark.training.teacher import Traffic
from tests.forked import FORKED
from tests.training.rank_process import (
    HELD_OUT,
    SEQUENCES,
    STEPS,
    Online,
    Run,
    make_trainer,
    one_rank,
    train_alone,
)
from tests.training.tiny import K, tiny_store

CURVE = 1e-5
some_ranks = pytest.mark.slow
"""Waits for three processes that import torch."""
RUNS = [
    Run(name="ddp2", world=2),
    Run(name="fsdp2", world=2, parallel="fsdp"),
    Run(name="ddp3", world=3),
    Run(name="late", world=2, parallel="fsdp", last_rank="slow", options={"max_seconds": 150.0}),
    Run(name="resumed-fsdp3", world=3, parallel="fsdp", folder="late"),
    Run(name="resumed-ddp2", world=2, folder="half-alone"),
    Run(name="interrupted", world=3, last_rank="interrupt"),
    Run(name="nan", world=2, last_rank="nan"),
    Run(name="elsewhere", world=2, folder="late", last_rank="elsewhere"),
    Run(name="taught", world=2, teachers=1),
    Run(name="taught-by-two", world=3, teachers=2),
    Run(name="two-taught", world=3, teachers=1, parallel="fsdp"),
    Run(name="taught-interrupted", world=2, teachers=1, last_rank="interrupt"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all runs, with `NAME-RANK.pt` for what each rank of each had to say."""
    folder = tmp_path_factory.mktemp("ranks")
    store = tiny_store(folder / "features", [*SEQUENCES, *HELD_OUT])
    half = make_trainer(folder / "half-alone", ALONE, store)
    for _ in range(2):
        half.training_step()
    half.save()
    # Where the ranks of each run meet: held here, on ports that the system chooses.
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in RUNS]
    ports = [store.port for store in stores]
    start_processes(one_rank, (RUNS, ports, folder), nprocs=3, start_method=FORKED)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> tuple[list[float], Any, dict[str, torch.Tensor]]:
    store = tiny_store(folder / "features", [*SEQUENCES, *HELD_OUT])
    losses, result = train_alone(folder / "alone", store)
    return losses, result, weights_in(folder / "alone")


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    state = load_state(folder)
    assert state is not None and state.numbers["step"] == STEPS
    return state.tensors


def said(folder: Path, name: str, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / f"{name}-{rank}.pt", weights_only=False)
    return found


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=CURVE, msg=name)


@pytest.mark.parametrize("name", ["ddp2", "fsdp2", "ddp3", "taught", "taught-by-two", "two-taught"])
@some_ranks
def test_the_curve_of_one_process(folder: Path, alone: Any, name: str) -> None:
    losses, result, tensors = alone
    found = said(folder, name)
    assert len(losses) == STEPS and losses[0] > losses[-1] + 0.1
    np.testing.assert_allclose(found["losses"], losses, rtol=0, atol=CURVE)
    assert found["result"].positions == result.positions and found["result"].finished
    for key, value in result.validation.items():
        np.testing.assert_allclose(found["result"].validation[key], value, rtol=0, atol=2e-5)
    assert_close(weights_in(folder / name), tensors)
    # The first rank writes alone: each step is logged once.
    lines = [json.loads(x) for x in (folder / name / "metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines if "loss" in x] == list(range(1, STEPS + 1))
    assert [x["step"] for x in lines if "validation" in x] == [4, STEPS]


@some_ranks
def test_all_drafters_know_the_same(folder: Path) -> None:
    for name, last in (("ddp3", 2), ("fsdp2", 1), ("two-taught", 1)):
        one, other = said(folder, name), said(folder, name, last)
        assert one["losses"] == other["losses"]
        assert one["result"].validation == other["result"].validation
        assert all(
            torch.equal(one["weights"][key], other["weights"][key]) for key in one["weights"]
        )


@some_ranks
def test_taught_is_online_in_one_process(folder: Path, alone: Any, tmp_path: Path) -> None:
    losses, _ = train_alone(tmp_path / "online", Online())
    assert losses == alone[0]  # the store holds the same bfloat16 rows
    np.testing.assert_allclose(said(folder, "taught")["losses"], losses, rtol=0, atol=CURVE)
    assert said(folder, "taught", 1)["read"] > 0
    shared = [said(folder, "taught-by-two", rank)["read"] for rank in (1, 2)]
    assert sum(shared) == said(folder, "taught", 1)["read"] and min(shared) > 0


@some_ranks
def test_time_is_up_for_all_at_once_and_another_world_resumes(folder: Path, alone: Any) -> None:
    """The clock of the last rank alone passes the limit."""
    losses, _, tensors = alone
    stopped = [said(folder, "late", rank) for rank in (0, 1)]
    assert {s["result"].steps for s in stopped} == {2}
    assert not stopped[0]["result"].finished
    np.testing.assert_allclose(stopped[0]["losses"], losses[:2], rtol=0, atol=CURVE)
    resumed = said(folder, "resumed-fsdp3")
    np.testing.assert_allclose(resumed["losses"], losses[2:], rtol=0, atol=CURVE)
    assert_close(weights_in(folder / "late"), tensors)


@some_ranks
def test_one_process_is_resumed_by_two(folder: Path, alone: Any) -> None:
    losses, _, tensors = alone
    np.testing.assert_allclose(
        said(folder, "resumed-ddp2")["losses"], losses[2:], rtol=0, atol=CURVE
    )
    assert_close(weights_in(folder / "half-alone"), tensors)


@some_ranks
def test_two_ranks_are_resumed_by_one_process(folder: Path, alone: Any, tmp_path: Path) -> None:
    state = folder / "interrupted"
    store = tiny_store(tmp_path / "features", [*SEQUENCES, *HELD_OUT])
    losses, result = train_alone(state, store)
    assert result.finished
    np.testing.assert_allclose(losses, alone[0][2:], rtol=0, atol=CURVE)


@some_ranks
def test_ctrl_c_of_one_rank_stops_all_after_the_step(folder: Path) -> None:
    for name, ranks in (("interrupted", (0, 1, 2)), ("taught-interrupted", (0,))):
        for rank in ranks:
            assert said(folder, name, rank) == {"error": "KeyboardInterrupt: "}
    state = load_state(folder / "taught-interrupted")
    assert state is not None and state.numbers["step"] == 2


@some_ranks
def test_not_a_number_on_one_rank_stops_all(folder: Path) -> None:
    errors = [said(folder, "nan", rank)["error"] for rank in (0, 1)]
    assert re.match(r"DSparkError: step 2: the loss is .*bad-batch-2-rank-0", errors[0])
    assert re.match(r"DSparkError: step 2: the loss is nan.*bad-batch-2-rank-1", errors[1])
    assert len(list((folder / "nan").glob("bad-batch-2-rank-*"))) == 2


@some_ranks
def test_ranks_that_see_different_folders_are_refused(folder: Path) -> None:
    for rank in (0, 1):
        assert (
            "DataError: the ranks do not have the same state"
            in said(folder, "elsewhere", rank)["error"]
        )


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 6, 12])
def test_shares_are_the_batch(parts: int) -> None:
    """Boundaries inside a sequence included: its blocks see no less in either share."""
    whole = pack(SEQUENCES, [(3, np.arange(1, 6)), (0, np.arange(2, 4)), (3, np.arange(2, 7))], K)
    shares = [share_of(whole, part, parts) for part in range(parts)]
    for name in ("anchor_positions_A", "previous_AK", "labels_AK", "supervised_AK"):
        joined = np.concatenate([getattr(share, name) for share in shares])
        assert np.array_equal(joined, getattr(whole, name))
    per_block = [
        int(share.sequences_S[s])
        for share in shares
        for s, blocks in enumerate(np.diff(share.anchor_starts))
        for _ in range(blocks)
    ]
    assert per_block == [3] * 5 + [0] * 2 + [3] * 5
    for share in shares:
        lengths = np.diff(share.context_starts)
        ranges = share.context_ranges_A2
        assert np.array_equal(ranges[:, 1] - ranges[:, 0], share.anchor_positions_A)
        assert (np.diff(share.anchor_starts) > 0).all() and ranges.max() <= lengths.sum()


def test_every_validation_batch_is_counted_once() -> None:
    for batches in range(8):
        for drafters in (1, 2, 3):
            rounds = validation_rounds(batches, drafters)
            assert all(len(taken) == drafters for taken in rounds)
            counted = [
                index
                for taken in rounds
                for rank, index in enumerate(taken)
                if index not in taken[:rank]
            ]
            assert counted == list(range(batches))


def test_what_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="12 blocks of a step cannot be shared equally by 5"):
        make_trainer(tmp_path, Ranks(drafters=5), None)
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node 2"), join(teachers=1):
        pass
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    for teachers in (-1, 2, 3):
        with (
            pytest.raises(ConfigError, match=f"{teachers} teacher ranks of 2: .*must train"),
            join(teachers=teachers),
        ):
            pass


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As torchrun says it to the second of two processes on one machine."""
    for name, value in (("RANK", 1), ("WORLD_SIZE", 2), ("LOCAL_RANK", 1), ("LOCAL_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    return monkeypatch


def test_each_process_has_a_gpu_of_its_own(second_of_two: pytest.MonkeyPatch) -> None:
    assert own_device("cuda") == "cuda:1" and own_device("cpu") == "cpu"
    with pytest.raises(ConfigError, match="'cuda:0' is one GPU, and torchrun started 2 processes"):
        own_device("cuda:0")
    second_of_two.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"2 processes .* finds 1 GPUs.*--nproc-per-node 1"):
        own_device("cuda")
    second_of_two.setenv("LOCAL_WORLD_SIZE", "1")  # a process a machine, which may choose
    assert own_device("cuda:3") == "cuda:3"


def test_gradients_go_from_gpu_to_gpu_and_decisions_over_the_host(
    second_of_two: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []
    second_of_two.setattr("torch.cuda.set_device", told.append)
    second_of_two.setattr("torch.distributed.is_nccl_available", lambda: True)
    for name in ("init_process_group", "new_group"):
        second_of_two.setattr(
            f"torch.distributed.{name}", lambda *args, **options: told.append((args, options))
        )
    second_of_two.setattr("torch.distributed.destroy_process_group", lambda: None)
    with join(device="cuda", teachers=1) as ranks:
        assert ranks.device == "cuda:1" and ranks.is_teacher
    device, ((backend,), _), (_, options) = told
    assert device == "cuda:1" and backend == options["backend"] == "cpu:gloo,cuda:nccl"
    second_of_two.setattr("torch.distributed.is_nccl_available", lambda: False)
    with pytest.raises(ConfigError, match="built without NCCL"), join(device="cuda"):
        pass


def test_traffic() -> None:
    """Five taps of SmolLM2's 576 and its vocabulary of 49,152."""
    traffic = Traffic.of(features=5 * 576, hidden_size=576, vocab_size=49152)
    assert (traffic.context_token, traffic.state, traffic.logits) == (5760, 1152, 98304)
    assert "98,304 (85 times as many)" in str(traffic)
