"""What the workloads on linear models share: the task, our engines in training, a stand-in for absent data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from typing import Any

import numpy as np
import scipy.sparse

from benchmarks.race import Contestant
from noisecast.privacy.noise import RandomRoot
from noisecast.privacy.sampling import FixedSize
from noisecast.problems.datasets import DataError, Dataset
from noisecast.scenario import Scenario

ROOT = RandomRoot.from_insecure_seed(0)
# Adam's are not the usual 0.999 and 1e-8: with those, single precision alone moves a noiseless step by 1e-4 (1 - 0.999
# keeps four digits, and gradients that cancel are divided by their own rounding), and peers could not be checked. What
# a step costs does not depend on them.
SETTINGS: dict[str, dict[str, float]] = {
    "DP-SGD": {"learning_rate": 0.5},
    "DP-SignSGD": {"learning_rate": 1e-3},
    "DP-Adam": {"learning_rate": 1e-3, "b1": 0.9, "b2": 0.99, "eps": 1e-4},
}
NUM_PEER_BATCHES = 16


@dataclass(frozen=True)
class LinearTask:
    """A linear model on a data set: logistic for two classes, softmax for more.

    Args:
      data: training examples, sparse.
      l2_clip_norm: C, near the norm of a typical gradient, so that some are clipped and some are not.
      batch_size: B, the same in every step.
    """

    data: Dataset
    l2_clip_norm: float
    batch_size: int = 64

    @property
    def num_outputs(self) -> int:
        return 1 if self.data.num_classes == 2 else self.data.num_classes

    @property
    def sampler(self) -> FixedSize:
        return FixedSize(self.batch_size, self.data.num_examples)

    def batches(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The first batches of our own run as dense matrices: (B, p) float32 and labels (B,) int32."""
        batches = rows_of_batches(scenarios_of(self, "DP-SGD", 1, 1.0)[0], NUM_PEER_BATCHES)
        return [(self.data.features[rows].toarray(), self.data.labels[rows]) for rows in batches]


def rows_of_batches(scenario: Scenario, count: int) -> list[np.ndarray]:
    """Which examples the first batches of our own run hold, under `ROOT`: (B,) each, whatever the optimizer."""
    from noisecast.engines.keys import batch_key

    num_examples = scenario.problem.num_examples
    assert num_examples is not None
    key = batch_key(scenario, root=ROOT, repeat=0)
    drawn = scenario.mechanism.sampler.batches(key, 0, count, num_examples)
    return [indices[mask] for indices, mask in zip(drawn.indices, drawn.mask)]


class OurTrainee:
    """A group of runs in one of our engines: learning rates, clip norms and noise multipliers around the task's."""

    def __init__(self, task: LinearTask, engine: str, optimizer: str, runs: int, noise_multiplier: float):
        from noisecast import engines
        from noisecast.engines.dense import DenseRun

        start: Callable = DenseRun if engine == "dense" else engines.start
        self._run: Any = start(scenarios_of(task, optimizer, runs, noise_multiplier), repeats=[0], root=ROOT)
        if not type(self._run).__module__.endswith(engine):
            raise RuntimeError(f"Expected the engine {engine} for {task.data.name}, got {type(self._run).__module__}.")

    def advance(self, num_steps: int) -> None:
        self._run.advance(self._run.step + num_steps)
        self._run.block_until_ready()
        self.params()  # noise that was postponed is due now

    def params(self) -> np.ndarray:
        return self._run.params[0, 0]


def ours(task: LinearTask, groups: Sequence[tuple[str, str, int]]) -> list[Contestant]:
    """Our engines, each group as (engine, optimizer, runs)."""
    return [
        Contestant(engine, None, optimizer, runs, partial(OurTrainee, task, engine, optimizer, runs))
        for engine, optimizer, runs in groups
    ]


def data_or_stand_in(read: Callable[[Any], tuple[Dataset, Dataset]], data_dir: str | None, **shape) -> Dataset:
    """The training examples; where there is no data folder or it lacks them, a stand-in that says so in its name."""
    try:
        return read(data_dir)[0]
    except DataError:
        if data_dir is not None:
            raise
        return stand_in(name=f"{read.__name__} (synthetic stand-in)", **shape)


def stand_in(*, name: str, num_examples: int, num_features: int, mean_words: int, num_classes: int) -> Dataset:
    """Texts of Zipf-distributed words as term frequencies, with labels by chance."""
    rng = np.random.default_rng(0)
    lengths = rng.poisson(mean_words, num_examples) + 1
    frequencies = (np.arange(num_features) + 10.0) ** -1.2  # as many different words a text and a batch as the real
    words = rng.choice(num_features, lengths.sum(), p=frequencies / frequencies.sum())
    texts = np.repeat(np.arange(num_examples), lengths)
    shape = (num_examples, num_features)
    features = scipy.sparse.csr_array(
        (np.repeat(1.0 / lengths, lengths).astype(np.float32), (texts, words)), shape=shape
    )
    labels = rng.integers(num_classes, size=num_examples)
    return Dataset(name, features, labels, tuple(str(label) for label in range(num_classes)))


def scenarios_of(task: LinearTask, optimizer: str, runs: int, noise_multiplier: float) -> list[Any]:
    from noisecast.optimizers import OPTIMIZERS
    from noisecast.privacy.mechanism import SampledGaussian
    from noisecast.privacy.sampling import Adjacency
    from noisecast.problems.linear import linear_model
    from noisecast.scenario import Scenario

    problem = linear_model(task.data)
    kind = next(kind for kind in OPTIMIZERS if kind.name == optimizer)
    settings = SETTINGS[optimizer]
    return [
        Scenario(
            problem=problem,
            mechanism=SampledGaussian(
                noise_multiplier=noise_multiplier * z,
                l2_clip_norm=task.l2_clip_norm * clip,
                sampler=task.sampler,
                adjacency=Adjacency.REPLACE_ONE,
            ),
            optimizer=kind(**settings | {"learning_rate": settings["learning_rate"] * rate}),
            num_steps=10**9,
        )
        for rate, clip, z in islice(product((1.0, 0.5, 0.25, 2.0), repeat=3), runs)
    ]
