"""Every benchmark in turn; what ``make bench`` calls.

    python bench/all.py [--quick] [--only NAME ...]

Prints each table as it comes and writes the figures to ``bench/results/NAME.json``, or with
``--quick`` (CI: does it run, are verdicts right; figures of a busy machine) to
``bench/results/quick/``. Goes on after a failure and says at the end what failed. Nothing else
should run on the machine: about 35 minutes on 2 cores, some with ``--quick``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

BENCH = Path(__file__).parent

SCRIPTS: dict[str, tuple[str, ...]] = {
    "encode": ("--pairs", "3"),
    "gil": ("--rounds", "2"),
    "record": ("--quick",),
    "cycle": ("--quick",),
    "wire": ("--quick",),
    "sketch": ("--quick",),
    "memory": ("--quick",),
    "detect_scale": ("--quick",),
    "overhead": ("--quick",),
    "verdicts": ("--quick",),
    "robustness": ("--quick",),
}
"""In order of how long they take, and what makes each quick."""


def main() -> None:
    """Run them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, for CI")
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, help="some of them")
    options = parser.parse_args()
    folder = BENCH / "results" / ("quick" if options.quick else "")
    failed = []
    for name in options.only or SCRIPTS:
        print(f"\n=== {name}\n", flush=True)
        began_s = time.monotonic()
        done = subprocess.run(
            [
                sys.executable,
                str(BENCH / f"{name}.py"),
                *(SCRIPTS[name] if options.quick else ()),
                "--out",
                str(folder / f"{name}.json"),
            ],
            check=False,
        )
        print(f"\n({name}: {time.monotonic() - began_s:.0f} s)", flush=True)
        if done.returncode:
            failed.append(name)
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
        sys.exit(1)


if __name__ == "__main__":
    main()
