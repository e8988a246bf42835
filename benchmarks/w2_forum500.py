"""W2: softmax regression on forum posts with 500 labels, d = 5,000,500, B = 64, one run."""

from benchmarks import peers
from benchmarks.linear_model import LinearTask, data_or_stand_in, ours
from benchmarks.race import Contestant
from noisecast.problems.datasets import forum500

NAME = "W2"


def contestants(data_dir: str | None) -> tuple[str, list[Contestant]]:
    """The name of the data, and who runs on it."""
    data = data_or_stand_in(
        forum500, data_dir, num_examples=246_092, num_features=10_000, mean_words=41, num_classes=500
    )
    task = LinearTask(data, l2_clip_norm=1.0)
    engines = ours(task, [("row_sparse", optimizer, 1) for optimizer in ("DP-SGD", "DP-SignSGD", "DP-Adam")])
    # Microbatches of 1 are JAX Privacy's fastest here, by three to five times over 2, 8 and 16.
    # functorch and ew hold a gradient for each example, as hooks does: one of the three will do.
    return data.name, engines + peers.on_linear_model(task, opacus_modes=("hooks", "ghost"), microbatch_size=1)
