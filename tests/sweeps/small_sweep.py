"""A sweep of many small groups, asked for from several processes: `python small_sweep.py STORE NUM_GROUPS`."""

import sys

import noisecast as nc
from noisecast.question import Question
from noisecast.sweeps import run_sweep


def questions(num_groups: int, **seeds) -> list[Question]:
    """One group for each number of steps: groups share a compiled call, and that has a length."""
    problem = nc.quadratic([2.0, 1.0, 0.5], initial_params=0.1, example_noise_std=0.1)
    mechanism = nc.SampledGaussian(noise_multiplier=1.0, l2_clip_norm=5.0, sampler=nc.Stream(batch_size=16))
    optimizers = [nc.DPSGD(learning_rate=0.01), nc.DPSGD(learning_rate=0.02)]
    asked = []
    for number in range(num_groups):
        scenarios = tuple(
            nc.Scenario(problem=problem, mechanism=mechanism, optimizer=optimizer, num_steps=20_000 + number)
            for optimizer in optimizers
        )
        asked.append(Question(scenarios=scenarios, runners=(nc.Training(),), record_at=(0, 10_000), **seeds))
    return asked


if __name__ == "__main__":
    run_sweep(questions(int(sys.argv[2]), insecure_seeds=(0, 1)), sys.argv[1], workers=2)
