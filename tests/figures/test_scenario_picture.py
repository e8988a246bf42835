"""The scenario picture: curves that colour does not tell apart are labelled by what they differ in."""

from itertools import pairwise

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from noisecast import DPSGD, ClosedForm, DPSignSGD, SampledGaussian, Scenario, Stream, Training, answer, quadratic
from noisecast.figures import scenario_picture
from noisecast.table import DIVERGED, EXTRAPOLATED


def scenarios(rates, clips):
    """DP-SGD at every rate and clip norm, and DP-SignSGD once."""
    cells = [(DPSGD(learning_rate=rate), clip) for rate in rates for clip in clips]
    return [
        Scenario(
            problem=quadratic([1.0, 2.0], 0.3, example_noise_std=0.1),
            mechanism=SampledGaussian(noise_multiplier=0.1, l2_clip_norm=clip, sampler=Stream(8)),
            optimizer=optimizer,
            num_steps=40,
        )
        for optimizer, clip in [*cells, (DPSignSGD(learning_rate=0.02), 3.0)]
    ]


@pytest.mark.parametrize(
    "rates, clips, labels",
    [
        ([0.1], [5.0], set()),
        ([0.1, 0.2], [5.0], {"rate 0.1", "rate 0.2"}),
        ([0.1], [4.0, 5.0], {"clip 4", "clip 5"}),
        ([0.1, 0.2], [4.0, 5.0], {f"rate {rate}, clip {clip}" for rate in (0.1, 0.2) for clip in (4, 5)}),
    ],
)
def test_curves_of_one_colour_say_what_they_differ_in(rates, clips, labels):
    table = answer(scenarios(rates, clips), runners=[ClosedForm()], record_at=[0, 20, 40])
    texts = scenario_picture.draw(scenario_picture.data(table)).axes[0].texts
    assert {text.get_text() for text in texts} == labels
    heights = sorted(text.xy[1] for text in texts)
    assert all(one + 0.049 < other for one, other in pairwise(heights))  # none upon another


def test_a_curve_that_ends_on_the_way_is_labelled_there_and_a_point_is_not():
    table = answer(scenarios([0.1, 0.2], [5.0]), runners=[ClosedForm()], record_at=[0, 20, 40])
    one = table["scenario"] == table["scenario"].iloc[0]

    def labels():
        texts = scenario_picture.draw(scenario_picture.data(table)).axes[0].texts
        return {text.get_text(): text.xy[0] for text in texts}

    table.loc[one & (table["step"] == 40), "status"] = EXTRAPOLATED
    assert labels() == {"rate 0.1": 20, "rate 0.2": 1.0}  # a step, and the panel's edge
    table.loc[one & (table["step"] == 20), "status"] = EXTRAPOLATED
    assert labels() == {"rate 0.2": 1.0}


def test_curves_that_are_left_out_are_counted():
    table = answer(scenarios([0.1, 0.2], [5.0]), runners=[Training()], record_at=[0, 20, 40])
    assert "have gaps" not in legend_of(table)
    one = table["scenario"] == table["scenario"].iloc[0]
    table.loc[one & (table["step"] > 0), "status"] = EXTRAPOLATED
    assert "1 of 3 curves have gaps" in legend_of(table)
    table["status"] = EXTRAPOLATED
    assert "3 of 3 curves have gaps" in legend_of(table)


def test_the_legend_of_one_panel_fits_into_the_picture():
    table = answer(scenarios([0.1], [5.0]), runners=[Training(), ClosedForm()], num_seeds=3, record_at=[0, 20, 40])
    table.loc[table.index[-1], "status"] = EXTRAPOLATED  # a long note
    figure = scenario_picture.draw(scenario_picture.data(table))
    FigureCanvasAgg(figure).draw()
    (legend,) = figure.legends
    extent = legend.get_window_extent()
    assert extent.x0 >= 0 and extent.x1 <= figure.bbox.width


def legend_of(table):
    figure = scenario_picture.draw(scenario_picture.data(table))
    (legend,) = figure.legends or [panel.get_legend() for panel in figure.axes if panel.get_legend()]
    return legend.get_title().get_text()


def test_no_band_of_losses_ends_below_zero():
    """Two seeds' 95 % interval is 12.7 standard errors long; of what may be negative it is drawn as it is."""
    table = answer(scenarios([0.1, 0.2], [5.0]), runners=[Training()], num_seeds=2, record_at=[0, 20, 40])
    frame = scenario_picture.data(table)
    assert frame["low"].min() < 0 < frame["mean"].min()
    assert lowest_of_bands(frame) == 0
    assert lowest_of_bands(frame.assign(mean=frame["mean"] - 1)) == pytest.approx(frame["low"].min())


def lowest_of_bands(frame):
    panels = scenario_picture.draw(frame).axes
    return min(path.vertices[:, 1].min() for panel in panels for band in panel.collections for path in band.get_paths())


def test_what_diverged_has_no_end_to_be_labelled():
    table = answer(scenarios([0.1, 0.2], [5.0]), runners=[ClosedForm()], record_at=[0, 20, 40])
    table.loc[table["learning_rate"] == 0.2, "status"] = DIVERGED
    assert [t.get_text() for t in scenario_picture.draw(scenario_picture.data(table)).axes[0].texts] == ["rate 0.1"]
