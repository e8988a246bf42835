"""A sweep of many tiny scenarios, one in twenty of which diverges, and what it took: `... NUM_SCENARIOS STORE`."""

import json
import sys
import time
from pathlib import Path

import numpy as np

import noisecast as nc
from noisecast.sweeps import run_sweep


def peak_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def main(num_scenarios: int, store: str) -> None:
    problem = nc.quadratic([2.0, 1.0], initial_params=0.1, example_noise_std=0.1)
    mechanism = nc.SampledGaussian(noise_multiplier=1.0, l2_clip_norm=1e15, sampler=nc.Stream(batch_size=4))
    # The 20th of each twenty steps so far that it leaves the numbers within a few steps.
    rates = [1e15 if i % 20 == 19 else 1e-3 * (1 + i / num_scenarios) for i in range(num_scenarios)]
    rates = [rate * (1 + 1e-7 * i) for i, rate in enumerate(rates)]
    scenarios = tuple(
        nc.Scenario(problem=problem, mechanism=mechanism, optimizer=nc.DPSGD(learning_rate=rate), num_steps=20)
        for rate in rates
    )
    question = nc.Question(scenarios=scenarios, runners=(nc.Training(),), record_at=(0,), num_seeds=1)
    before, began = peak_mib(), time.monotonic()
    table = run_sweep([question], store, workers=0)
    seconds = time.monotonic() - began
    last = table[(table["metric"] == "loss") & (table["step"] == 20)]
    found = {
        "scenarios": len(last),
        "diverged": int((last["status"] == "diverged").sum()),
        "seconds": round(seconds, 2),
        "processor_seconds": round(time.process_time(), 2),
        "mib_before": round(before),
        "mib": round(peak_mib()),
        "finite": int(np.isfinite(last["value"]).sum()),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
