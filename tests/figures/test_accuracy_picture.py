"""The frame behind the accuracy picture: its numbers are those of the table."""

import numpy as np
import pytest

from noisecast import DPSGD, DPSignSGD, SampledGaussian, Scenario, Stream, answer, quadratic
from noisecast.figures import accuracy_picture
from noisecast.runners import Moments, Training
from noisecast.table import DIVERGED, EXTRAPOLATED, SIMULATED

SEEDS = [750_001, 750_002, 750_003, 750_004]


@pytest.fixture(scope="module")
def table():
    problem = quadratic(np.ones(5), 0.3, example_noise_std=0.1)
    asked = [
        Scenario(
            problem=problem,
            mechanism=SampledGaussian(noise_multiplier=noise, l2_clip_norm=5.0, sampler=Stream(8)),
            optimizer=optimizer,
            num_steps=40,
        )
        for noise in (0.1, 1.0)
        for optimizer in (DPSGD(learning_rate=0.1), DPSGD(learning_rate=0.2), DPSignSGD(learning_rate=0.02))
    ]
    return answer(asked, runners=[Training(), Moments()], insecure_seeds=SEEDS, record_at=[0, 20, 40])


def test_the_frame_is_the_tables(table):
    frame = accuracy_picture.data(table)
    assert len(frame) == 6 * 3 and set(frame["num_seeds"]) == {4}
    for row in accuracy_picture.last_steps(frame).to_dict("records"):
        here = table[(table["scenario"] == row["scenario"]) & (table["step"] == 40) & (table["metric"] == "loss")]
        trained = here.loc[here["runner"] == "training", "value"]
        forecast = here.loc[here["runner"] == "moments", "value"].item()
        assert row["trained_mean"] == pytest.approx(trained.mean())
        assert row["trained_std"] == pytest.approx(trained.std())
        assert row["trained_sem"] == pytest.approx(trained.std() / 2)
        assert row["forecast"] == forecast
        assert row["error"] == pytest.approx(forecast / trained.mean() - 1)
        assert row["standard_errors"] == pytest.approx((forecast - trained.mean()) / trained.sem())


def test_what_diverged_is_counted_and_has_no_error(table):
    broken = table.copy()
    where = (broken["runner"] == "training") & (broken["seed"] == SEEDS[0]) & (broken["optimizer"] == "DP-SignSGD")
    broken.loc[where, ["value", "status"]] = [np.nan, DIVERGED]
    frame = accuracy_picture.data(broken)
    sign = frame["optimizer"] == "DP-SignSGD"
    assert (frame.loc[sign, "num_diverged"] == 1).all() and frame.loc[sign, "error"].isna().all()
    assert frame.loc[~sign, "error"].notna().all()


def test_both_must_have_answered(table):
    with pytest.raises(ValueError, match="Expected rows of training and of moments"):
        accuracy_picture.data(table[table["runner"] == "training"])


@pytest.mark.parametrize("levels, label", [([0.1, 1.0], "noise multiplier"), ([1.0], "step")])
def test_one_panel_an_optimizer(table, levels, label):
    figure = accuracy_picture.draw(accuracy_picture.data(table[table["noise_multiplier"].isin(levels)]))
    assert [panel.get_title() for panel in figure.axes] == ["DP-SGD", "DP-SignSGD"]
    assert {panel.get_xlabel() for panel in figure.axes} == {label}
    lines = [line for line in figure.axes[0].lines if line.get_linestyle() == "-."]
    assert len(lines) == 2  # one a learning rate


def marked_in(figure, sign):
    return [list(x) for line in figure.axes[0].lines if line.get_marker() == sign and len(x := line.get_xdata())]


@pytest.mark.parametrize(
    ("status", "sign", "said"),
    [(EXTRAPOLATED, "x", "crosses: called extrapolated"), (SIMULATED, "+", "plus signs: simulated")],
)
def test_forecasts_that_are_not_the_solvers_or_not_sound_are_marked(table, status, sign, said):
    frame = accuracy_picture.data(table)
    assert not marked_in(accuracy_picture.draw(frame), sign)
    beyond = (frame["optimizer"] == "DP-SGD") & (frame["noise_multiplier"] == 1.0) & (frame["learning_rate"] == 0.1)
    frame.loc[beyond, "status"] = status
    figure = accuracy_picture.draw(frame)
    assert marked_in(figure, sign) == [[1.0]]
    assert said in figure.get_supxlabel()


@pytest.mark.parametrize("seeds", [SEEDS[:2], SEEDS])
@pytest.mark.parametrize("levels", [[0.1, 1.0], [1.0]])
def test_bars_of_means_end_inside_the_axes(table, levels, seeds):
    """Of two seeds, too, whose 95 % interval is 12.7 standard errors long; and one that ends below 0 on a log axis."""
    asked = table[table["noise_multiplier"].isin(levels) & (table["seed"].isin(seeds) | (table["runner"] == "moments"))]
    panel = accuracy_picture.draw(accuracy_picture.data(asked)).axes[0]
    low, high = panel.get_ylim()
    bars = [segment[:, 1] for bars in panel.containers for part in bars[2] for segment in part.get_segments()]
    ends = np.ravel(bars)
    assert len(ends) and ends.min() >= 0  # losses
    assert ((low < ends) & (ends < high) | (ends == 0) & (panel.get_yscale() == "log")).all()
