"""The standings of the paper's cells on grids whose winners are known."""

import numpy as np
import pandas as pd
import pytest
from synthetic import draw_for, imdb_row

from noisecast.optimizers import DPSGD
from noisecast.reproduction.table_tuned import PLANS, claims, data, draw, standings
from noisecast.reproduction.tasks import IMDB, PROTOCOL_A
from noisecast.table import table_from

PAPERS = {kind.name: tuple(setting) for kind, setting in IMDB.tuned.items()}


def table(winner=None, spread=0.01, seeds=range(4), metrics=("loss", "accuracy")):
    """Bowls about the paper's cells, or about `winner`."""
    rows = []
    for name, (rate_0, clip_0) in (PAPERS | (winner or {})).items():
        for rate in PROTOCOL_A.learning_rates:
            for clip in PROTOCOL_A.l2_clip_norms:
                for seed in seeds:
                    bowl = 1 + 0.1 * (np.log(rate / rate_0) ** 2 + np.log(clip / clip_0) ** 2)
                    noisy = bowl + spread * draw_for(name, rate, clip, seed)
                    about = {"optimizer": name, "learning_rate": rate, "l2_clip_norm": clip, "seed": seed}
                    values = {"loss": noisy, "accuracy": 1 / noisy}
                    rows += [imdb_row(value=values[metric], metric=metric, **about) for metric in metrics]
    return table_from(rows)


def test_the_papers_cells_win_where_they_do():
    found = claims(data(table()))
    assert len(found) == 3 and all(claim.holds for claim in found)
    assert found[0].value == 0 and "number 1 of 49" in found[0].corrected and "(5, 0.5) wins" in found[0].corrected
    assert "By training accuracy (5, 0.5) wins, and the paper's is number 1" in found[0].corrected


def test_another_cell_wins_where_it_does():
    sgd, *others = claims(data(table({"DP-SGD": (0.1, 2.0)})))
    assert not sgd.holds and sgd.low > 0 and "(0.1, 2) wins" in sgd.corrected and all(c.holds for c in others)
    place = standings(data(table({"DP-SGD": (0.1, 2.0)}))).query("optimizer == 'DP-SGD' and is_papers")["place"].iloc[0]
    assert place > 20 and f"number {place} of 49" in sgd.corrected


def with_forecasts(extrapolated) -> str:
    """What is said of forecasts of DP-SGD's cells, the lowest at the paper's; those of some rates are extrapolated."""
    rows = table()
    forecasts = rows[rows["seed"] == 0].assign(runner="moments", seed=None)
    forecasts["status"] = np.where(forecasts["learning_rate"].isin(extrapolated), "extrapolated", "ok")
    return claims(data(pd.concat([rows, table_from(forecasts)])))[0].forecast


def test_a_forecast_that_is_extrapolated_is_not_said_to_lose():
    assert with_forecasts([]) == "(5, 0.5) wins; the paper's cell is number 1 of 49"
    assert with_forecasts([10]) == (
        "(5, 0.5) wins; the paper's cell is number 1 of 49. 7 are extrapolated, not the paper's; of those that are "
        "not, (5, 0.5) wins"
    )
    assert with_forecasts([5]) == (
        "(5, 0.5) wins; the paper's cell is number 1 of 49. 7 are extrapolated, the paper's among them; of those that "
        "are not, (3, 0.5) wins"
    )
    assert with_forecasts(PROTOCOL_A.learning_rates).endswith("49 are extrapolated, the paper's among them")


def test_what_chance_hides_is_not_told_apart():
    near = {"DP-SGD": (3.0, 0.5)}  # the neighbour of (5, .5)
    assert not claims(data(table(near, spread=0.001)))[0].holds
    assert claims(data(table(near, spread=0.3)))[0].holds


def test_a_diverged_cell_of_the_paper_does_not_hold():
    rows = table()
    lost = (rows["optimizer"] == "DP-SGD") & (rows["learning_rate"] == 5) & (rows["seed"] == 0)
    rows.loc[lost, ["value", "status"]] = [np.nan, "diverged"]
    claim = claims(data(rows))[0]
    assert not claim.holds and "diverged" in claim.corrected


def test_a_grid_without_the_papers_cell():
    rows = table()
    with pytest.raises(ValueError, match="Expected the paper's cell of DP-SGD in the grid"):
        claims(data(rows[rows["learning_rate"] != 5]))


def test_losses_alone_are_enough():
    assert "accuracy" not in claims(data(table(metrics=("loss",))))[0].corrected


def test_the_grids_hold_the_papers_cells():
    for scale in ("quick", "paper"):
        for plan in PLANS[scale]:
            if "centred" not in plan.task.name:
                for kind, (rate, clip) in plan.task.tuned.items():
                    rates, clips = plan.grids[kind]
                    assert rate in rates and clip in clips, plan.task.name
                    assert rate < max(rates) or kind is DPSGD, "the best of an edge may lie beyond it"
    assert len(PROTOCOL_A.learning_rates) * len(PROTOCOL_A.l2_clip_norms) == 49
    assert all(grid == PROTOCOL_A for plan in PLANS["paper"] for grid in plan.grids.values())


def test_it_is_drawn(tmp_path):
    drawn = draw(data(table()))
    assert sum(bool(axes.images) for axes in drawn.axes) == 3
    drawn.savefig(tmp_path / "picture.png")
