"""From a checked file to the questions it asks: one for each problem and batch size."""

from collections.abc import Sequence
from dataclasses import replace

from noisecast.privacy.calibration import calibrate_noise_multiplier
from noisecast.privacy.mechanism import SampledGaussian
from noisecast.privacy.sampling import Sampler, Stream, adjacency_named, sampler_named, steps_per_epoch
from noisecast.problems.problem import Problem
from noisecast.question import Question
from noisecast.scenario import Scenario
from noisecast.scenario_file.cells import Cell, cells
from noisecast.scenario_file.document import Document
from noisecast.scenario_file.mistakes import ScenarioFileError
from noisecast.scenario_file.tables import RUNNER_NAMES, MechanismTable


def questions_of(document: Document) -> tuple[Question, ...]:
    """Read the data, calibrate the noise, and put every cell to every problem.

    Raises: ScenarioFileError, with every mistake that only the data can show.
    """
    found: list[Question] = []
    mistakes: list[str] = []
    chosen = cells(document)
    for table in document.problems:
        try:
            problem = table.build(document.path.parent)
        except ValueError as error:
            mistakes.append(str(error))
            continue
        for batch_size in document.mechanism.batch_size:
            # Random draws may leave a batch size out.
            if asked := [cell for cell in chosen if cell.batch_size == batch_size]:
                try:
                    found.append(_question(document, problem, batch_size, asked))
                except ValueError as error:
                    mistakes.append(str(error))
    if mistakes:
        raise ScenarioFileError(f"{document.path}: {mistake}" for mistake in dict.fromkeys(mistakes))
    return tuple(found)


def _question(document: Document, problem: Problem, batch_size: float, chosen: Sequence[Cell]) -> Question:
    settings = document.settings
    sampler = _sampler(document.mechanism, batch_size, problem)
    q = sampler.sampling_probability
    each_epoch = 0 if q is None else int(steps_per_epoch(q))  # 0: a stream has no epochs, and the rules refuse them
    num_steps, record_at = settings.steps(each_epoch), settings.steps_recorded(each_epoch)
    schedule, delta = settings.schedule_of(num_steps), settings.delta(problem.num_examples)
    mechanisms = {
        noise: _mechanism(document, sampler, noise, num_steps, delta)
        for noise in dict.fromkeys(cell.noise for cell in chosen)
    }
    scenarios = [
        Scenario(
            problem=problem,
            mechanism=replace(mechanisms[cell.noise], l2_clip_norm=cell.l2_clip_norm),
            optimizer=cell.optimizer.build(cell.learning_rate),
            num_steps=num_steps,
            target_delta=delta,
            schedule=schedule,
        )
        for cell in chosen
    ]
    return Question(
        # By id: where the lists of two tables overlap, a cell is asked once.
        scenarios=tuple({scenario.id: scenario for scenario in scenarios}.values()),
        runners=tuple(RUNNER_NAMES[name] for name in settings.runners),
        num_seeds=settings.num_seeds,
        insecure_seeds=None if settings.insecure_seeds is None else tuple(settings.insecure_seeds),
        record_at=record_at,
    )


def _mechanism(document: Document, sampler: Sampler, noise: float, num_steps: int, delta: float) -> SampledGaussian:
    """With this noise multiplier, or with the one that this target epsilon needs."""
    table = document.mechanism
    adjacency = adjacency_named(table.adjacency, table.sampler or "poisson")
    base = SampledGaussian(noise_multiplier=0.0, l2_clip_norm=1.0, sampler=sampler, adjacency=adjacency)
    if table.target_epsilon is None:
        return base.with_noise_multiplier(noise)
    return calibrate_noise_multiplier(base, target_epsilon=noise, target_delta=delta, num_steps=num_steps)


def _sampler(table: MechanismTable, batch_size: float, problem: Problem) -> Sampler:
    if problem.num_examples is None:
        if batch_size != int(batch_size):
            raise ValueError(f"Expected batch_size to be a whole number of fresh examples, got {batch_size}.")
        return Stream(int(batch_size))
    return sampler_named(table.sampler or "poisson", batch_size, problem.num_examples)
