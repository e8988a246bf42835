"""A run is its own: it does not depend on its group, shares noise with no other, and goes on where it was stopped.

Of the dense engine, see its own tests too.
"""

import zlib

import numpy as np
import pytest
import scipy.sparse
from engine_cases import (
    ENGINES,
    FEW_STEPS,
    NUM_STEPS,
    OPTIMIZERS,
    PROBLEMS,
    ROOT,
    SEED_DATA,
    Case,
    a_run,
    model,
    scenario,
)

from noisecast import DPAdam, Poisson, SampledGaussian, Scenario, linear_model
from noisecast.engines._adam_kernels import FAR
from noisecast.engines.dense import DenseRun
from noisecast.engines.row_sparse import RowSparseRun
from noisecast.privacy.noise import RandomRoot
from noisecast.problems.datasets import Dataset


def varied(case: Case, size: int) -> list[Scenario]:
    """Scenarios that differ in everything that may differ within a group."""
    return [
        scenario(case, z=0.8 + 0.05 * i, clip=0.4 + 0.03 * i, rate=1 + 0.1 * (i % 5), num_steps=FEW_STEPS)
        for i in range(size)
    ]


@pytest.mark.parametrize("case", [Case("row_sparse", o, "poisson", p) for o in OPTIMIZERS for p in PROBLEMS], ids=str)
def test_a_run_does_not_depend_on_its_group(case):
    """Alone, among three, five, thirteen, sixteen and twenty: lanes that fill whole vectors are drawn in a loop of
    their own, and rows are summed in vectors and what is left of them."""
    found = {}
    for size in (1, 3, 5, 13, 16, 20):
        group = varied(case, 20)
        group = [*group[20 - size : 19], group[7]]  # number 7 is always the last
        run = ENGINES[case.engine](group, repeats=(2, 5), root=ROOT)
        run.advance(FEW_STEPS)
        found[size] = run.params[:, -1]
    for size in (3, 5, 13, 16, 20):
        np.testing.assert_allclose(found[size], found[1], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("root", [ROOT, RandomRoot(b"\x07" * 32, None, secure_noise=True)], ids=["fast", "secure"])
@pytest.mark.parametrize("classes, runs", [(32, 2), (2, 3), (2, 17)])
def test_weights_that_are_fetched_while_their_noise_is_drawn_move_as_others(classes, runs, root):
    """DP-Adam: a group is beyond `FAR`, each alone is not; and a last tile is not a whole group of pairs. Lanes that
    are whole vectors, too few for one, and one too many."""
    columns = classes if classes > 2 else 1
    rows = FAR // (columns * runs) + 1_003
    rng = np.random.default_rng(SEED_DATA)
    features = scipy.sparse.random_array((30, rows - 1), density=1e-3, dtype=np.float32, rng=rng, format="csr")
    labels = (np.arange(30) % classes).astype(np.int32)
    problem = linear_model(Dataset("wide", features, labels, tuple(map(str, range(classes)))))
    mechanism = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=1.0, sampler=Poisson.for_batch_size(8, 30))
    group = [
        Scenario(problem=problem, mechanism=mechanism, optimizer=DPAdam(learning_rate=rate), num_steps=3)
        for rate in np.linspace(0.01, 0.02, runs)
    ]
    assert rows * columns < FAR < runs * rows * columns
    found = []
    for members in (group, group[:1], group[-1:]):
        run = RowSparseRun(members, repeats=[0], root=root)
        assert len(run._blocks) == 1
        run.advance(3)
        found += [run.params[0, 0], run.params[0, -1]]
    assert np.abs(found[0]).min() > 0  # every weight has moved
    np.testing.assert_allclose(found[:2], found[2::2], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("classes, runs", [(2, 1), (2, 3), (2, 17), (2, 64), (20, 1)])
def test_every_row_of_every_tile_has_the_gradient_of_its_own(classes, runs):
    """DP-Adam of many rows beside the dense engine: the same batches, so almost without noise the same steps."""
    rng = np.random.default_rng(SEED_DATA)
    features = scipy.sparse.random_array((40, 5_000), density=0.05, dtype=np.float32, rng=rng, format="csr")
    labels = (np.arange(40) % classes).astype(np.int32)
    problem = linear_model(Dataset("wide", features, labels, tuple(map(str, range(classes)))))
    mechanism = SampledGaussian(noise_multiplier=1e-7, l2_clip_norm=1.0, sampler=Poisson.for_batch_size(8, 40))
    group = [
        Scenario(problem=problem, mechanism=mechanism, optimizer=DPAdam(learning_rate=rate, eps=1e-2), num_steps=3)
        for rate in np.linspace(0.01, 0.02, runs)
    ]
    ours, dense = (engine(group, repeats=[0], root=ROOT) for engine in (RowSparseRun, DenseRun))
    for run in (ours, dense):
        run.advance(3)
    moved = np.abs(dense.params) > 1e-4
    assert (moved.reshape(runs, 5_001, -1).any(axis=(0, 2))).mean() > 0.5
    np.testing.assert_allclose(ours.params, dense.params, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("engine, optimizer", [*(("row_sparse", o) for o in OPTIMIZERS), ("dense", "sgd")])
def test_neighbours_in_a_group_and_repeats_share_no_noise(engine, optimizer):
    """Rows that nothing touches move by noise alone: uncorrelated between scenarios, repeats and coordinates."""
    case = Case(engine, optimizer, "poisson", "logistic")
    group = [scenario(case, delta=1e-5 * (1 + i), num_steps=FEW_STEPS) for i in range(9)]
    run = ENGINES[engine](group, repeats=range(100), root=ROOT)
    run.advance(FEW_STEPS)
    never = np.flatnonzero(~(model("logistic").inputs != 0).any(axis=0))
    noise = run.params[:, :, never].astype(np.float64)  # (repeats, scenarios, rows)
    noise /= noise.std()

    def largest_z(samples: np.ndarray) -> float:
        """Of products of neighbours along each axis."""
        z = []
        for axis in range(3):
            size = samples.shape[axis]
            products = np.take(samples, range(1, size), axis) * np.take(samples, range(size - 1), axis)
            z.append(abs(products.mean()) * np.sqrt(products.size) / products.std())
        return max(z)

    print(f"{engine} {optimizer}: largest z {largest_z(noise):.2f}")
    assert largest_z(noise) < 5.5
    shared = noise + 0.5 * noise[:, :1]  # control: neighbours share a part
    assert largest_z(shared) > 5.5


@pytest.mark.parametrize("engine", ENGINES)
def test_repeats_draw_batches_of_their_own_and_scenarios_at_one_repeat_share_them(engine):
    case = Case(engine, "sgd", "poisson", "logistic")
    group = [scenario(case, z=1e-7, num_steps=FEW_STEPS, delta=delta) for delta in (1e-5, 1e-6)]
    run = ENGINES[engine](group, repeats=range(4), root=ROOT)
    run.advance(FEW_STEPS)
    params = run.params
    np.testing.assert_allclose(params[:, 0], params[:, 1], atol=2e-5)
    for i in range(4):
        for j in range(i):
            assert np.abs(params[i] - params[j]).max() > 0.1


@pytest.mark.parametrize("looking", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        *(Case("row_sparse", o, "poisson", "softmax") for o in OPTIMIZERS),
        *(Case("row_sparse", o, "poisson", "softmax", "stairs") for o in OPTIMIZERS),
    ],
    ids=str,
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(case, looking):
    """Stopped at any steps, and evaluated at any: both runs at the same ones."""
    rng = np.random.default_rng([SEED_DATA, zlib.crc32(repr(case).encode())])
    stops = [*sorted(rng.choice(np.arange(1, NUM_STEPS), 5, replace=False).tolist()), NUM_STEPS]
    whole, piece = a_run(case), a_run(case)
    for stop in stops:
        whole.advance(stop)
        state = piece.state()
        piece = a_run(case)
        piece.restore(state)
        piece.advance(stop)
        if looking:
            metrics, again = whole.evaluate(), piece.evaluate()
            assert all((metrics[name] == again[name]).all() for name in metrics)
    np.testing.assert_array_equal(whole.params, piece.params)
    if not looking:  # and how often it was stopped does not matter
        straight = a_run(case)
        straight.advance(NUM_STEPS)
        np.testing.assert_array_equal(straight.params, whole.params)


@pytest.mark.parametrize("case", [Case("row_sparse", o, "poisson", "logistic") for o in OPTIMIZERS], ids=str)
def test_a_run_can_go_back_to_an_earlier_state(case):
    """What a run has in hand besides its state must not outlive a restore."""
    run = a_run(case)
    run.advance(50)
    state = run.state()
    run.advance(51)
    once = run.params
    run.restore(state)
    run.advance(51)
    np.testing.assert_array_equal(run.params, once)
