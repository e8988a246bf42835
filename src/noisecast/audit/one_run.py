"""One run on a real task, with many canaries of which each was in the data by the toss of a coin.

Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run" (NeurIPS 2023). The canaries are rows of the task
with a column of their own, half of them left out at random; after training the attacker looks at each column's weight,
guesses "in" for those that went farthest to its canary's label, "out" for the least, and abstains on the rest.
"""

import numpy as np
import scipy.sparse

from noisecast import engines
from noisecast.audit.bounds import lower_bound_of_guesses
from noisecast.audit.verdict import Verdict
from noisecast.optimizers import DPSGD, Optimizer, with_learning_rate
from noisecast.privacy.accounting import epsilon_spent
from noisecast.privacy.calibration import calibrate_noise_multiplier
from noisecast.privacy.mechanism import SampledGaussian
from noisecast.privacy.noise import Purpose, RandomRoot, key_for
from noisecast.privacy.sampling import Poisson
from noisecast.problems.datasets import Dataset, bundled
from noisecast.problems.linear import linear_model
from noisecast.scenario import Scenario

SIZE = 10.0  # of a canary's own feature: its gradient is that column, clipped while its residual is above a tenth
LARGEST_LOGIT = 1.0  # of a canary in training, so that the residual stays there
SHARE_GUESSED = 0.2  # of the canaries; fixed beforehand, so that nothing is chosen from the scores


def one_run_audit(
    optimizer: Optimizer,
    *,
    target_epsilon: float,
    target_delta: float,
    root: RandomRoot,
    num_canaries: int = 1000,
    batch_size: int = 500,
    num_steps: int = 200,
    confidence: float = 0.999,
    engine: str = "row_sparse",
    noise_multiplier: float | None = None,
) -> Verdict:
    """Train once on scikit-learn's breast-cancer data (public) and `num_canaries` canaries, and guess which were in.

    Args:
      optimizer: its learning rate is replaced.   target_epsilon, target_delta: what the noise is calibrated to.
      root: of all randomness, the coins included.
      num_canaries: m; >= 10.   batch_size, num_steps: of the run, Poisson-sampled.
      engine: "row_sparse" or "dense".
      noise_multiplier: instead of the calibrated one.
    Raises: ValueError: fewer canaries, or an engine that there is not.
    """
    if num_canaries < 10:
        raise ValueError(f"Expected at least 10 canaries, got {num_canaries}.")
    task, _ = bundled("breast_cancer")
    rng = np.random.default_rng(np.frombuffer(key_for(Purpose.DATA, "canaries", root=root, repeat=0), np.uint32))
    is_in = rng.random(num_canaries) < 0.5
    problem = linear_model(_with_canaries(task, is_in, engine))
    # The number of rows depends on the coins; the declared one does not.
    declared = len(task.labels) + num_canaries // 2
    mechanism = SampledGaussian(
        noise_multiplier=noise_multiplier or 0.0,
        l2_clip_norm=1.0,
        sampler=Poisson.for_batch_size(batch_size, declared),
    )
    if noise_multiplier is None:
        mechanism = calibrate_noise_multiplier(
            mechanism, target_epsilon=target_epsilon, target_delta=target_delta, num_steps=num_steps
        )
    optimizer = with_learning_rate(optimizer, _learning_rate(optimizer, num_steps, declared))
    scenario = Scenario(
        problem=problem, mechanism=mechanism, optimizer=optimizer, num_steps=num_steps, target_delta=target_delta
    )
    run = engines.start([scenario], repeats=[0], root=root)
    run.advance(num_steps)
    weights = run.params[0, 0, task.features.shape[1] : task.features.shape[1] + num_canaries]
    guesses = int(SHARE_GUESSED * num_canaries / 2)
    order = np.argsort(np.where(_canary_labels(num_canaries) == 1, weights, -weights), kind="stable")
    right = int((~is_in[order[:guesses]]).sum() + is_in[order[-guesses:]].sum())
    spent = epsilon_spent(mechanism, num_steps=num_steps, target_delta=target_delta)
    return Verdict(
        what=f"{num_canaries} canaries in one run, q = {mechanism.sampling_probability:.3g}, {num_steps} steps",
        optimizer=optimizer.name,
        engine=engine,
        epsilon=spent.epsilon,
        bound=lower_bound_of_guesses(right, 2 * guesses, num_canaries, delta=target_delta, confidence=confidence),
        runs=1,
        observer="parameters after the last step",
    )


def _learning_rate(optimizer: Optimizer, num_steps: int, num_examples: int) -> float:
    """As large as it may be: a canary's logit is SIZE times its weight, and where it is large nothing is clipped."""
    # Of DP-SGD a weight moves by C = 1 times the rate for each time it is drawn, over the batch; else by a rate a step.
    per_rate = num_steps / num_examples if isinstance(optimizer, DPSGD) else num_steps
    return LARGEST_LOGIT / SIZE / per_rate


def _canary_labels(num_canaries: int) -> np.ndarray:
    """Both in turn: of one label they would be learnt from the bias, and their gradients be short."""
    return np.arange(num_canaries, dtype=np.int32) % 2


def _with_canaries(task: Dataset, is_in: np.ndarray, engine: str) -> Dataset:
    """Rows of the task, then one row for each canary that is in: a column of its own, and nothing else."""
    if engine not in ("row_sparse", "dense"):
        raise ValueError(f"Expected the engine row_sparse or dense, got {engine}.")
    (present,) = np.nonzero(is_in)
    canaries = scipy.sparse.csr_array(
        (np.full(len(present), SIZE, np.float32), (np.arange(len(present)), present)),
        shape=(len(present), len(is_in)),
    )
    features = scipy.sparse.block_diag([scipy.sparse.csr_array(task.features), canaries], format="csr")
    labels = np.concatenate([np.asarray(task.labels), _canary_labels(len(is_in))[present]]).astype(np.int32)
    rows = scipy.sparse.csr_array(features, dtype=np.float32)
    return Dataset(f"{task.name} with canaries", rows if engine == "row_sparse" else rows.toarray(), labels, ("0", "1"))
