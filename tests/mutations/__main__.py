"""The command line of `tests.mutations`, which that module describes."""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutations import MUTATIONS, ROOT, Copy, catch, changed, source
from tests.mutations.drawn import draw
from tests.mutations.executed import Executed, record

RECORD = ROOT / "build/mutations"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations")
    parser.add_argument(
        "numbers", nargs="*", type=int, help="the mistakes to make, from 1 on; all by default"
    )
    parser.add_argument("--record", action="store_true", help="run both tiers to learn what they execute")
    parser.add_argument("--listed", action="store_true", help="make the mistakes that are written down")
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument("--count", type=int, default=150, help="how many mistakes to draw")
    parser.add_argument("--out", type=Path, help="what caught each, as JSON; what it has is not tried again")
    given = parser.parse_args()
    if given.record:
        record(ROOT, RECORD)
        return 0
    missed = check_listed(given.numbers) if given.listed else check_drawn(given)
    return int(missed > 0)


def check_listed(numbers: Sequence[int]) -> int:
    """Make listed mistakes, and return how many the first tier misses; the likeliest tests run first."""
    missed, known = 0, set[tuple[str, ...]]()
    numbers = numbers or range(1, len(MUTATIONS) + 1)
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        for number in numbers:
            mutation, begin = MUTATIONS[number - 1], time.monotonic()
            content = changed(mutation, source(mutation).read_text()).encode()
            for tests in (mutation.tests, ("-n", "auto", "--dist", "loadgroup")):
                arguments = ["-m", "not thorough", *tests]
                # tests that fail without a mistake would catch every one
                if tests not in known and (failed := copy.first_failure(arguments, fresh=False)):
                    raise RuntimeError(f"{failed} fails without a mutation")
                known.add(tests)
                with copy.changed(mutation.file, content):
                    if caught_by := copy.first_failure(arguments, fresh=True):
                        break
            missed += not caught_by
            seconds = time.monotonic() - begin
            print(f"{number:2} {mutation.breaks}: {caught_by or 'NOT CAUGHT'} ({seconds:.0f} s)", flush=True)
    print(f"{len(numbers) - missed} of {len(numbers)} caught")
    return missed


def check_drawn(given: argparse.Namespace) -> int:
    """Make drawn mistakes, and return how many neither tier notices."""
    drawn = draw(ROOT, Executed(ROOT, RECORD), seed=given.seed, count=given.count)
    found = json.loads(given.out.read_text()) if given.out is not None and given.out.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        for number in given.numbers or range(1, given.count + 1):
            mistake, tests = drawn[number - 1]
            if str(mistake) in found:
                continue
            begin = time.monotonic()
            content = mistake.applied((ROOT / "src/linrec" / mistake.file).read_bytes())
            caught = catch(copy, mistake.file, content, tests)
            found[str(mistake)] = None if caught is None else f"{caught.run}: {caught.name}"
            seconds = time.monotonic() - begin
            print(
                f"{number:3} {mistake}\n    {found[str(mistake)] or 'NOT CAUGHT'} ({seconds:.0f} s)",
                flush=True,
            )
            if given.out is not None:
                given.out.write_text(json.dumps(found, indent=1) + "\n")
    missed = sum(test is None for test in found.values())
    print(f"{len(found) - missed} of {len(found)} caught")
    return missed


if __name__ == "__main__":
    sys.exit(main())
