"""Scenario files and sweep files: one TOML format that a person types, checked whole, and the questions that it asks.

num_steps = 1000             # or num_epochs = 100: floor(num_examples / batch_size) steps each
target_delta = 1e-5          # which is the default; of 100,000 examples or more the largest power of ten below 1 / n
num_seeds = 8                # or insecure_seeds = [0, 1, 2]
num_records = 20             # evenly spaced, or record_at = [0, 10, 1000]
record_last_epochs = 5       # with num_epochs: and at the ends of the last five epochs
runners = ["training", "sde", "closed_form"]   # these, or "moments" as well: the forecast
schedule = "constant"        # or "linear" or "cosine": what the learning rates are multiplied with, down to almost 0
warmup_steps = 0             # before it, from 0

[problem]                    # kind = "quadratic", "quartic", "file", "bundled" or "factorization"
kind = "quadratic"
hessian_diag = [2.0, 1.0]    # or num_params = 1024 with hessian_value = 0.1
initial_params = 0.1         # a number, a list, or {normal_std = 1.56, insecure_seed = 0}
example_noise_std = 0.1
degrees_of_freedom = inf

[mechanism]
noise_multiplier = [0.5, 1]  # a number or a list; or target_epsilon
l2_clip_norm = 1.0           # a number or a list
batch_size = 64
sampler = "stream"           # of data sets: "poisson" (the default), "fixed-size" or "shuffled"

[[optimizer]]
name = "dp-sgd"
learning_rate = 0.1          # a number or a list
l2_clip_norm = 0.5           # where it differs from the mechanism's; a number or a list

A sweep file says more: several [[problem]] tables, a list of batch_size, and two tables of its own.

[draws]                      # random cells in place of the grid: 20 of each optimizer
count = 20                   # learning_rate = {log_uniform = [0.01, 1.0]}, l2_clip_norm and noise_multiplier alike;
public_seed = 7              # from a list of these, of target_epsilon or batch_size, one value is drawn

[tuning]                     # the best of a random number of trials is chosen, and that is priced
mean_trials = 20.0           # each of them one run: without num_seeds
distribution = "poisson"     # or "geometric" or "logarithmic"

`values` and `tables` and `problem_tables` say what may be written, `rules` what may not be written together,
`mistakes` turns what is wrong into sentences; `document` is the file checked, `cells` its combinations, `questions`
what is asked.
"""

from dataclasses import dataclass
from pathlib import Path

from noisecast.question import Question
from noisecast.scenario_file.document import read_document
from noisecast.scenario_file.mistakes import ScenarioFileError
from noisecast.scenario_file.questions import questions_of
from noisecast.scenario_file.rules import beyond_a_scenario
from noisecast.scenario_file.tables import OPTIMIZER_NAMES, RUNNER_NAMES, TuningTable

__all__ = [
    "OPTIMIZER_NAMES",
    "RUNNER_NAMES",
    "ScenarioFileError",
    "SweepFile",
    "TuningTable",
    "read_scenario_file",
    "read_sweep_file",
]


@dataclass(frozen=True, kw_only=True)
class SweepFile:
    """What a sweep file asks.

    Args:
      questions: one for each problem and batch size, since num_steps and record_at depend on both.
      tuning: how the number of trials is to be drawn where the best is chosen; None where nothing is said.
      text: the file, as it was read.
    """

    questions: tuple[Question, ...]
    tuning: TuningTable | None
    text: str


def read_scenario_file(path: str | Path) -> Question:
    """Read and check a scenario file: a sweep file of one problem and batch size. Paths in it are relative to it.

    Raises:
      ScenarioFileError: with every mistake; those that only the data can show come when all others are mended.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "scenario.toml")
    >>> _ = file.write_text('''
    ... num_steps = 100
    ... [problem]
    ... kind = "quadratic"
    ... hessian_diag = [2.0, 1.0]
    ... initial_params = 0.1
    ... example_noise_std = 0.1
    ... [mechanism]
    ... noise_multiplier = [0.5, 1.0]
    ... l2_clip_norm = 1.0
    ... batch_size = 64
    ... [[optimizer]]
    ... name = "dp-sgd"
    ... learning_rate = 0.1
    ... ''')
    >>> [scenario.mechanism.noise_multiplier for scenario in read_scenario_file(file).scenarios]
    [0.5, 1.0]
    """
    (question,) = questions_of(read_document(path, beyond_a_scenario))
    return question


def read_sweep_file(path: str | Path) -> SweepFile:
    """Read and check a sweep file; paths in it are relative to it.

    Raises:
      ScenarioFileError: with every mistake; those that only the data can show come when all others are mended.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "sweep.toml")
    >>> _ = file.write_text('''
    ... num_epochs = 5
    ... [problem]
    ... kind = "bundled"
    ... name = "iris"
    ... [mechanism]
    ... noise_multiplier = [0.5, 1.0]
    ... l2_clip_norm = [0.1, 1.0]
    ... batch_size = [12, 60]
    ... [[optimizer]]
    ... name = "dp-sgd"
    ... learning_rate = [0.1, 0.5, 1.0]
    ... ''')
    >>> [(each.scenarios[0].num_steps, len(each.scenarios)) for each in read_sweep_file(file).questions]
    [(50, 12), (10, 12)]
    """
    document = read_document(path)
    return SweepFile(questions=questions_of(document), tuning=document.tuning, text=document.text)
