"""The stationary figure: what it measures, and that its claims can fail."""

import numpy as np
import pandas as pd
import pytest

from noisecast.reproduction import fig_stationary as figure


def frame_of(noise=1.0, shift=0.0, num_runs=20_000, of=figure.EXACT):
    """A frame whose measurements follow the formula `of`, with its noise and mean altered, and chance left out."""
    frames = []
    for setting in figure.SETTINGS:
        forms = figure.predictions(setting)
        frames += [figure._predicted(setting, source, *moments) for source, moments in forms.items()]
        mean, variance = forms[of] if of in forms else forms[figure.EXACT]
        measured = figure._rows(setting, figure.MEASURED, setting.steps, mean + shift, noise**2 * variance)
        errors = np.sqrt([variance / num_runs, 2 * variance**2 / num_runs]).ravel()
        frames.append(measured.assign(standard_error=errors, num_runs=num_runs))
    return pd.concat(frames, ignore_index=True)


def decided(frame):
    return [claim.holds for claim in figure.claims(frame)]


THEOREMS, VALIDATED, PRINTED, CORRECTED = slice(0, 8), 8, 9, 10


def test_the_algorithm_bears_out_the_theorems_and_shows_the_misprint():
    holds = decided(frame_of())
    assert all(holds[THEOREMS]) and holds[CORRECTED]
    assert not holds[VALIDATED] and not holds[PRINTED]


@pytest.mark.parametrize("wrong, failing", [({"noise": 1.04}, {1, 2, 3, 5, 6, 7}), ({"shift": 5e-4}, {0, 4})])
def test_wrong_moments_fail_the_theorems(wrong, failing):
    holds = decided(frame_of(**wrong))
    assert {i for i in range(8) if not holds[i]} == failing


def test_if_the_printed_form_were_right_the_claim_would_say_so():
    holds = decided(frame_of(of=figure.PRINTED))
    assert holds[PRINTED] and not holds[CORRECTED]


def test_measured_moments_and_their_errors():
    rng = np.random.default_rng(0)
    setting = figure.SETTINGS[0]
    params = rng.normal([1.0, -2.0], [0.5, 3.0], size=(50_000, 2))
    rows = figure._measured(setting, 6000, params).set_index(["moment", "hessian"])
    assert rows["value"].to_numpy() == pytest.approx([1.0, -2.0, 0.25, 9.0], rel=0.03)
    expected = [0.5 / 50_000**0.5, 3 / 50_000**0.5, 0.25 * (2 / 50_000) ** 0.5, 9 * (2 / 50_000) ** 0.5]
    assert rows["standard_error"].to_numpy() == pytest.approx(expected, rel=0.03)


def test_run_draws_what_it_measured(monkeypatch):
    monkeypatch.setattr(figure, "NUM_RUNS", 400)
    monkeypatch.setattr(figure, "NUM_TIMES", 4)
    told = []
    frame = figure.data(figure.run("quick", progress=lambda share, left: told.append(share)))
    assert told == sorted(told) and told[-1] == 1.0
    measured = frame[frame["source"] == figure.MEASURED]
    assert len(measured) == 4 * 2 * (2 + 2 + 1) and set(measured["num_runs"]) == {400}
    at_end = figure._against(frame, "DP-SGD", "variance", figure.EXACT)
    assert at_end["relative"].abs().max() < 0.5  # 5 standard errors of 400 runs are 35 %
    drawn = figure.draw(frame)
    assert len(drawn.axes) == 9
    labels = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert labels == ["training", "the algorithm, exactly", "theorem as printed", "theorem, corrected (H²)"]
    assert len(figure.claims(frame)) == 11


def test_nothing_is_clipped_in_these_settings():
    for setting in figure.SETTINGS:
        gradient = np.linalg.norm(np.array(setting.hessian_diag) * setting.initial_params)
        assert gradient + 20 * figure.EXAMPLE_NOISE_STD < figure.L2_CLIP_NORM
