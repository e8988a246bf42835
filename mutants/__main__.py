"""`python -m mutants`: the matrix of planted bugs and checks; ends with 1 if a bug survives or a clean check fails."""

import argparse
import sys

from mutants.bugs import BUGS, Bug
from mutants.run import BROKE, CAUGHT, PASSED, Job, Outcome, check_texts, run_all

FLAKE_BUDGET = (
    "Flake budget: each p-value of a check is compared with 1e-6, and one run of the checks makes fewer than 100 of\n"
    "them, so correct code fails one run in more than 10,000, and twenty runs with less than 0.2 %."
)


def main() -> int:
    """Returns: the exit status."""
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__)
    parser.add_argument("--clean-runs", type=int, metavar="N", help="the clean build alone, with N different seeds")
    parser.add_argument("--named", action="store_true", help="of each bug only the checks that must see it: quicker")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--bug", help="only bugs with this in their name")
    options = parser.parse_args()
    check_texts()
    if options.clean_runs:
        return _clean_runs(options.clean_runs, options.workers)
    bugs = [bug for bug in BUGS if not options.bug or options.bug in bug.name]
    jobs = [Job(), *(Job(bug, checks=bug.seen_by if options.named else ()) for bug in bugs)]
    outcomes = run_all(jobs, workers=options.workers, tell=_tell)
    return _judge(bugs, outcomes[0], outcomes[1:])


def _clean_runs(count: int, workers: int) -> int:
    outcomes = run_all([Job(seed=seed) for seed in range(1, count + 1)], workers=workers, tell=_tell)
    failures = sum(_fails(outcome) for outcome in outcomes)
    print(f"\nClean build: {count - failures} of {count} runs with different seeds passed every check.\n{FLAKE_BUDGET}")
    return 1 if failures else 0


def _tell(job: Job, outcome: Outcome) -> None:
    name = job.bug.name if job.bug is not None else "clean" + (f", seed {job.seed}" if job.seed is not None else "")
    told = {CAUGHT: "", BROKE: " (broke)"}
    failed = [check.removeprefix("test_") + told[found] for check, found in outcome.checks.items() if found in told]
    found = outcome.trouble or ", ".join(failed) or "every check passed"
    print(f"{outcome.seconds:6.0f} s  {name}: {found}", flush=True)


def _fails(clean: Outcome) -> bool:
    return clean.trouble is not None or set(clean.checks.values()) != {PASSED}


def _judge(bugs: list[Bug], clean: Outcome, outcomes: list[Outcome]) -> int:
    checks = list(clean.checks)
    print("\nChecks:")
    for number, check in enumerate(checks, start=1):
        print(f"  {number:2d}  {check.removeprefix('test_').replace('_', ' ')}")
    width = max(map(len, [bug.name for bug in bugs] + ["clean build"]))
    print("\n" + " " * width + "".join(f"{number:4d}" for number in range(1, len(checks) + 1)))
    for name, outcome in zip(["clean build", *(bug.name for bug in bugs)], [clean, *outcomes]):
        cells = "".join(f"   {_SIGNS[outcome.checks.get(check)]}" for check in checks)
        print(f"{name:{width}}{cells if outcome.trouble is None else '   did not run'}")
    print(
        "\nX: what the check asserts failed, so the bug is caught.   !: it ended in another error: not counted.\n"
        ".: it passed.   blank: not run.\n" + FLAKE_BUDGET
    )
    if _fails(clean):
        print("The clean build fails a check: mend it first.")
        return 1
    # By the checks that were named for it: one that fails for another reason has seen something else.
    missed = [
        f"{bug.name} ({check})"
        for bug, outcome in zip(bugs, outcomes)
        for check in bug.seen_by
        if outcome.checks.get(check) != CAUGHT
    ]
    survivors = [bug for bug, outcome in zip(bugs, outcomes) if CAUGHT not in outcome.checks.values()]
    print(f"{len(bugs) - len(survivors)} of {len(bugs)} bugs caught.")
    if missed:
        print(f"Not seen by a check that must see it: {'; '.join(missed)}.")
    return 1 if missed or survivors else 0


_SIGNS = {CAUGHT: "X", BROKE: "!", PASSED: ".", None: " "}


if __name__ == "__main__":
    sys.exit(main())
