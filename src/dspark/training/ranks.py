"""The processes of one run: who they are, and what they agree on.

torchrun starts them and torch.distributed does the work: DDP or FSDP2 between drafter ranks, which
train, and messages from teacher ranks, which run the target (paper, section 5.1). Rank 0 drafts; it
alone writes files. One process on its own is the same code, where every question is its own answer.

On GPUs every process has one of its own. Gradients and sums of metrics then go from device to
device (NCCL); whatever is decided is decided on the host, and goes the way it goes without a GPU
(gloo): no step waits for a device because of it. So do the rows of teachers, which any drafter can
take, whatever it computes on.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dspark.core.errors import ConfigError, DataError, DSparkError
from dspark.data.packing import Cursor, PackedBlocks, share_of
from dspark.drafters.backbone import Backbone
from dspark.drafters.model import DraftModel
from dspark.training.objective import Ratio

Parallel = Literal["ddp", "fsdp"]

# Others wait for rank 0 to generate and to read features. A rank that died is torchrun's to notice.
_PATIENCE = timedelta(days=30)
# What gloo and NCCL say of it.
_RANK_IS_GONE = ("gloo/transport", "ncclRemoteError")


class Command(IntEnum):
    """What rank 0 tells the teachers to send next."""

    END = 0
    STEP = 1
    VALIDATION = 2


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks 0 .. drafters - 1 train, the others teach."""

    rank: int = 0
    drafters: int = 1
    teachers: int = 0
    parallel: Parallel = "ddp"
    group: Any = None
    """torch's process group of the drafters; None for a process on its own."""
    device: str = "cpu"
    """What this process computes on."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_teacher(self) -> bool:
        return self.rank >= self.drafters

    @property
    def alone(self) -> bool:
        return self.drafters + self.teachers == 1

    def __str__(self) -> str:
        how = {"ddp": "DDP", "fsdp": "FSDP2"}[self.parallel]
        training = "1 rank trains" if self.drafters == 1 else f"{self.drafters} ranks train ({how})"
        return training + (f", {self.teachers} run the target" if self.teachers else "")

    def check_divides(self, anchors_per_step: int) -> None:
        """ConfigError unless every drafter rank gets the same number of blocks."""
        if anchors_per_step % self.drafters:
            raise ConfigError(
                f"the {anchors_per_step} blocks of a step cannot be shared equally by "
                f"{self.drafters} training ranks; start a number of them that divides "
                f"{anchors_per_step}"
            )

    def check_same(self, number: int, what: str, *, teachers: bool = False) -> None:
        """DataError unless all drafters (with `teachers`, all ranks) pass the same number."""
        if self.alone or (self.drafters == 1 and not teachers):
            return
        found = torch.tensor([number, -number])
        dist.all_reduce(found, dist.ReduceOp.MAX, group=None if teachers else self.group)
        if found[0] != -found[1]:
            raise DataError(
                f"the ranks do not have the same {what}; give all of them the same files, and a "
                f"run folder on a file system that they share"
            )

    def wait(self) -> None:
        """For all ranks."""
        if not self.alone:
            dist.barrier()

    @contextmanager
    def first(self) -> Iterator[None]:
        """The first rank goes through the body alone, then the others: they find its work done."""
        if not self.is_first:
            self.wait()
        yield
        if self.is_first:  # if it failed, nobody follows, and torchrun ends them all
            self.wait()

    def share(self, packed: PackedBlocks, rank: int | None = None) -> PackedBlocks:
        """The blocks of a step that a drafter (default: this one) trains on."""
        if self.drafters == 1:
            return packed
        return share_of(packed, self.rank if rank is None else rank, self.drafters)

    def wrap(self, loss: nn.Module, model: DraftModel) -> nn.Module:
        """The module whose backward adds gradients up over drafters, as their mean."""
        if self.drafters == 1:
            return loss
        if self.parallel == "ddp":
            return nn.parallel.DistributedDataParallel(loss, process_group=self.group)
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh.from_group(self.group, next(model.parameters()).device.type)
        # The layers of a chain are not called as modules: they are gathered with the rest.
        for layer in model.layers if isinstance(model, Backbone) else ():
            fully_shard(layer, mesh=mesh)
        fully_shard(loss, mesh=mesh)
        return loss

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag whether any drafter has it."""
        if self.drafters == 1:
            return flags
        found = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return tuple(bool(flag) for flag in found)

    def add(self, ratios: dict[str, Ratio]) -> dict[str, Ratio]:
        """The sums over drafters, each of which has the same names."""
        if self.drafters == 1 or not ratios:
            return ratios
        parts = [part for ratio in ratios.values() for part in (ratio.numerator, ratio.denominator)]
        flat = torch.cat([part.double().flatten() for part in parts])
        dist.all_reduce(flat, group=self.group)
        pieces = flat.split([part.numel() for part in parts])
        sums = [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
        return {
            name: Ratio(numerator, denominator)
            for name, numerator, denominator in zip(ratios, sums[::2], sums[1::2], strict=True)
        }

    def tell(self, command: Command, cursor: Cursor | None = None) -> None:
        """Drafters: what the teachers have to send next. Rank 0's word counts."""
        if self.teachers:
            at = cursor or Cursor()
            dist.broadcast(torch.tensor([command, at.epoch, at.index]), src=0)

    def listen(self) -> tuple[Command, Cursor]:
        """Teachers: the next command."""
        told = torch.empty(3, dtype=torch.int64)
        dist.broadcast(told, src=0)
        command, epoch, index = told.tolist()
        return Command(command), Cursor(epoch, index)

    @contextmanager
    def teaching(self) -> Iterator[None]:
        """Sends the teachers home at the end, also where drafters stop together early."""
        try:
            yield
        except (KeyboardInterrupt, DSparkError):
            self.tell(Command.END)
            raise
        self.tell(Command.END)


ALONE = Ranks()


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor of which FSDP2 keeps a part on each rank; all of them must ask."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor, cut as the parameter is, and where that is."""
    tensor = tensor.to(parameter.device)
    if not hasattr(parameter, "placements"):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(parameter, DTensor)
    if tensor.shape != parameter.shape:
        return tensor  # the count of steps
    return distribute_tensor(
        tensor, parameter.device_mesh, parameter.placements, src_data_rank=None
    )


def own_device(device: str) -> str:
    """The device of this process among those that torchrun started on this machine: of "cuda" each
    takes the GPU of its number.

    Raises ConfigError where there are too few, or one is named for several processes.
    """
    local, here = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if device == "cpu" or (here == 1 and device != "cuda"):
        return device
    if device != "cuda":
        raise ConfigError(
            f"device {device!r} is one GPU, and torchrun started {here} processes on this machine; "
            f"use cuda, of which each takes its own"
        )
    if here > (found := torch.cuda.device_count()):
        raise ConfigError(
            f"torchrun started {here} processes on this machine, and torch finds {found} GPUs; "
            f"each needs its own: start {found} (--nproc-per-node {found})"
        )
    return f"cuda:{local}"


@contextmanager
def join(*, teachers: int = 0, parallel: Parallel = "ddp", device: str = "cpu") -> Iterator[Ranks]:
    """This process among those that torchrun started; on its own where it was not torchrun.

    Raises ConfigError where that cannot be: teachers without torchrun, none left to train, or a
    `device` that not every process can have (`own_device`); and DSparkError in place of what the
    transport says of a rank that is gone.
    """
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if not 0 <= teachers < max(world, 2):
        raise ConfigError(
            f"{teachers} teacher ranks of {world}: at least one rank must train; start more with "
            f"torchrun --nproc-per-node"
        )
    if teachers and world == 1:
        raise ConfigError(
            "teacher ranks are processes of their own; start at least two: "
            "torchrun --nproc-per-node 2 -m -- dspark train ..."
        )
    if world == 1:
        yield Ranks(device=device)
        return
    if not dist.is_available():
        raise ConfigError("this torch was built without torch.distributed; start one process")
    device = own_device(device)
    backend = "gloo"
    if device != "cpu":
        if not dist.is_nccl_available():
            raise ConfigError("this torch was built without NCCL; start one process, or use cpu")
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"  # which of the two is where a tensor lies
    dist.init_process_group(backend, timeout=_PATIENCE)
    try:
        drafters = world - teachers
        group = dist.new_group(range(drafters), timeout=_PATIENCE, backend=backend)
        yield Ranks(rank, drafters, teachers, parallel, group, device)
    except RuntimeError as error:
        if not any(sign in str(error) for sign in _RANK_IS_GONE):
            raise
        raise DSparkError(
            "another rank is gone, and with it this run; its error says why"
        ) from error
    finally:
        dist.destroy_process_group()
