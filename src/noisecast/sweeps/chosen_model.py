"""The model of the run that was chosen from a sweep: the same run once more, from the store's key."""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from noisecast import engines
from noisecast.privacy.noise import RandomRoot
from noisecast.question import Question
from noisecast.release import TrainedModel
from noisecast.runners import Training, repeats_of
from noisecast.scenario import Scenario
from noisecast.statement import NOT_COVERED, privacy_statement
from noisecast.sweeps.selection import Public, Selection
from noisecast.sweeps.store import Store
from noisecast.sweeps.tasks import Task

# Of the recorded score: alone instead of in its group a run differs by roundings, which a sign can make visible.
LARGEST_GAP = 0.05
LEAST = 1e-3  # of a score; what differs by less is the same


def chosen_model(selection: Selection, questions: Sequence[Question], store: Store) -> TrainedModel:
    """Parameters of the chosen run, and the statement with the epsilon of the whole procedure.

    A store keeps no parameters, but the key that a run's noise and batches are made of; so the run is repeated, and is
    the same release: no noise is drawn anew. It is looked at after the same steps, as a look draws the noise that rows
    lack so far. Its score must come out as it was recorded. Of random trials it is the only model that this store gives
    away (`Store.settle`).

    Args:
      selection: from `store`'s table, at a price that counts private runs.
      questions: of the sweep.   store: where it was run.
    Raises: ValueError: a choice on public data (whose model is yet to be trained on the private data), a scenario that
      is not in the questions, or a score that does not come out.
    """
    if isinstance(selection.price, Public):
        raise ValueError(
            "Expected a price that counts private runs, got public: its sweep saw no private data. Train the model on "
            "these with the chosen settings (noisecast train)."
        )
    question, scenario = _asked(selection, questions)
    repeats, root = repeats_of(question.num_seeds, question.insecure_seeds, store.kept_root(), question.first_seed)
    seed = repeats[0] if selection.seed is None else selection.seed
    looks = tuple(sorted({*(step for step in question.record_at if step <= scenario.num_steps), scenario.num_steps}))
    _check_in_store(scenario, seed, looks, root, store)
    if root.is_private and (reason := engines.why_not_for_release(scenario)) is not None:
        raise ValueError(reason)
    began = time.monotonic()
    run = engines.start([scenario], repeats=[seed], root=root)
    for step in looks:
        run.advance(step)
        found = run.evaluate()
    metrics = {name: float(value[0, 0]) for name, value in found.items()}
    _check_same(metrics, selection, store, seed)
    if selection.price.only_best:
        store.settle(selection)
    statement = privacy_statement(scenario, reproducible=not root.is_private, secure_noise=root.secure_noise)
    statement = replace(
        statement,
        nominal_epsilon=None,  # of one run: beside the procedure's it would mislead
        epsilon=selection.epsilon_of_procedure,
        accountant=selection.price.name,
        not_covered=(*_treated_as_public(scenario), *NOT_COVERED[1:]),  # choosing is covered
        chosen=selection.meaning,
    )
    return TrainedModel(scenario, engines.released_params(run, scenario), metrics, statement, time.monotonic() - began)


def _treated_as_public(scenario: Scenario) -> tuple[str, ...]:
    if scenario.problem.num_examples is None:  # of a population: there are no rows
        return ()
    return (
        f"The number of rows, {scenario.problem.num_examples:,}, which was treated as public.",
        "What the sweep took from the rows themselves, if it did: a vocabulary, names of the labels, the number of "
        "features.",
    )


def _asked(selection: Selection, questions: Sequence[Question]) -> tuple[Question, Scenario]:
    for question in questions:
        for scenario in question.scenarios:
            if scenario.id == selection.scenario:
                return question, scenario
    raise ValueError(
        f"Expected the chosen scenario {selection.scenario} among those of the sweep, found it not there: is this its "
        "sweep file, with the same data?"
    )


def _check_in_store(scenario: Scenario, seed: int, looks: tuple[int, ...], root: RandomRoot, store: Store) -> None:
    """Key, code, data, settings, seed and looks are those of a run in the store: before anything touches the data."""
    task = Task(runner=Training(), scenarios=(scenario,), repeats=(seed,), record_at=looks, root=root)
    if not store.cells.issuperset(task.cells):
        raise ValueError(
            "Expected a run of this store, found none with this key, code, data, settings and seed: it would be "
            "another release, which nothing has accounted for. Use the version of noisecast and the files of the sweep."
        )


def _check_same(metrics: dict[str, float], selection: Selection, store: Store, seed: int) -> None:
    table = store.read()
    ours = (table["scenario"] == selection.scenario) & (table["seed"] == seed) & (table["runner"] == Training.name)
    rows = table.loc[ours & (table["metric"] == selection.metric)]
    recorded = rows.loc[rows["step"] == rows["step"].max(), "value"].item()
    again = metrics[selection.metric]
    if not np.isclose(again, recorded, rtol=LARGEST_GAP, atol=LEAST):
        raise ValueError(
            f"Expected {selection.metric} to come out as recorded, {recorded:.6g}, got {again:.6g}, though key, code "
            "and data are the same: another machine rounds otherwise. Choose on the machine that ran the sweep."
        )
