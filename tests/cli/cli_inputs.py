"""What the tests of the command line type."""

import numpy as np


def rows(count=300, seed=0):
    """A small file of two numbers and an answer that depends on them."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (count, 2))
    answers = np.where(x @ [2.0, -1.0] + 0.3 * rng.standard_normal(count) > 0, "yes", "no")
    return "a,b,answer\n" + "".join(f"{a:.4f},{b:.4f},{answer}\n" for (a, b), answer in zip(x, answers))


TRAIN = [
    *("train", "data.csv", "--label", "answer", "--bounds", "bounds.toml", "--optimizer", "dp-sgd"),
    *("--noise-multiplier", "1", "--batch-size", "32", "--num-steps", "100", "--output", "model"),
]
ACCOUNT = [
    *("account", "--num-examples", "25000", "--batch-size", "64", "--num-steps", "39000"),
    *("--target-delta", "1e-5"),
]


def with_option(arguments, name, *values):
    """`arguments` with an option's value replaced, added, or (no values) the option removed."""
    if name in arguments:
        at = arguments.index(name)
        arguments = [*arguments[:at], *arguments[at + 2 :]]
    return [*arguments, name, *values] if values else arguments


SCENARIO = """
num_steps = 50
num_seeds = 3
[problem]
kind = "quadratic"
hessian_diag = [2.0, 1.0]
initial_params = 0.1
example_noise_std = 0.1
[mechanism]
noise_multiplier = [0.5, 2.0]
batch_size = 16
[[optimizer]]
name = "dp-sgd"
learning_rate = [0.1, 0.05]
"""
