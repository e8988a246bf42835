"""The paper's figure on the hypergeometric function: what its normalised-gradient lemmas neglect, and when that counts.

The lemmas (App. A) set E[X/|X|] = K(nu) mu / (sigma sqrt d) for X ~ t_nu(mu, sigma^2 I_d), that is, Kummer's function
1F1(1/2; d/2+1; -z) = 1 with z = |mu|^2 / (2 sigma^2). The picture has that function against z, as the paper's, and the
lemmas' factor, and the one that replaces it, over the exact one against x = |mu| / (sigma sqrt d), which decides.
"""

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import scipy.stats
from matplotlib.figure import Figure

from noisecast.figures._style import RC
from noisecast.reproduction import fig_sde
from noisecast.reproduction.claims import Claim
from noisecast.theory import gaussian

TITLE = "Normalised gradients: the hypergeometric function that the paper's lemmas set to 1"
SECONDS = {"quick": 10, "paper": 60}  # on two cores

KUMMER, FACTORS = "kummer", "factors"  # the two parts of the frame
NUM_PARAMS = (10, 100, 1_000, 10_000)
DEGREES_OF_FREEDOM = (1.0, 3.0, math.inf)
RATIOS = np.geomspace(0.01, 300, 91)  # x = |mu| / (sigma sqrt d)
DRAWN_RATIOS = RATIOS[::9]
NUM_PAIRS = {"quick": 200_000, "paper": 2_000_000}
REALISTIC_Z = 100.0  # "at most O(10^2)" in the networks that the paper cites
CHANCE = 0.01

SHADES = ("#bbbbbb", "#888888", "#444444", "#000000")
NU_COLOURS = {1.0: "#CC79A7", 3.0: "#E69F00", math.inf: "#0072B2"}
RINGS = {1.0: 8.0, 3.0: 5.5, math.inf: 3.0}


def run(
    scale: str = "quick",
    *,
    progress: Callable[[float, float | None], None] = lambda share, seconds_left: None,
) -> pd.DataFrame:
    """The factor a in E[X/|X|] = a mu with sigma = 1: exact, as printed, by norm concentration, by Monte Carlo.

    Not what a runner says about a scenario, so this is a frame of its own: `part, num_params, degrees_of_freedom,
    ratio, z, kummer, exact, as_printed, concentrated, monte_carlo, standard_error, num_pairs`. The seed is fixed:
    nothing here is private.
    """
    frames = [_kummer(num_params) for num_params in NUM_PARAMS]
    cases = list(product(NUM_PARAMS, DEGREES_OF_FREEDOM))
    for done, (num_params, nu) in enumerate(cases, start=1):
        frames.append(_factors(num_params, nu, NUM_PAIRS[scale]))
        progress(done / len(cases), None)
    return pd.concat(frames, ignore_index=True)


def data(table: pd.DataFrame) -> pd.DataFrame:
    """The frame that is drawn: `run`'s own."""
    return table


def claims(frame: pd.DataFrame) -> list[Claim]:
    """What the lemmas say of their approximation, where it holds, and what replaces it."""
    return [
        _kummer_is_one(),
        *(_relative_error_within_tolerance(nu) for nu in (math.inf, 1.0)),
        _remainder_falls(),
        *(_holds_at_the_papers_starts(shape) for shape in ("quadratic", "quartic")),
        _concentration(frame),
        _exact_form_is_right(frame),
    ]


def draw(frame: pd.DataFrame) -> Figure:
    """Left: the paper's own figure. Right: approximations over the exact factor, for d = 100 and d = 10,000."""
    with mpl.rc_context(RC):
        figure = Figure(figsize=(11.5, 4.3), layout="constrained")
        panels = figure.subplots(1, 3)
        _draw_kummer(panels[0], frame)
        for panel, num_params in zip(panels[1:], (100, 10_000)):
            _draw_ratios(panel, frame, num_params)
        panels[1].legend(fontsize=7, loc="upper left")
        _mark_starts(panels[2])
        figure.suptitle("E[X/|X|] = a μ for X = μ + σ t_ν(0, I_d):   a ≈ K(ν)/(σ√d) needs |μ| ≪ σ√d", fontsize=10)
    return figure


# --- The frame --------------------------------------------------------------------------------------------------------


def _exact(ratio: Any, num_params: int, nu: float) -> Any:
    """a at sigma = 1 and |mu| = ratio sqrt(d)."""
    return gaussian.normalised_gradient_factor(ratio * math.sqrt(num_params), **_law(num_params, nu))


