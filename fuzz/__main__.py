"""`python -m fuzz TARGET... [--seconds 60] [--findings FOLDER]`: fuzz readers, print what was found.

With atheris installed executions are guided by the coverage of noisecast's own code; without, by mutation alone. Each
kind of finding is kept once, with its traceback and the file that makes it, in the folder of findings. The memory of
the process is limited, so that a file that makes a reader ask for more is a finding (MemoryError), not a dead machine.
"""

import argparse
import faulthandler
import hashlib
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

from fuzz.mutate import mutated

MOST_MEMORY = 3 * 2**30  # address space above what the imports took
MOST_SECONDS = 10  # for one file, of the process's own time


class Hang(Exception):
    """A reader took longer than it may."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help="all if none is named")
    parser.add_argument("--seconds", type=float, default=60.0, help="of processor time, for each target")
    parser.add_argument("--findings", type=Path, default=Path("findings"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        import atheris
    except ImportError:
        atheris = None
    if atheris is not None:
        with atheris.instrument_imports(include=["noisecast"]):
            from fuzz.targets import TARGETS
    else:
        from fuzz.targets import TARGETS
    unknown = set(arguments.targets) - TARGETS.keys()
    if unknown:
        parser.error(f"Expected targets among {', '.join(TARGETS)}, got {', '.join(sorted(unknown))}.")
    warnings.simplefilter("ignore")
    faulthandler.enable()
    found = 0
    names = arguments.targets or list(TARGETS)
    if atheris is not None and len(names) > 1:
        parser.error("With atheris one target at a time: it ends the process when it is done.")
    for name in names:
        watch = Watch(name, TARGETS[name], arguments.findings / name)
        if atheris is None:
            rng, until = random.Random(arguments.seed), time.process_time() + arguments.seconds
            for content in watch.seeds:
                watch.one(content)
            while time.process_time() < until:
                watch.one(mutated(rng, watch.seeds, watch.target.words))
            watch.report()
        else:
            guided(atheris, watch, arguments.seconds, arguments.seed)
        found += len(watch.findings)
    return 1 if found else 0


class Watch:
    """One target under fuzzing: what came of each execution."""

    def __init__(self, name, target, findings: Path):
        self.name, self.target, self.folder = name, target, findings
        self.seeds = list(target.seeds())
        self.findings: dict[str, str] = {}
        self.counts = {"result": 0, "refused": 0, "found": 0}
        self.slowest, self.began = 0.0, time.process_time()
        self.where = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        for content in self.seeds:
            target.run(content, self.where)  # imports and compiles; a seed that fails is our own mistake
        signal.signal(signal.SIGVTALRM, _hang)
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MOST_MEMORY, resource.RLIM_INFINITY))

    def one(self, content: bytes) -> None:
        began = time.process_time()
        signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
        try:
            self.counts[self.target.run(content, self.where)] += 1
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.counts["found"] += 1
            self.keep(error, content)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        self.slowest = max(self.slowest, time.process_time() - began)

    def keep(self, error: BaseException, content: bytes) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "/noisecast/" in frame.filename] or list(frames)
        key = f"{type(error).__name__} at {Path(ours[-1].filename).name}:{ours[-1].lineno}"
        if key in self.findings:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / hashlib.sha256(content).hexdigest()[:16]
        file.write_bytes(content)
        file.with_suffix(".txt").write_text("".join(traceback.format_exception(error)))
        self.findings[key] = f"{str(error)[:200]!r} ({file})"
        print(f"{self.name}: FOUND {key}: {self.findings[key]}", flush=True)

    def report(self) -> None:
        seconds = time.process_time() - self.began
        print(
            f"{self.name}: {sum(self.counts.values())} executions in {seconds:.0f} s of processor time, "
            f"{self.counts['result']} results, {self.counts['refused']} refusals, {len(self.findings)} kinds of "
            f"findings; slowest {self.slowest:.2f} s",
            flush=True,
        )
        shutil.rmtree(self.where, ignore_errors=True)


def guided(atheris, watch: Watch, seconds: float, seed: int) -> None:
    corpus = Path(tempfile.mkdtemp())
    for number, content in enumerate(watch.seeds):
        (corpus / str(number)).write_bytes(content)
    rng, until = random.Random(seed), time.process_time() + seconds

    def mutate(data: bytes, most: int, _: int) -> bytes:
        # Half by the engine, half by ours, whose words are the formats'.
        if rng.random() < 0.5:
            return atheris.Mutate(data, most)
        return mutated(rng, [data, *watch.seeds] if data else watch.seeds, watch.target.words)[:most]

    def test_one(data: bytes) -> None:
        if time.process_time() > until:
            watch.report()
            os._exit(1 if watch.findings else 0)  # the engine has no other end
        watch.one(data)

    options = [f"-seed={seed + 1}", "-max_len=20000", "-rss_limit_mb=0", "-timeout=120", "-verbosity=0"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], test_one, custom_mutator=mutate)
    atheris.Fuzz()


def _hang(*_: object) -> None:
    raise Hang(f"more than {MOST_SECONDS} s of processor time")


if __name__ == "__main__":
    sys.exit(main())
