"""Cells: a grid is the product of its lists, draws are reproducible from a public seed and follow their law."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest

from noisecast.scenario_file.cells import cells
from noisecast.scenario_file.document import Document
from noisecast.scenario_file.tables import DrawsTable, MechanismTable, OptimizerTable, Settings
from noisecast.scenario_file.values import LogUniform

MECHANISM = MechanismTable(noise_multiplier=[0.5, 2.0], l2_clip_norm=[1.0], batch_size=[16, 64, 256])
SGD = OptimizerTable.model_validate({"name": "dp-sgd", "learning_rate": {"log_uniform": [0.01, 1.0]}})
SIGN = OptimizerTable.model_validate({"name": "dp-sign-sgd", "learning_rate": {"log_uniform": [0.01, 1.0]}})
ADAM = OptimizerTable.model_validate(
    {"name": "dp-adam", "learning_rate": [0.1, 0.2], "l2_clip_norm": {"log_uniform": [0.1, 10.0]}}
)


def document(optimizers, *, count=None, seed=7, mechanism=MECHANISM):
    return Document(
        path=Path("sweep.toml"),
        text="",
        settings=Settings(num_steps=10),
        problems=(),
        mechanism=mechanism,
        optimizers=tuple(optimizers),
        draws=None if count is None else DrawsTable(count=count, public_seed=seed),
        tuning=None,
    )


def drawn(*optimizers, **changes):
    return cells(document(optimizers, **changes))


distinct = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=4, unique=True)


@given(noise=distinct, sizes=distinct, shared_clips=distinct, rates=distinct, own_clips=distinct | st.none())
def test_a_grid_is_the_product_of_its_lists(noise, sizes, shared_clips, rates, own_clips):
    mechanism = MechanismTable(noise_multiplier=noise, batch_size=sizes, l2_clip_norm=shared_clips)
    table = OptimizerTable(name="dp-adam", learning_rate=rates, l2_clip_norm=own_clips)
    found = drawn(table, mechanism=mechanism)
    clips = own_clips or shared_clips
    assert len(found) == len(noise) * len(sizes) * len(rates) * len(clips)
    assert {(c.batch_size, c.noise, c.l2_clip_norm, c.learning_rate) for c in found} == {
        (b, z, clip, rate) for b in sizes for z in noise for clip in clips for rate in rates
    }


@given(count=st.integers(1, 40), seed=st.integers(0, 2**64))
@settings(max_examples=50)
def test_draws_are_reproducible_and_within_their_ranges(count, seed):
    found = drawn(SGD, ADAM, count=count, seed=seed)
    assert found == drawn(SGD, ADAM, count=count, seed=seed)
    assert [cell.optimizer.name for cell in found] == ["dp-sgd"] * count + ["dp-adam"] * count
    for cell in found:
        assert cell.batch_size in (16, 64, 256) and cell.noise in (0.5, 2.0)
        sgd = cell.optimizer is SGD
        assert 0.01 <= cell.learning_rate <= 1.0 if sgd else cell.learning_rate in (0.1, 0.2)
        assert cell.l2_clip_norm == 1.0 if sgd else 0.1 <= cell.l2_clip_norm <= 10.0


def test_another_seed_draws_other_cells_and_so_does_another_optimizer():
    def rates(found):
        return [cell.learning_rate for cell in found]

    first = rates(drawn(SGD, count=20))
    assert not set(first) & set(rates(drawn(SGD, count=20, seed=8)))
    assert not set(first) & set(rates(drawn(SIGN, count=20)))
    assert len(set(rates(drawn(SGD, SGD, count=20)))) == 40  # and a second table of the same name


def test_a_sweep_is_enlarged_without_losing_a_cell():
    few = drawn(SGD, count=5)
    assert drawn(SGD, count=9)[:5] == few
    assert drawn(ADAM, SGD, count=5)[5:] == few
    wider = SGD.model_copy(update={"learning_rate": LogUniform(0.001, 1.0)})
    assert [(c.batch_size, c.noise) for c in drawn(wider, count=5)] == [(c.batch_size, c.noise) for c in few]


@pytest.mark.parametrize("low, follows", [(0.01, True), (0.012, False)])  # its own negative control
def test_a_range_is_drawn_log_uniformly(low, follows):
    table = SGD.model_copy(update={"learning_rate": LogUniform(low, 1.0)})
    logs = np.log([cell.learning_rate for cell in drawn(table, count=20_000)]) / np.log(0.01)
    assert (kstest(logs, "uniform").pvalue > 1e-6) == follows


def test_lists_are_drawn_uniformly_and_independently():
    found = drawn(SGD, count=30_000)
    pairs = [(cell.batch_size, cell.noise) for cell in found]
    assert chisquare([pairs.count((b, z)) for b in (16, 64, 256) for z in (0.5, 2.0)]).pvalue > 1e-6
    # The control: a third of one cell moved to another is seen.
    assert chisquare([3333, 6667, 5000, 5000, 5000, 5000]).pvalue < 1e-6


@given(low=st.floats(1e-300, 1e300), factor=st.floats(1.0001, 1e6), share=st.floats(0, 1))
def test_a_range_stays_within_its_ends_and_rises(low, factor, share):
    values = LogUniform(low, low * factor)
    assert values.low <= values.at(share) <= values.high
    assert (values.at(0), values.at(1)) == pytest.approx((values.low, values.high), rel=1e-7)
    assert values.at(share / 2) <= values.at(share)
