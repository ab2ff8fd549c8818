"""`make fuzz SECONDS=600`: random cases, every target in turn. What fails is printed with the line that replays it."""

import argparse
import logging
import secrets
import time
import traceback

from fuzz.targets import TARGETS, play

CASES_IN_TURN = {"relay": 10}
"""How many cases of a target come in its turn; the parsers are quick."""

MAX_FAILURES = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--target", choices=TARGETS, help="only this one")
    parser.add_argument("--seed", type=int, help="play this case only")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # failed requests are what this is about
    targets = [options.target] if options.target else list(TARGETS)
    if options.seed is not None:
        for target in targets:
            play(target, options.seed)
        return
    ends_at = time.monotonic() + options.seconds
    cases, failures = dict.fromkeys(targets, 0), 0
    while time.monotonic() < ends_at and failures < MAX_FAILURES:
        for target in targets:
            for _ in range(CASES_IN_TURN.get(target, 500)):
                seed = secrets.randbits(48)
                cases[target] += 1
                try:
                    play(target, seed)
                except Exception:
                    failures += 1
                    traceback.print_exc()
                    again = f"--target {target} --seed {seed}"
                    print(f"replay: PYTHONPATH=tests .venv/bin/python -m fuzz {again}", flush=True)
    print(", ".join(f"{number:,} of {target}" for target, number in cases.items()), f"- {failures} failed")
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
