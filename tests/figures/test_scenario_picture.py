"""The scenario picture: curves that colour does not tell apart are labelled by what they differ in."""

import pytest

from noisecast import DPSGD, ClosedForm, DPSignSGD, SampledGaussian, Scenario, Stream, answer, quadratic
from noisecast.figures import scenario_picture


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
    "rates, clips, labels, note",
    [
        ([0.1], [5.0], set(), None),
        ([0.1, 0.2], [5.0], {"0.1", "0.2"}, "numbers: learning rates"),
        ([0.1], [4.0, 5.0], {"4", "5"}, "numbers: clip norms"),
        ([0.1, 0.2], [4.0, 5.0], {"0.1, 4", "0.1, 5", "0.2, 4", "0.2, 5"}, "numbers: learning rates, clip norms"),
    ],
)
def test_curves_of_one_colour_say_what_they_differ_in(rates, clips, labels, note):
    table = answer(scenarios(rates, clips), runners=[ClosedForm()], record_at=[0, 20, 40])
    figure = scenario_picture.draw(scenario_picture.data(table))
    assert {text.get_text() for text in figure.axes[0].texts} == labels
    title = figure.legends[0].get_title().get_text()
    assert title.split("; ")[1:] == ([note] if note else [])
