"""W1: logistic regression on film reviews, d = 10,001, B = 64: one run, and 64 that differ in rate, clip and noise."""

from benchmarks import peers
from benchmarks.linear_model import LinearTask, data_or_stand_in, ours
from benchmarks.race import Contestant
from noisecast.problems.datasets import imdb

NAME = "W1"


def contestants(data_dir: str | None) -> tuple[str, list[Contestant]]:
    """The name of the data, and who runs on it."""
    data = data_or_stand_in(imdb, data_dir, num_examples=25_000, num_features=10_000, mean_words=148, num_classes=2)
    # Term frequencies are small: the gradient at 0 is the bias' 1/2 and little more.
    task = LinearTask(data, l2_clip_norm=0.5)
    groups = [("row_sparse", optimizer, runs) for runs in (1, 64) for optimizer in ("DP-SGD", "DP-SignSGD", "DP-Adam")]
    engines = ours(task, [*groups, ("dense", "DP-SGD", 64)])
    return data.name, engines + peers.on_linear_model(task, opacus_modes=("hooks", "functorch", "ew", "ghost"))
