"""Which engine computes what, where they agree, and what neither may choke on: sure models and hostile rows."""

import dataclasses

import numba
import numpy as np
import pytest
import scipy.sparse
import scipy.special
from engine_cases import (
    CLIP,
    ENGINES,
    NUM_STEPS,
    OPTIMIZERS,
    PROBLEMS,
    ROOT,
    SAMPLERS,
    SEED_DATA,
    Case,
    N,
    scenario,
)

from noisecast import DPSGD, Poisson, SampledGaussian, Scenario, Stream, engines, linear_model, quadratic
from noisecast.engines import _linear_kernels, row_sparse
from noisecast.engines.dense import DenseRun
from noisecast.engines.row_sparse import RowSparseRun
from noisecast.engines.row_sparse_lanes import lanes_of
from noisecast.engines.simulate import SimulatedRun
from noisecast.problems.clipping import NORM_SLACK
from noisecast.problems.datasets import Dataset


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("problem_name", PROBLEMS)
def test_engines_agree_where_noise_does_not_matter(sampler, problem_name):
    """The same keys give the same batches, so without noise they take the same steps; DP-SGD at z = 10^-7."""
    found = []
    for engine in ENGINES:
        case = Case(engine, "sgd", sampler, problem_name)
        group = [scenario(case, z=1e-7, clip=clip) for clip in (0.2, 0.6, 5.0)]
        run = ENGINES[engine](group, repeats=(0, 3), root=ROOT)
        run.advance(NUM_STEPS)
        found.append(run.params)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=2e-5)


def test_explain_says_which_engine_and_why():
    sparse = scenario(Case("row_sparse", "sgd", "poisson", "logistic"))
    assert engines.explain(sparse) == "Computed by the engine row_sparse."
    quiet = dataclasses.replace(sparse, mechanism=sparse.mechanism.with_noise_multiplier(0.0))
    population = Scenario(
        problem=quadratic(np.ones(2), 1.0, example_noise_std=0.1),
        mechanism=SampledGaussian(noise_multiplier=1.0, l2_clip_norm=1.0, sampler=Stream(8)),
        optimizer=DPSGD(learning_rate=0.1),
        num_steps=3,
    )
    rows = np.random.default_rng(SEED_DATA).normal(size=(N, 5)).astype(np.float32)
    dense_rows = linear_model(Dataset("dense", rows, np.arange(N, dtype=np.int32) % 2, ("a", "b")))
    for question, why in [
        (quiet, "Without noise there is nothing to postpone."),
        (dataclasses.replace(sparse, problem=dense_rows), "is not a linear model on sparse rows"),
    ]:
        sentence = engines.explain(question)
        assert sentence.startswith("Computed by the engine dense. Not by row_sparse: ") and why in sentence
        assert engines.group_key(question) != engines.group_key(sparse)
        assert isinstance(engines.start([question], repeats=(0,), root=ROOT), DenseRun)
    assert engines.explain(population).startswith("Computed by the engine simulate. Not by row_sparse: ")
    assert isinstance(engines.start([population], repeats=(0,), root=ROOT), SimulatedRun)
    assert isinstance(engines.start([sparse], repeats=(0,), root=ROOT), RowSparseRun)
    assert row_sparse.why_unsupported(sparse) is None


def residuals_of_one(likelihood: int, outputs: int, length: float, clip: float, logits: np.ndarray) -> np.ndarray:
    """Clipped residuals of examples of norm `length`, label 0, with these logits: (examples, outputs)."""
    out = logits.astype(np.float32)
    n = len(out)
    examples = _linear_kernels.Examples(
        begin=np.zeros(n, np.int64), end=np.zeros(n, np.int64), indices=np.zeros(0, np.uint32),
        values=np.zeros(0, np.float32), labels=np.zeros((n, 1), np.int32),
        norms=np.full(n, length * NORM_SLACK, np.float32), likelihood=likelihood,
    )  # fmt: skip
    lanes = lanes_of([scenario(Case("row_sparse", "sgd", "poisson", "logistic"), clip=clip)], outputs, ROOT, 0)
    clip_residuals(examples, np.arange(n), lanes, outputs, out)
    return out


