"""One run for release in a process of its own, which may be killed at any moment; and what it must have come to."""

import shutil
from pathlib import Path

import numpy as np
import scipy.sparse

import noisecast.engines.dense
import noisecast.engines.row_sparse  # noqa: F401 - all is imported before the first fork, which then costs nothing
from noisecast import DPSGD, DPAdam, DPSignSGD, Poisson, SampledGaussian, Scenario, linear_model, release
from noisecast.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from noisecast.engines import start
from noisecast.ledger import Account, PrivacyLedger
from noisecast.problems.datasets import Dataset

OPTIMIZERS = {
    "sgd": DPSGD(learning_rate=0.1),
    "sign": DPSignSGD(learning_rate=0.01),
    "adam": DPAdam(learning_rate=0.01),
}
NUM_STEPS = {"dense": 10_000, "row_sparse": 120_000}  # a second or so each
DATASET = "toy"


def scenario(engine: str, optimizer: str) -> Scenario:
    rng = np.random.default_rng(900_100)
    features = rng.normal(size=(200, 30)) * (rng.random((200, 30)) < 0.1)
    labels = rng.integers(0, 2, 200).astype(np.int32)
    data = Dataset("toy", scipy.sparse.csr_array(features) if engine == "row_sparse" else features, labels, ("a", "b"))
    # A price that is a formula: this is about being killed, not about accounting.
    mechanism = SampledGaussian(noise_multiplier=2.0, l2_clip_norm=1.0, sampler=Poisson(1.0, 200.0))
    if engine == "row_sparse":
        mechanism = SampledGaussian(noise_multiplier=2.0, l2_clip_norm=1.0, sampler=Poisson(0.04, 8.0))
    return Scenario(
        problem=linear_model(data),
        mechanism=mechanism,
        optimizer=OPTIMIZERS[optimizer],
        num_steps=NUM_STEPS[engine],
    )


def run(folder: Path, engine: str, optimizer: str) -> None:
    """Go on from the checkpoint, or begin; checkpoints as often as the loop allows, not every 30 s."""
    release.SECONDS_BETWEEN_LOOKS, release.SECONDS_BETWEEN_CHECKPOINTS = 0.02, 0.0
    checkpoint = folder / "run.checkpoint"

    def save(model: release.TrainedModel) -> None:
        shutil.copy(checkpoint, folder / "last.checkpoint")  # which tells whose randomness it was
        np.save(folder / "params.tmp.npy", model.params)
        (folder / "params.tmp.npy").rename(folder / "params.npy")

    try:
        release.train(
            scenario(engine, optimizer),
            checkpoint=checkpoint,
            resume=checkpoint.exists(),
            watch=lambda moment: None,
            save=save,
            account=Account(PrivacyLedger(folder / "ledger"), DATASET),
        )
    except release.Interrupted:
        raise SystemExit(130) from None


def undisturbed(folder: Path, engine: str, optimizer: str) -> np.ndarray:
    """The same run from the same randomness, from its first step to its last without a stop."""
    asked = scenario(engine, optimizer)
    saved, path = load_checkpoint(folder / "last.checkpoint", scenario=asked.id), folder / "undisturbed.checkpoint"
    begun = start([asked], repeats=[0], root=saved.root).state()
    save_checkpoint(path, Checkpoint(asked.id, saved.root, begun, saved.evaluate_every))
    return release.train(asked, checkpoint=path, resume=True, watch=lambda moment: None).params
