"""What Python prints of an object goes into logs and notebooks: no row of the data may stand there."""

import numpy as np
import pytest
import scipy.sparse

import noisecast as nc
from noisecast.problems.datasets import Dataset, Ratings

SECRET = 0.62518  # of every row


def dense() -> Dataset:
    return Dataset("toy", np.full((8, 2), SECRET, np.float32), np.arange(8) % 2, ("no", "yes"))


def sparse() -> Dataset:
    return Dataset("toy", scipy.sparse.csr_array(np.full((8, 2), SECRET, np.float32)), np.arange(8) % 2, ("no", "yes"))


def ratings() -> Ratings:
    return Ratings(np.arange(4), np.arange(4), np.full(4, SECRET, np.float32), 4, 4)


def scenario(problem) -> nc.Scenario:
    mechanism = nc.SampledGaussian(noise_multiplier=1.0, l2_clip_norm=1.0, sampler=nc.Poisson(0.5, 8))
    return nc.Scenario(problem=problem, mechanism=mechanism, optimizer=nc.DPSGD(learning_rate=0.1), num_steps=2)


def problem_of(data):
    if not isinstance(data, Ratings):
        return nc.linear_model(data, data)
    return nc.matrix_factorization(data, data, dim=2, public_init_seed=0, rating_scale=(0.0, 1.0))


@pytest.mark.parametrize("data", [dense, sparse, ratings])
def test_no_row_is_printed(data):
    data = data()
    problem = problem_of(data)
    asked = scenario(problem)
    for each in (data, problem, problem.train, asked, nc.train(asked, insecure_seed=0)):
        assert "0.625" not in repr(each) and "rray" not in repr(each).replace("params=array", "")