def _as_printed(num_params: int, nu: float) -> float:
    return gaussian.normalised_gradient_factor_as_printed(**_law(num_params, nu))


def _concentrated(ratio: Any, num_params: int, nu: float) -> Any:
    return gaussian.concentrated_normalised_gradient_factor(ratio * math.sqrt(num_params), **_law(num_params, nu))


def _law(num_params: int, nu: float) -> dict[str, Any]:
    return {"num_params": num_params, "example_noise_std": 1.0, "degrees_of_freedom": nu}


def kummer(z: Any, num_params: int) -> Any:
    """1F1(1/2; d/2+1; -z): the Gaussian factor over its value at mu = 0.

    >>> bool(abs(kummer(1.0, 10) - 0.924748) < 1e-6)
    True
    """
    ratio = np.sqrt(2 * np.asarray(z) / num_params)
    return _exact(ratio, num_params, math.inf) / _exact(0.0, num_params, math.inf)


def _kummer(num_params: int) -> pd.DataFrame:
    z = np.geomspace(0.1, 1e5, 61)
    return pd.DataFrame({"part": KUMMER, "num_params": num_params, "z": z, "kummer": kummer(z, num_params)})


def _factors(num_params: int, nu: float, num_pairs: int) -> pd.DataFrame:
    frame = pd.DataFrame(
        {
            "part": FACTORS, "num_params": num_params, "degrees_of_freedom": nu, "ratio": RATIOS,
            "z": num_params * RATIOS**2 / 2, "exact": _exact(RATIOS, num_params, nu),
            "as_printed": _as_printed(num_params, nu), "concentrated": _concentrated(RATIOS, num_params, nu),
        }
    )  # fmt: skip
    rng = np.random.default_rng([num_params, 0 if math.isinf(nu) else int(nu)])
    drawn = np.isin(RATIOS, DRAWN_RATIOS)
    found = [_monte_carlo(float(ratio), num_params, nu, num_pairs, rng) for ratio in DRAWN_RATIOS]
    frame.loc[drawn, ["monte_carlo", "standard_error"]] = np.array(found)
    frame.loc[drawn, "num_pairs"] = num_pairs
    return frame


def _monte_carlo(ratio: float, num_params: int, nu: float, num_pairs: int, rng: Any) -> tuple[float, float]:
    """Mean and standard error of X_1/(|X| |mu|), where mu points along the first axis.

    Only that coordinate and the length of the others are drawn. Each draw is paired with its mirror image, without
    which a small mu would drown in noise.
    """
    length = ratio * math.sqrt(num_params)
    scale = 1.0 if math.isinf(nu) else np.sqrt(nu / rng.chisquare(nu, num_pairs))
    along = scale * rng.standard_normal(num_pairs)
    across = scale**2 * rng.chisquare(num_params - 1, num_pairs)
    cosines = [(length + side) / np.sqrt((length + side) ** 2 + across) for side in (along, -along)]
    factors = (cosines[0] + cosines[1]) / (2 * length)
    return float(factors.mean()), float(scipy.stats.sem(factors))


# --- Claims -----------------------------------------------------------------------------------------------------------

EXACT_NUMBER = "exact: no interval"


def _kummer_is_one() -> Claim:
    num_params = 10_000  # "d = Omega(10^4)"
    value = float(1 - kummer(REALISTIC_Z, num_params))
    return Claim(
        source="Remark SNR, Fig. hypgeom",
        statement="In the realistic range (z up to 100), 1F1 is 1 to high accuracy once d is 10,000.",
        measure=f"1 - 1F1 at z = 100, d = 10,000 ({EXACT_NUMBER})",
        value=value, low=np.nan, high=np.nan,
        wanted="< 0.01",
        holds=value < 0.01,
        theory=f"z/(d+2) = {REALISTIC_Z / (num_params + 2):.4f}",
    )  # fmt: skip


