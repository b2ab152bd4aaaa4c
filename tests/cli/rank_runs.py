"""One of torchrun's processes in several runs of `dspark`, one after the other: importing torch is
what takes long.

    torchrun ... -m -- tests.cli.rank_runs train ARGS... --then 2 PORT train ARGS...

The first run is as torchrun has it; a further one is that of so many ranks, with a port of its own.
"""

import os
import runpy
import sys


def main() -> None:
    runs = [[]]
    for word in sys.argv[1:]:
        if word == "--then":
            runs.append([])
        else:
            runs[-1].append(word)
    dspark(runs[0])
    for world, port, *args in runs[1:]:
        if int(os.environ["RANK"]) < int(world):
            os.environ.update(
                WORLD_SIZE=world, MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="False"
            )
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
