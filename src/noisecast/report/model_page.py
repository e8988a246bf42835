"""The page of a model: its guarantee first, then what was computed without noise, and the settings to copy."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from noisecast.files import reason_of
from noisecast.optimizers import Schedule
from noisecast.printed import number
from noisecast.privacy.accounting import epsilon_curve, epsilon_spent, epsilon_text, noise_text
from noisecast.privacy.mechanism import Adjacency, SampledGaussian
from noisecast.privacy.sampling import FixedSize, Poisson, Sampler, Shuffled, Stream
from noisecast.report.chart_data import label_of
from noisecast.report.markup import Html, joined, page, tag
from noisecast.report.parts import (
    banner,
    chart,
    facts,
    footer,
    optimizer_name,
    scripted,
    section,
    settings_of_one,
    table,
    without_scripts,
)
from noisecast.report.snippets import Settings
from noisecast.table import METRICS

FACTORS = (0.5, 0.63, 0.79, 1.0, 1.26, 1.58, 2.0, 3.0, 4.0, 6.0, 8.0)  # of the model's own noise multiplier
POINTS = 16


def model_page(path: Path) -> str:
    """One page.

    Args:
      path: folder with privacy.json; model.json and non_private.json where they are.
    Raises: ValueError: a file of it cannot be read, or is something else.
    """
    privacy, described, metrics = (_read(path, name) for name in ("privacy.json", "model.json", "non_private.json"))
    try:
        statement = _Statement(privacy, described.get("scenario", {}))
        budget = statement.budget()
        title = f"The model {path.resolve().name}"
        parts = [
            tag(
                "header", tag("p", "Noisecast report · model", class_="eyebrow"), tag("h1", title), _guarantee(privacy)
            ),
            tag(
                "main",
                _promise(privacy),
                _what(described, privacy),
                _budget(budget, privacy),
                _measured(metrics),
                _tuning(privacy),
                _to_copy(statement),
            ),
            footer(),
        ]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path} is not a readable model folder ({type(error).__name__}: {error}); train it again, or give another."
        ) from None
    labels = {name: label_of(name) for name in ("noise_multiplier", "step")}
    data = {"kind": "model", "labels": labels, "delta": privacy["target_delta"], "budget": budget}
    return page(f"{title} · Noisecast report", joined(parts), data, ("chart.js", "page.js"))


def is_private(privacy: dict[str, Any]) -> bool:
    """Whether there is a guarantee at all."""
    return not privacy["reproducible"] and math.isfinite(float(privacy["epsilon"]))


class _Statement:
    """The numbers of privacy.json, and what can be made of them again."""

    def __init__(self, privacy: dict[str, Any], scenario: dict[str, Any]):
        self.privacy, self.scenario = privacy, scenario
        self.mechanism = self._mechanism()

    @property
    def settings(self) -> Settings | None:
        """None where the folder does not say the learning rate, or it changed: these write one rate down."""
        rate = self.scenario.get("learning_rate")
        if rate is None or "schedule" in self.scenario:
            return None
        p = self.privacy
        return Settings(
            optimizer=str(p["optimizer"]),
            learning_rate=float(rate),
            noise_multiplier=float(p["noise_multiplier"]),
            l2_clip_norm=float(p["l2_clip_norm"]),
            expected_batch_size=float(p["expected_batch_size"]),
            sampling_probability=self._probability(),
            num_steps=int(p["num_steps"]),
            target_delta=float(p["target_delta"]),
            sampler=None if self.mechanism is None else self.mechanism.sampler,
            adjacency=str(p["adjacency"]),
        )

    def _probability(self) -> float | None:
        q = self.scenario.get("sampling_probability")
        return None if q is None else float(q)

    def _mechanism(self) -> SampledGaussian | None:
        """The mechanism, where its sentence and its epsilon tell which it was; else None."""
        p = self.privacy
        for sampler in self._samplers():
            adjacency = Adjacency(str(p["adjacency"]))
            if sampler.statement() != p["sampler"] or sampler.why_unsupported(adjacency) is not None:
                continue
            mechanism = SampledGaussian(
                noise_multiplier=float(p["noise_multiplier"]),
                l2_clip_norm=float(p["l2_clip_norm"]),
                sampler=sampler,
                adjacency=adjacency,
            )
            if p.get("chosen") or not self._spends(mechanism):
                continue
            return mechanism
        return None

    def _samplers(self) -> Iterator[Sampler]:
        batch, q = float(self.privacy["expected_batch_size"]), self._probability()
        if q is None:
            if batch.is_integer():
                yield Stream(int(batch))
            return
        yield Poisson(q, batch)
        if batch.is_integer():
            yield FixedSize(int(batch), round(batch / q))
            yield Shuffled(int(batch), round(batch / q))

    def _spends(self, mechanism: SampledGaussian) -> bool:
        p = self.privacy
        spent = epsilon_spent(mechanism, num_steps=int(p["num_steps"]), target_delta=float(p["target_delta"]))
        return bool(np.isclose(spent.epsilon, float(p["epsilon"]), rtol=1e-6))

    def budget(self) -> dict[str, Any] | None:
        """Upper bounds on epsilon by noise multiplier and step, for the same batches; None where they are unknown."""
        mechanism, p = self.mechanism, self.privacy
        if mechanism is None or mechanism.noise_multiplier == 0:
            return None
        num_steps, delta = int(p["num_steps"]), float(p["target_delta"])
        each_epoch = mechanism.sampler.steps_per_epoch if isinstance(mechanism.sampler, Shuffled) else 1
        steps = sorted({max(1, round(s)) for s in np.linspace(num_steps / POINTS, num_steps, POINTS)})
        steps = sorted({max(each_epoch, step - step % each_epoch) for step in steps} | {num_steps})
        multipliers = [factor * mechanism.noise_multiplier for factor in FACTORS]
        own, stated = FACTORS.index(1.0), float(p["epsilon"])
        # As much noise or more, for as many steps or fewer, costs no more than what was stated.
        most = [stated if i >= own else math.inf for i in range(len(FACTORS))]
        curves = [
            np.minimum(epsilon_curve(mechanism.with_noise_multiplier(z), steps, delta), largest).tolist()
            for z, largest in zip(multipliers, most, strict=True)
        ]
        return {
            "multipliers": multipliers,
            "texts": [f"{z:.4g}" + (" (this model)" if i == own else "") for i, z in enumerate(multipliers)],
            "steps": steps,
            "epsilons": curves,
            "ends": [epsilon_text(curve[-1], 3) for curve in curves],
            "own": own,
        }


# --- Parts ----------------------------------------------------------------------------------------------


def _guarantee(privacy: dict[str, Any]) -> Html:
    sentence = tag("blockquote", str(privacy["sentence"]))
    if not is_private(privacy):
        return banner("NOT private", sentence, kind="bad")
    head = f"ε = {epsilon_text(float(privacy['epsilon']), 3)} at δ = {float(privacy['target_delta']):g}"
    return banner(head, sentence, kind="good")


def _promise(privacy: dict[str, Any]) -> Html:
    epsilon = float(privacy["epsilon"])
    if privacy["reproducible"]:
        epsilon = math.inf  # whatever the file says: who knows the seed can take the noise away
    rows: list[tuple[str, Any]] = [
        ("ε", epsilon_text(epsilon, 4)),
        ("δ", f"{float(privacy['target_delta']):g}"),
        ("With respect to", f"{privacy['neighbours']} {privacy['unit']}"),
        ("Released", str(privacy["released"])),
        ("Proven by", f"the {privacy['accountant']} accountant"),
        ("Batches", str(privacy["sampler"])),
        ("Randomness", str(privacy["noise"])),
    ]
    if privacy.get("note"):
        rows.append(("Note", str(privacy["note"])))
    if privacy.get("nominal_epsilon") is not None:
        rows.append(("Nominal ε, not a guarantee", number(float(privacy["nominal_epsilon"]), 3)))
    outside = tag("ul", *(tag("li", str(sentence)) for sentence in privacy["not_covered"]), class_="plain")
    return section("What is promised, and what is not", facts(rows), tag("h3", "Not covered"), outside, id_="privacy")


def _what(described: dict[str, Any], privacy: dict[str, Any]) -> Html:
    scenario = described.get("scenario", {})
    rows: list[tuple[str, Any]] = []
    if scenario.get("problem") is not None:
        rows.append(("Problem", str(scenario["problem"])))
    names = [str(name) for name in described.get("label_names", [])]
    if names:
        shown = ", ".join(names[:12]) + (f" and {len(names) - 12:,} more" if len(names) > 12 else "")
        rows.append((f"{len(names):,} classes", shown))
    rows.append(("Optimizer", optimizer_name(str(privacy["optimizer"]))))
    if scenario.get("learning_rate") is not None:
        changes = scenario.get("schedule")
        phases = f", {Schedule(**changes)}" if changes else ""
        rows.append(("Learning rate", number(float(scenario["learning_rate"])) + phases))
    rows += [
        ("Noise multiplier", noise_text(float(privacy["noise_multiplier"]))),
        ("Clip norm", number(float(privacy["l2_clip_norm"]))),
        ("Expected batch size", number(float(privacy["expected_batch_size"]))),
        ("Steps", f"{int(privacy['num_steps']):,}"),
    ]
    q = scenario.get("sampling_probability")
    if q is not None:
        examples = round(float(privacy["expected_batch_size"]) / float(q))
        rows.append(("Sampling probability", f"{float(q):.4g}, of {examples:,} examples"))
    return section("What was run", facts(rows), id_="run")


def _budget(budget: dict[str, Any] | None, privacy: dict[str, Any]) -> Html | None:
    if budget is None:
        return None
    live = scripted(
        tag("div", id="budget-controls", class_="controls"),
        tag("p", id="budget-say", class_="note live", aria_live="polite"),
        chart(
            "budget",
            "Quick upper bounds (RDP) for the same batches, cut off at the ε stated above where there is as much noise "
            "or more; what training states is tighter or equal.",
        ),
    )
    rows = [(f"{z:.4g}", end) for z, end in zip(budget["multipliers"], budget["ends"], strict=True)]
    columns = [("noise multiplier", ""), (f"ε after {budget['steps'][-1]:,} steps, at most", "")]
    still = table("Upper bounds: this model's as stated, others by the RDP accountant", columns, rows, cards=False)
    about = tag("p", "The same batches and steps with more or less noise. It says nothing of the loss: forecast that.")
    lost = tag("p", "This model's noise is known to whoever knows its seed; these are epsilons of runs without one.")
    return section(
        "What another budget would take",
        about,
        lost if privacy["reproducible"] else None,
        live,
        without_scripts(still),
        id_="budget",
    )


def _measured(metrics: dict[str, Any]) -> Html:
    about = tag("p", "Computed from the examples without noise: not covered by ε, and not for release.")
    known = [name for name in METRICS if name in metrics]
    rows = [(METRICS[n].label.capitalize(), number(float(metrics[n]))) for n in known if metrics[n] is not None]
    rows += [(name, str(value)) for name, value in metrics.items() if name not in METRICS]
    return section("How good it is", about, facts(rows) if rows else tag("p", "Nothing was recorded."), id_="measured",
                   non_private=True)  # fmt: skip


def _tuning(privacy: dict[str, Any]) -> Html:
    if privacy.get("chosen"):
        parts = [tag("p", "This model was chosen among several, and the ε above is that of the whole procedure."),
                 tag("p", str(privacy["chosen"]))]  # fmt: skip
    else:
        parts = [
            tag(
                "p",
                "The ε above is that of one run. If its settings were tuned on this data, tuning is not in it: only a "
                "sweep on public data, or one that is counted (noisecast select --price), makes a guarantee of "
                "the whole.",
            )
        ]
    return section("The price of tuning", *parts, id_="price")


def _to_copy(statement: _Statement) -> Html:
    settings = statement.settings
    if settings is None:
        why = "This folder does not say the learning rate, so there is nothing to copy; its sweep does."
        if "schedule" in statement.scenario:
            why = "The learning rate changed along the run, and these settings would write one rate down."
        return section("Settings to copy", tag("p", why), id_="copy")
    return settings_of_one(settings)


def _read(path: Path, name: str) -> dict[str, Any]:
    file = path / name
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file}: {reason_of(error)}; mend that, or bring the model back from a copy.") from None
    except (ValueError, RecursionError):  # 1,000 brackets
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{file} cannot be read as JSON; bring the model back from a copy.")
    return content
