"""`make simulate-ha SEEDS=1000 [FROM=0]`: runs seeds, shows progress, and prints the trace of the first that fails."""

import sys
import time

from replicas.simulated.world import BrokenPromise, World


def main(arguments: list[str]) -> int:
    count = int(arguments[0]) if arguments else 100
    first = int(arguments[1]) if len(arguments) > 1 else 0
    began = time.monotonic()
    failed: list[int] = []
    submitted = steps = epochs = 0
    for seed in range(first, first + count):
        world = World(seed)
        try:
            world.run()
        except BrokenPromise as broken:
            failed.append(seed)
            print(f"\nseed {seed}: {broken}\n  replay: make simulate-ha SEEDS=1 FROM={seed} TRACE=400")
            if len(arguments) > 2:
                print("\n".join(list(world.trace)[-int(arguments[2]) :]))
        submitted, steps, epochs = submitted + world.submitted, steps + world.steps, epochs + world.epochs
        done = seed - first + 1
        if done % 10 == 0 or done == count:
            print(
                f"\r{done} of {count} seeds, {len(failed)} failed; {submitted:,} requests, {steps:,} steps,"
                f" {epochs:,} owners, {time.monotonic() - began:.0f} s",
                end="",
                flush=True,
            )
    print()
    if failed:
        print(f"failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
