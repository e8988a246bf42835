"""The private optimizers: one file each, its mathematics in the file of the same name in `theory`."""

from noisecast.optimizers.dp_adam import DPAdam
from noisecast.optimizers.dp_sgd import DPSGD
from noisecast.optimizers.dp_sign_sgd import DPSignSGD
from noisecast.optimizers.optimizer import Optimizer, with_learning_rate
from noisecast.optimizers.schedule import CONSTANT, SHAPES, Schedule

# The one list of them: contracts test each, the command line offers each under its lower-case name.
OPTIMIZERS = (DPSGD, DPSignSGD, DPAdam)

__all__ = [
    "CONSTANT",
    "DPSGD",
    "OPTIMIZERS",
    "SHAPES",
    "DPAdam",
    "DPSignSGD",
    "Optimizer",
    "Schedule",
    "with_learning_rate",
]