def _relative_error_within_tolerance(nu: float) -> Claim:
    """The lemmas' condition z/(d+2) < epsilon at epsilon = 0.01, on its boundary."""
    tolerance, num_params = 0.01, 10_000
    ratio = math.sqrt(2 * tolerance * (num_params + 2) / num_params)
    value = float(_as_printed(num_params, nu) / _exact(ratio, num_params, nu) - 1) / tolerance
    gaussian_law, growth = math.isinf(nu), 1.0 if math.isinf(nu) else (nu + 1) / nu
    wanted = 1.05  # 3/(4d) and the next order
    return Claim(
        source="Lemma lem:1" if gaussian_law else "Lemma cor:gradapprox",
        statement="Where z/(d+2) < ε, the approximation is within the tolerance ε "
        + ("(Gaussian)." if gaussian_law else f"(Student, ν = {nu:g})."),
        measure=f"relative error ÷ ε on the boundary, ε = 0.01, d = 10,000 ({EXACT_NUMBER})",
        value=value, low=np.nan, high=np.nan,
        wanted=f"< {wanted:g}",
        holds=value < wanted,
        theory=f"{growth:g} to first order: (ν+1)/ν",
        corrected="" if value < wanted else "The relative error is (ν+1)/ν · z/(d+2): heavy tails need a smaller z.",
    )  # fmt: skip


def _remainder_falls() -> Claim:
    """|E[X/|X|] - K mu/(sigma sqrt d)| on the boundary of the condition, where d alone grows."""
    tolerance, dimensions = 0.1, np.array([100, 1_000, 10_000, 100_000, 1_000_000])
    ratios = np.sqrt(2 * tolerance * (dimensions + 2) / dimensions)
    errors = [
        abs(_as_printed(d, math.inf) - _exact(x, d, math.inf)) * x * math.sqrt(d) for x, d in zip(ratios, dimensions)
    ]
    slope = float(np.polyfit(np.log(dimensions), np.log(errors), 1)[0])
    return Claim(
        source="Lemma lem:1, Lemma cor:gradapprox",
        statement="At a fixed tolerance ε, the remainder is ε · O(d^(-3/2)).",
        measure=f"slope of log |remainder| in log d from 100 to 1,000,000, at z/(d+2) = ε = 0.1 ({EXACT_NUMBER})",
        value=slope, low=np.nan, high=np.nan,
        wanted="-1.6 to -1.4",
        holds=-1.6 < slope < -1.4,
        theory="0: the remainder is a share of what it corrects",
        corrected="The remainder is (|μ|/(σ√d)) (O(ε) + O(1/d)); d^(-3/2) only at a fixed |μ|/σ.",
    )  # fmt: skip


def _holds_at_the_papers_starts(shape: str) -> Claim:
    ratio, num_params = starting_ratio(shape), fig_sde.NUM_PARAMS
    value = float(_as_printed(num_params, 1.0) / _exact(ratio, num_params, 1.0))
    concentrated = float(_concentrated(ratio, num_params, 1.0) / _exact(ratio, num_params, 1.0))
    return Claim(
        source="Lemma cor:gradapprox, Fig. sdevalidation",
        statement=f"The approximation applies where the paper validates its SDEs: start of the {shape}, ν = 1.",
        measure=f"printed factor ÷ exact factor at |μ|/(σ√d) = {ratio:.3g}, d = {num_params:,} ({EXACT_NUMBER})",
        value=value, low=np.nan, high=np.nan,
        wanted="0.9 to 1.1",
        holds=0.9 < value < 1.1,
        theory=f"norm concentration ÷ exact: {concentrated:.4f}",
        corrected="a = E[1/R] with R² = |μ|² + dσ²ν/S, S chi-square of ν, holds at every |μ|.",
    )  # fmt: skip


def starting_ratio(shape: str) -> float:
    """|grad f(x0)| / (sigma sqrt d) of the paper's SDE validation."""
    problem: Any = next(s.problem for s in fig_sde.scenarios() if s.problem.name.startswith(shape))
    gradient = np.asarray(problem.gradient(problem.start), np.float64)
    return float(np.linalg.norm(gradient) / (problem.example_noise_std * math.sqrt(len(gradient))))


def _concentration(frame: pd.DataFrame) -> Claim:
    wide: Any = frame[(frame["part"] == FACTORS) & (frame["num_params"] >= 100)]
    error = (wide["concentrated"] / wide["exact"] - 1).abs()
    worst = wide.loc[error.idxmax()]
    return Claim(
        source="own derivation, in place of Lemma cor:gradapprox",
        statement="Norm concentration gives the factor at every |μ| from d = 100 on.",
        measure=f"largest relative error over {len(wide)} points, at d = {worst['num_params']:,.0f}, "
        f"ν = {worst['degrees_of_freedom']:g} ({EXACT_NUMBER})",
        value=float(error.max()), low=np.nan, high=np.nan,
        wanted="< 0.003",
        holds=bool(error.max() < 0.003),
        theory="1/(4d) = 0.0025 at d = 100",
    )  # fmt: skip


