"""Training on until means are known: how much of it is done."""

import itertools

import numpy as np

from noisecast import DPSGD, Moments, SampledGaussian, Scenario, Stream, answer, quadratic
from noisecast.cli.trained import trained_on
from noisecast.runners import Training


def test_the_share_done_rises_to_the_whole():
    problem = quadratic(np.ones(2), 1.0, example_noise_std=0.1)
    cells = [
        Scenario(
            problem=problem,
            mechanism=SampledGaussian(noise_multiplier=noise, l2_clip_norm=1.0, sampler=Stream(4)),
            optimizer=DPSGD(learning_rate=0.3),
            num_steps=40,
        )
        for noise in (0.01, 1.0, 4.0)
    ]
    table = answer(cells, runners=[Training(), Moments()], num_seeds=4, record_at=[40])
    shares: list[float] = []
    rounds = list(trained_on(cells, table, 0.02, 4, 64, [40], shares.append))
    assert len(rounds) == 1 + 4 and shares[-1] == 1
    # Of a cell that lacks seeds after all it is more than was thought, so that a round may begin lower than one ended.
    falls = sum(later < earlier for earlier, later in itertools.pairwise(shares))
    assert 0 < shares[0] < 0.5 and falls <= len(rounds) - 1
