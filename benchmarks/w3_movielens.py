"""W3: factorisation of MovieLens-100k, d = 262,500, B = 64, one run."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.linear_model import NUM_PEER_BATCHES, ROOT, rows_of_batches
from benchmarks.linear_model import SETTINGS as LINEAR_SETTINGS
from benchmarks.peers import FixedBatches, PrivateSteps
from benchmarks.race import Contestant
from noisecast.privacy.sampling import FixedSize
from noisecast.problems.datasets import DataError, Ratings, movielens, public_split

NAME = "W3"
# Rows do not start at 0: updates must be large beside their rounding for peers to be checked. And where gradients are
# small, Adam divides by eps, which must not magnify that our norms are rounded up (see `squared_norm_bound`).
SETTINGS = LINEAR_SETTINGS | {"DP-Adam": LINEAR_SETTINGS["DP-Adam"] | {"learning_rate": 0.05, "eps": 1e-2}}


@dataclass(frozen=True)
class FactorTask:
    """Matrix factorisation; the clip norm is near the norm of a typical gradient."""

    ratings: Ratings
    dim: int = 100
    center: float = 3.0
    l2_clip_norm: float = 1.5
    batch_size: int = 64

    @property
    def sampler(self) -> FixedSize:
        return FixedSize(self.batch_size, self.ratings.num_examples)

    def batches(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """The first batches of our own run: users, items (B,) int64, rating - center (B,) float32."""
        data, rows = self.ratings, rows_of_batches(_scenario(self, "DP-SGD", 1.0), NUM_PEER_BATCHES)
        return [(data.user[r].astype(int), data.item[r].astype(int), data.rating[r] - self.center) for r in rows]

    def start(self) -> np.ndarray:
        """Initial rows, users then items: (rows, dim)."""
        params = np.asarray(_scenario(self, "DP-SGD", 1.0).problem.initial_params())
        return params.reshape(-1, self.dim)


def contestants(data_dir: str | None) -> tuple[str, list[Contestant]]:
    """The name of the data, and who runs on it."""
    name, ratings = _ratings(data_dir)
    task = FactorTask(ratings)
    ours = [Contestant("row_sparse", None, kind, 1, partial(OurTrainee, task, kind)) for kind in SETTINGS]
    peers = []
    for optimizer in ("DP-SGD", "DP-Adam"):
        for mode in ("ghost", "hooks"):
            start: Any = partial(opacus, task, optimizer, mode)
            peers.append(Contestant(f"Opacus {mode}", "Opacus", optimizer, 1, start))
        start = partial(jax_privacy, task, optimizer)
        peers.append(Contestant("JAX Privacy", "JAX Privacy", optimizer, 1, start))
    return name, ours + peers


class OurTrainee:
    """One run in the row-sparse engine; its parameters are shown from where they started, as the update is compared."""

    def __init__(self, task: FactorTask, optimizer: str, noise_multiplier: float):
        from noisecast import engines

        scenario = _scenario(task, optimizer, noise_multiplier)
        self._run = engines.start([scenario], repeats=[0], root=ROOT)
        if not type(self._run).__module__.endswith("row_sparse"):
            raise RuntimeError(f"Expected the engine row_sparse for W3, got {type(self._run).__module__}.")
        self._start = np.asarray(scenario.problem.initial_params())

    def advance(self, num_steps: int) -> None:
        self._run.advance(self._run.step + num_steps)
        self.params()  # noise that was postponed is due now

    def params(self) -> np.ndarray:
        return self._run.params[0, 0] - self._start


def opacus(task: FactorTask, optimizer: str, mode: str, noise_multiplier: float) -> FixedBatches:
    """Two embeddings, dense gradients (every row gets noise), half the squared error."""
    import torch  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)

    class Factors(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.users = torch.nn.Embedding(task.ratings.num_users, task.dim)
            self.items = torch.nn.Embedding(task.ratings.num_items, task.dim)

        def forward(self, user, item):
            return (self.users(user) * self.items(item)).sum(dim=1)

    class HalfSquaredError(torch.nn.Module):
        reduction = "mean"

        def forward(self, predicted, rating):
            squares = 0.5 * (predicted - rating) ** 2
            return squares if self.reduction == "none" else squares.mean()

    return _steps(task, optimizer, noise_multiplier).opacus(Factors(), HalfSquaredError(), mode)


def jax_privacy(task: FactorTask, optimizer: str, noise_multiplier: float) -> FixedBatches:
    def loss(params, user, item, rating):
        users, items = params
        return 0.5 * (users[user] @ items[item] - rating) ** 2

    return _steps(task, optimizer, noise_multiplier).jax_privacy(loss, microbatch_size=1)


def _steps(task: FactorTask, optimizer: str, noise_multiplier: float) -> PrivateSteps:
    start = task.start()
    return PrivateSteps(
        optimizer,
        SETTINGS[optimizer],
        task.l2_clip_norm,
        noise_multiplier,
        task.batch_size,
        np.split(start, [task.ratings.num_users]),
        task.batches(),
        lambda arrays: (np.concatenate(arrays) - start).ravel(),
    )


def _ratings(data_dir: str | None) -> tuple[str, Ratings]:
    """The training ratings; where there is no data folder or it lacks them, a stand-in that says so in its name."""
    try:
        ratings = movielens(data_dir)
        return "movielens", ratings.rows(public_split(ratings.num_examples)[0])
    except DataError:
        if data_dir is not None:
            raise
    rng = np.random.default_rng(0)
    ids = []
    for size in (943, 1682):  # so skewed that a batch has as many different users and items as the real one
        popularity = 1.0 / (np.arange(size) + 100.0)
        ids.append(rng.choice(size, 80_000, p=popularity / popularity.sum()))
    ratings = rng.integers(1, 6, 80_000).astype(np.float32)
    return "movielens (synthetic stand-in)", Ratings(ids[0], ids[1], ratings, num_users=943, num_items=1682)


def _scenario(task: FactorTask, optimizer: str, noise_multiplier: float) -> Any:
    from noisecast.optimizers import OPTIMIZERS as KINDS
    from noisecast.privacy.mechanism import SampledGaussian
    from noisecast.privacy.sampling import Adjacency
    from noisecast.problems.matrix_factorization import matrix_factorization
    from noisecast.scenario import Scenario

    kind = next(kind for kind in KINDS if kind.name == optimizer)
    return Scenario(
        problem=matrix_factorization(task.ratings, dim=task.dim, center=task.center, public_init_seed=0),
        mechanism=SampledGaussian(
            noise_multiplier=noise_multiplier,
            l2_clip_norm=task.l2_clip_norm,
            sampler=task.sampler,
            adjacency=Adjacency.REPLACE_ONE,
        ),
        optimizer=kind(**SETTINGS[optimizer]),
        num_steps=10**9,
    )