def _exact_form_is_right(frame: pd.DataFrame) -> Claim:
    drawn: Any = frame[frame["monte_carlo"].notna()]
    z = ((drawn["monte_carlo"] - drawn["exact"]) / drawn["standard_error"]).abs()
    bound = float(scipy.stats.norm.isf(CHANCE / (2 * len(drawn))))
    precision = float((drawn["standard_error"] / drawn["exact"]).max())
    return Claim(
        source="Proofs of Lemma lem:1 and Lemma cor:gradapprox",
        statement="The 1F1 (Gaussian) and 2F1 (Student) forms are the exact expectations.",
        measure=f"largest distance from Monte Carlo in standard errors, {len(drawn)} points, each to {precision:.1g} "
        "or better (a maximum has no interval)",
        value=float(z.max()), low=np.nan, high=np.nan,
        wanted=f"< {bound:.2f}",
        holds=bool(z.max() < bound),
    )  # fmt: skip


# --- The picture ------------------------------------------------------------------------------------------------------


def _draw_kummer(axes: Any, frame: pd.DataFrame) -> None:
    part: Any = frame[frame["part"] == KUMMER]
    for (num_params, curve), shade in zip(part.groupby("num_params"), SHADES):
        axes.plot(curve["z"], curve["kummer"], color=shade, label=f"d = {num_params:,}")
    axes.axvspan(part["z"].min(), REALISTIC_Z, color="#009E73", alpha=0.12, linewidth=0)
    axes.annotate("realistic z\n(the paper)", (0.14, 0.32), fontsize=8, color="#00694c")
    axes.set(xscale="log", xlabel="z = |μ|² / (2σ²)", ylabel="₁F₁(1/2; d/2+1; −z)", ylim=(0, 1.05))
    axes.set_title("the paper's figure: is it 1?")
    axes.margins(x=0)
    axes.legend(fontsize=8, loc="lower left")


def _draw_ratios(axes: Any, frame: pd.DataFrame, num_params: int) -> None:
    shown: Any = frame[(frame["part"] == FACTORS) & (frame["num_params"] == num_params)]
    for nu, curve in shown.groupby("degrees_of_freedom"):
        colour, name = NU_COLOURS[float(nu)], "∞" if math.isinf(float(nu)) else f"{nu:g}"
        axes.plot(
            curve["ratio"], curve["as_printed"] / curve["exact"], linestyle=":", linewidth=2, color=colour,
            label=f"K(ν)/(σ√d) ÷ exact, ν = {name}",
        )  # fmt: skip
        drawn = curve[curve["monte_carlo"].notna()]
        # Rings of three sizes: the three laws lie upon each other at 1.
        axes.plot(
            drawn["ratio"], drawn["monte_carlo"] / drawn["exact"], "o", markersize=RINGS[float(nu)], color=colour,
            markerfacecolor="none", label=f"Monte Carlo ÷ exact, ν = {name}",
        )  # fmt: skip
    worst = shown.loc[(shown["concentrated"] / shown["exact"] - 1).abs().groupby(shown["ratio"]).idxmax()]
    axes.plot(worst["ratio"], worst["concentrated"] / worst["exact"], color="black", linewidth=1.2,
              label="norm concentration ÷ exact, worst ν")  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="x = |μ| / (σ√d)", ylim=(0.7, 400), title=f"d = {num_params:,}")
    if num_params == 100:
        axes.set_ylabel("approximation ÷ exact")
    ticks = (1, 2, 5, 10, 50, 200)
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()


def _mark_starts(axes: Any) -> None:
    axes.axvline(math.sqrt(2 * REALISTIC_Z / 10_000), color="#009E73", linewidth=1)
    axes.annotate("z = 100", (0.13, 60), fontsize=8, color="#00694c", rotation=90, ha="right")
    for shape in ("quadratic", "quartic"):
        ratio = starting_ratio(shape)
        axes.axvline(ratio, color="#666666", linewidth=0.8, linestyle="-.")
        axes.annotate(
            f"start of the paper's {shape}", (ratio * 0.93, 9 if shape == "quadratic" else 1.6), fontsize=8,
            rotation=90, ha="right", color="#444444",
        )  # fmt: skip
