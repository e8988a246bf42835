"""Best learning rates and the truncated grid on bowls whose bottoms are known."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from synthetic import draw_for, imdb_row

from noisecast.optimizers import DPSGD
from noisecast.reproduction import fig_protocol_b
from noisecast.reproduction.claims import Claim
from noisecast.reproduction.fig_protocol_b import best_cells, claims, data, draw, score_of
from noisecast.reproduction.protocol_b_sweeps import FINER, PLANS, grids_of
from noisecast.reproduction.retuned import Cube, best_rates, slope, stacked
from noisecast.reproduction.tasks import IMDB
from noisecast.table import table_from

NO_CLAIM = [field.name for field in dataclasses.fields(Claim)]
LEVELS, SEEDS = (1.36, 2.71, 13.56, 60.0), range(4)
RATES = {
    "DP-SGD": (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 1.0, 2.0, 3.5, 5.0, 6.0, 20.0),
    "DP-SignSGD": (0.01, 0.03, 0.1, 0.3, 1.0),
    "DP-Adam": (0.01, 0.03, 0.1, 0.3, 1.0),
}
SIZE = 0.02


@pytest.fixture(autouse=True)
def without_price(request, monkeypatch):
    """The accountants take seconds: asked only where the price is looked at."""
    if "price" not in request.node.name:
        monkeypatch.setattr(fig_protocol_b, "price_of_tuning", lambda rows: Claim(**dict.fromkeys(NO_CLAIM, "")))


def table(best=None, runners=("training", "moments"), seeds=SEEDS, floor=1.0):
    """log-parabolas about the best learning rate of each optimizer at each noise multiplier."""
    best = {"DP-SGD": lambda z: 5 / z, "DP-SignSGD": lambda z: 0.1, "DP-Adam": lambda z: 0.1} | (best or {})
    rows = []
    for name, rates in RATES.items():
        for z in LEVELS:
            for rate in rates:
                for runner in runners:
                    for seed in seeds if runner == "training" else [None]:
                        bowl = floor + 0.3 * np.log(rate / best[name](z)) ** 2
                        noise = SIZE * draw_for(name, z, rate, seed) if runner == "training" else 0.0
                        about = {"optimizer": name, "noise_multiplier": z, "learning_rate": rate}
                        rows.append(imdb_row(value=bowl + noise, seed=seed, runner=runner, **about))
    return table_from(rows)


def words(found, *parts):
    return next(claim for claim in found if all(part in claim.statement for part in parts))


def test_what_holds_on_such_bowls():
    found = claims(data(table()))
    sgd = words(found, "DP-SGD is proportional")
    assert sgd.holds and sgd.value == pytest.approx(1.0, abs=0.05) and float(sgd.forecast) == pytest.approx(1, abs=0.05)
    for name in ("DP-SignSGD", "DP-Adam"):
        assert words(found, f"of {name} hardly").holds
        difference = words(found, "one power of epsilon more", name)
        assert difference.holds and difference.low < 1 < difference.high
    assert words(found, "about as well").holds and words(found, "tuned again").holds
    assert words(found, "makes DP-SGD fail").holds and "2 of 4 levels" in words(found, "makes DP-SGD fail").theory


@pytest.mark.parametrize(
    "best, failing",
    [
        ({"DP-SGD": lambda z: 1.0}, ("DP-SGD is proportional",)),
        ({"DP-SignSGD": lambda z: 0.5 / z**0.5}, ("of DP-SignSGD hardly",)),
        ({"DP-SGD": lambda z: 5 / z**0.5}, ("one power of epsilon more", "DP-Adam")),
        ({"DP-SGD": lambda z: 2.0}, ("makes DP-SGD fail",)),
        ({"DP-SGD": lambda z: 1e-9}, ("tuned again",)),
    ],
)
def test_what_fails_on_others(best, failing):
    claim = words(claims(data(table(best))), *failing)
    assert not claim.holds and claim.corrected


def test_a_worse_optimizer_is_not_comparable():
    rows = table()
    rows.loc[rows["optimizer"] == "DP-SGD", "value"] += 1.0
    claim = words(claims(data(rows)), "about as well")
    assert not claim.holds and claim.value == pytest.approx(2.0, abs=0.1)


def test_the_first_grid_ends_where_the_papers_does():
    best = best_cells(data(table())).query("runner == 'training' and noise_multiplier == 60")
    rates = best.set_index("curve")["learning_rate"]
    assert rates["DP-SGD"] == 0.5 and rates["DP-SGD tuned again"] == 0.1
    assert best.set_index("curve")["learning_rate_at_edge"]["DP-SGD"] == "lowest"


def test_levels_at_an_edge_do_not_count():
    rows = table({"DP-SGD": lambda z: 5 / z if z < 50 else 1e-6})
    cube = Cube(data(rows).query("optimizer == 'DP-SGD' and runner == 'training'"))
    assert cube.is_inside().tolist() == [True, True, True, False]
    assert slope(cube).value == pytest.approx(1.0, abs=0.1)
    too_few = Cube(data(table({"DP-SGD": lambda z: 1e-6})).query("optimizer == 'DP-SGD' and runner == 'training'"))
    assert np.isnan(slope(too_few).value)


def test_a_best_rate_below_the_papers_grid_is_found_and_said():
    best = {"DP-Adam": lambda z: 0.1 if z < 10 else 0.003}
    rows = table(best)
    claim = words(claims(data(rows)), "of DP-Adam hardly")
    assert "lowest rate at 2 of 4 levels" in claim.corrected
    wide = data(rows).query("optimizer == 'DP-Adam' and runner == 'training'")
    assert Cube(wide).num_lowest() == 2


def test_seeds_that_lack_a_cell_are_left_out():
    rows = data(table()).query("optimizer == 'DP-SGD' and runner == 'training'")
    assert Cube(rows).values.shape[1] == 4
    assert Cube(rows[(rows["seed"] != 3) | (rows["learning_rate"] != 1)]).values.shape[1] == 3


def test_the_vertex_lies_between_the_rates():
    rows = data(table({"DP-SGD": lambda z: 0.17}, runners=("moments",))).query("optimizer == 'DP-SGD'")
    cube = Cube(rows)
    assert cube.rates_of(cube.values.mean(axis=1)) == pytest.approx(0.17, rel=0.02)


def test_diverged_cells_are_never_chosen():
    rows = table()
    lost = (rows["optimizer"] == "DP-SGD") & (rows["learning_rate"] > 4) & (rows["seed"] == 1)
    rows.loc[lost, ["value", "status"]] = [-1.0, "diverged"]
    best = best_cells(data(rows)).query("runner == 'training' and optimizer == 'DP-SGD'")
    assert (best["learning_rate"] < 4).all()


def test_the_price_is_counted_in_three_ways():
    claim = claims(data(table()))[-1]
    assert not claim.holds and claim.value > 2 and np.isnan(claim.low)
    assert all(part in claim.corrected for part in ("public data", "all 23 runs counted", "geometric"))


def test_the_score_is_what_was_recorded():
    rows = data(table())
    assert score_of(rows).when == "final"
    epochs = [rows.assign(step=rows["step"] - 390 * back) for back in range(5)]
    assert score_of(data(table_from(pd.concat(epochs, ignore_index=True)))).when == "last epochs"


def test_the_paper_scale_is_the_papers_grid():
    plan = PLANS["paper"][0]
    cells = sum(len(rates) * len(clips) for rates, clips in plan.grids.values())
    assert all(max(plan.more[kind], default=0) <= min(rates) for kind, (rates, _) in plan.grids.items())
    assert cells == 119 and cells * len(plan.noise_multipliers) == 1_309


def test_lower_rates_are_tried_at_every_clip_norm_by_dp_sgd_alone():
    plan = PLANS["paper"][0]
    clips = {(optimizer.name, rate): grid.l2_clip_norms for optimizer, grid in grids_of(plan, 0.5) for rate in grid[0]}
    assert clips["DP-SGD", 0.005] == clips["DP-SGD", 0.7] == (0.1, 0.25, 0.5)
    assert clips["DP-SignSGD", 0.01] == clips["DP-Adam", 0.01] == (0.05, 0.1, 0.25, 0.5)
    assert clips["DP-SignSGD", 0.001] == clips["DP-Adam", 0.003] == (0.5,)


def test_it_is_drawn(tmp_path):
    drawn = draw(data(table()))
    assert len(drawn.axes) == 3 and all(axes.lines for axes in drawn.axes)
    drawn.savefig(tmp_path / "picture.png")


# --- The finer sweep -------------------------------------------------------------------------------------------------


def finer_rows(power: float, size=SIZE, num_seeds=10):
    """At the finer rates, rising steeply to the right as real ones: bottoms at 5/z^power and 0.06/z^(power - 1)."""
    finer, rows = FINER[IMDB.name], []
    for kind, rates in finer.learning_rates.items():
        scale, slope_of = (5, power) if kind is DPSGD else (0.06, power - 1)
        for z in finer.noise_multipliers:
            for rate in rates:
                x = np.log(rate / scale) + slope_of * np.log(z)
                for seed in range(num_seeds):
                    value = 1 + 0.2 * (np.exp(1.2 * x) - 1.2 * x - 1) + size * draw_for(kind.name, z, rate, seed)
                    about = {"optimizer": kind.name, "noise_multiplier": z, "learning_rate": rate}
                    rows.append(imdb_row(value=value, seed=seed, runner="training", **about))
    return table_from(rows)


def test_slopes_are_of_the_finer_sweep_and_losses_of_the_first():
    first, both = claims(data(table())), claims(data(pd.concat([table(), finer_rows(1.6)])))
    for name in ("DP-SignSGD", "DP-Adam"):
        difference = words(both, "one power of epsilon more", name)
        assert difference.holds and difference.value == pytest.approx(1.0, abs=0.15)
    slope_of_sgd = words(both, "DP-SGD is proportional")
    assert slope_of_sgd.value == pytest.approx(1.6, abs=0.1) and not slope_of_sgd.holds
    assert words(first, "DP-SGD is proportional").value == pytest.approx(1.0, abs=0.05)
    for about in ("about as well", "tuned again", "makes DP-SGD fail"):
        assert words(both, about) == words(first, about)
    assert claims(data(pd.concat([table(), finer_rows(1.6)])))[-1] == first[-1]


def test_no_rate_is_in_both_sweeps():
    for plan in (plan for plans in PLANS.values() for plan in plans if plan.finer_seeds):
        finer = FINER[fig_protocol_b.task_of(plan.task.key.replace("-", ", ")).name]
        for kind, (rates, _) in plan.grids.items():
            assert not set(finer.learning_rates[kind]) & {*rates, *plan.more[kind]}


def test_the_picture_has_the_finer_rates_with_intervals():
    figure = draw(data(pd.concat([table(), finer_rows(1.6)])))
    plain = draw(data(table()))
    panels = [len(drawn.axes[2].containers) for drawn in (figure, plain)]
    assert panels[0] == panels[1] + 3
    forecast = finer_rows(1.6, size=0, num_seeds=1).assign(runner="moments", seed=pd.array([pd.NA], "Int64")[0])
    lines = [len(draw(data(pd.concat([table(), *more]))).axes[2].lines)
             for more in ([finer_rows(1.6)], [finer_rows(1.6), forecast])]  # fmt: skip
    assert lines[1] == lines[0] + 3


def test_best_rates_know_how_well_they_are_known():
    cube = Cube(data(finer_rows(1.6)).query("optimizer == 'DP-SGD'"))
    found = best_rates(cube)
    assert list(found) == sorted(FINER[IMDB.name].noise_multipliers)
    for z, rate in found.items():
        assert rate.low < 5 / z**1.6 < rate.high and rate.high / rate.low < 1.5


def test_optimizers_are_compared_at_the_seeds_that_both_have():
    rows = data(finer_rows(1.6))
    sgd, adam = (rows[rows["optimizer"] == name] for name in ("DP-SGD", "DP-Adam"))

    def lacking(part, seed):
        return part.drop(part[part["seed"] == seed].index[0])  # at one cell

    both = slope(Cube(sgd[~sgd["seed"].isin([2, 5])]), Cube(adam[~adam["seed"].isin([2, 5])]))
    assert slope(Cube(lacking(sgd, 2)), Cube(lacking(adam, 5))).value == pytest.approx(both.value, abs=0.02)
    by_seed = [cube.seeds.tolist() for cube in (Cube(lacking(sgd, 2)), Cube(lacking(adam, 5)))]
    assert by_seed == [[0, 1, *range(3, 10)], [*range(5), *range(6, 10)]]
    assert stacked(Cube(lacking(sgd, 2)), Cube(lacking(adam, 5))).shape[1] == 8
    one = sgd[sgd["seed"] == 0]
    with pytest.raises(ValueError, match="Expected a seed that has every cell"):
        Cube(pd.concat([one[1:], one[:1].assign(seed=1)]))
