"""One of torchrun's processes in several runs of `dspark`, one after the other: importing torch is
what takes long.

    torchrun ... -m -- tests.cli.rank_runs train ARGS... --then 2 train ARGS...

The first run is as torchrun has it; a further one is that of so many ranks. They meet in a store of
its own, whose port the system chooses and torchrun's store tells.
"""

import os
import runpy
import sys

HERE = "127.0.0.1"


def main() -> None:
    runs: list[list[str]] = [[]]
    for word in sys.argv[1:]:
        if word == "--then":
            runs.append([])
        else:
            runs[-1].append(word)
    dspark(runs[0])
    from torch.distributed import TCPStore  # it is not the first to import torch

    rank = int(os.environ["RANK"])
    notes = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    stores = []
    for number, (world, *args) in enumerate(runs[1:]):
        if rank >= int(world):
            continue
        if rank == 0:
            stores.append(TCPStore(HERE, 0, is_master=True, wait_for_workers=False))
            notes.set(f"port of {number}", str(stores[-1].port))
        port = notes.get(f"port of {number}").decode()  # waits for it
        os.environ.update(WORLD_SIZE=world, MASTER_ADDR=HERE, MASTER_PORT=port)
        dspark(args)


def dspark(args: list[str]) -> None:
    sys.argv = ["dspark", *args]
    try:
        runpy.run_module("dspark", run_name="__main__")
    except SystemExit as done:
        if done.code:
            raise


if __name__ == "__main__":
    main()