@pytest.mark.parametrize("num_classes", [2, 3, 4, 5, 7, 17, 500])
def test_probabilities_are_those_of_float64_whichever_class_is_largest(num_classes):
    """Differences beyond 88, where e^x ends in float32: they are taken from the largest logit, wherever it stands."""
    rng = np.random.default_rng(SEED_DATA)
    logits = np.float32(rng.normal(scale=60, size=(num_classes + 50, num_classes)))
    logits[np.arange(num_classes), np.arange(num_classes)] = 300
    found = residuals_of_one(1, num_classes, 1e-6, 1e6, logits)
    expected = scipy.special.softmax(np.float64(logits), axis=1) - np.eye(num_classes)[0]
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=3e-7)


@numba.njit
def clip_residuals(examples, batch, lanes, outputs, out):
    """Pieces of a kernel have no form that Python could call."""
    if examples.likelihood == _linear_kernels.LOGISTIC:
        _linear_kernels._clip_logistic(examples, batch, lanes, out)
    elif examples.likelihood == _linear_kernels.SOFTMAX:
        _linear_kernels._clip_softmax(examples, batch, lanes, outputs, out)
    else:
        _linear_kernels._clip_multi_label(examples, batch, lanes, outputs, out)


@pytest.mark.parametrize("likelihood, outputs", [(0, 1), (1, 2), (1, 3), (1, 500), (2, 1), (2, 500)])
@pytest.mark.parametrize("clip", [1e-4, 1.0])
def test_a_confident_example_alone_is_no_longer_than_the_clip_norm(likelihood, outputs, clip):
    """Where the model is nearly sure, residuals are differences of nearly equal numbers: margins of -20 to 20."""
    logits = np.zeros((2001, outputs))
    logits[:, 0] = np.linspace(-20, 20, 2001)
    for length in (1.0, 1e2, 1e4, 1e6):
        clipped = residuals_of_one(likelihood, outputs, length, clip, logits).astype(np.float64)
        lengths = np.linalg.norm(clipped, axis=1) * length
        assert lengths.max() <= clip, f"length {length:g}: {lengths.max() / clip} C"
        assert lengths.max() > 0.99 * min(clip, 0.5 * length)  # and is cut to C, no shorter


@pytest.mark.parametrize("num_classes", [2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_hostile_rows_move_a_sum_by_no_more_than_the_clip_norm(optimizer, num_classes):
    """Values up to the end of float32: parameters stay finite, and no example counts for more than any other."""
    rng = np.random.default_rng(SEED_DATA)
    features = np.zeros((N, 20), np.float32)
    for row in features:
        row[rng.choice(20, 4, replace=False)] = rng.normal(size=4)
    hostile = [1e4, 1e9, 1e18, -1e18, 1e19, -1e30, 3e38]
    for i, value in enumerate(hostile):
        features[i, np.flatnonzero(features[i])[0]] = value
    labels = rng.integers(0, num_classes, N).astype(np.int32)
    data = linear_model(Dataset("hostile", scipy.sparse.csr_array(features), labels, tuple("abc"[:num_classes])))
    question = scenario(Case("row_sparse", optimizer, "poisson", "logistic"))
    question = dataclasses.replace(question, problem=data)
    assert row_sparse.why_unsupported(question) is None
    run = RowSparseRun([question, dataclasses.replace(question, target_delta=1e-6)], repeats=range(5), root=ROOT)
    run.advance(NUM_STEPS)
    assert np.isfinite(run.params).all()
    if optimizer == "sgd":  # every example, one step, next to no noise: the step is at most n C / B long
        mechanism = SampledGaussian(noise_multiplier=1e-7, l2_clip_norm=CLIP, sampler=Poisson(1.0, 1.0))
        quiet = dataclasses.replace(question, mechanism=mechanism, num_steps=2)
        found = []
        for engine in (RowSparseRun, DenseRun):
            one = engine([quiet], repeats=(0,), root=ROOT)
            one.advance(1)
            found.append(one.params)
            one.advance(2)  # from weights along hostile rows, where logits overflow
            assert np.isfinite(one.params).all()
            assert np.linalg.norm(one.params - found[-1]) <= N * CLIP * (1 + 1e-5)
        np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=2e-5)
