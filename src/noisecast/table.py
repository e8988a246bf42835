"""The one table: every column and every metric once. One row is one number that a runner says about a scenario."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from noisecast.files import written_whole


@dataclass(frozen=True)
class Column:
    name: str
    dtype: str
    unit: str
    label: str


COLUMNS = (
    Column("scenario", "string", "", "scenario"),
    Column("problem", "string", "", "problem"),
    Column("optimizer", "string", "", "optimizer"),
    Column("learning_rate", "float64", "", "learning rate"),
    Column("noise_multiplier", "float64", "", "noise multiplier"),
    Column("l2_clip_norm", "float64", "loss/params", "clip norm"),
    Column("sampling_probability", "float64", "", "sampling probability"),
    Column("expected_batch_size", "float64", "examples", "expected batch size"),
    Column("num_steps", "int64", "steps", "steps"),
    Column("epsilon", "float64", "", "privacy spent (accounted)"),
    Column("nominal_epsilon", "float64", "", "nominal ε of the paper (not a guarantee)"),
    Column("target_delta", "float64", "", "δ"),
    Column("runner", "string", "", "runner"),
    Column("seed", "Int64", "", "repeat"),
    Column("step", "int64", "steps", "step"),
    Column("metric", "string", "", "metric"),
    Column("value", "float64", "", "value"),
    Column("status", "string", "", "status"),
)


@dataclass(frozen=True)
class Metric:
    name: str
    label: str
    unit: str
    larger_is_better: bool | None = None  # None: it is no score
    non_private: bool = True  # computed from the examples without noise


METRICS = {
    metric.name: metric
    for metric in (
        Metric("loss", "training loss", "loss", larger_is_better=False),
        Metric("test_loss", "test loss", "loss", larger_is_better=False),
        Metric("accuracy", "training accuracy", "", larger_is_better=True),
        Metric("test_accuracy", "test accuracy", "", larger_is_better=True),
        Metric("recall_at_5", "training recall at 5", "", larger_is_better=True),
        Metric("test_recall_at_5", "test recall at 5", "", larger_is_better=True),
        Metric("rmse", "training rmse", "rating", larger_is_better=False),
        Metric("test_rmse", "test rmse", "rating", larger_is_better=False),
        Metric("micro_f1", "training F1 (micro)", "", larger_is_better=True),
        Metric("test_micro_f1", "test F1 (micro)", "", larger_is_better=True),
        Metric("gradient_norm", "gradient norm", "loss/params", larger_is_better=False),
        Metric("clip_fraction", "share of examples clipped", ""),
        Metric("params_norm", "norm of the parameters", "params"),
        Metric("one_well_loss", "loss of the coordinates with one well", "loss"),
        Metric("loss_std", "standard deviation of the training loss over runs", "loss"),
        Metric("test_loss_std", "standard deviation of the test loss over runs", "loss"),
        Metric("loss_floor", "asymptotic loss above the minimum (theory)", "loss"),
    )
}

OK = "ok"
DIVERGED = "diverged"
EXTRAPOLATED = "extrapolated"  # a formula's answer outside the range in which it holds
SIMULATED = "simulated"  # a forecast by runs of the optimizer, where formulas are outside of theirs
SOUND = (OK, SIMULATED)  # to be relied upon


def table_from(rows: Iterable[dict] | pd.DataFrame) -> pd.DataFrame:
    """Rows as a validated table: every column, in order, with its dtype.

    Raises:
      ValueError: a column is missing or unknown, or a metric is.

    >>> table_from([]).shape
    (0, 18)
    """
    names = [column.name for column in COLUMNS]
    frame = rows if isinstance(rows, pd.DataFrame) else pd.DataFrame.from_records(list(rows), columns=None)
    if frame.empty:
        frame = pd.DataFrame(columns=names)
    missing, unknown = set(names) - set(frame.columns), set(frame.columns) - set(names)
    if missing or unknown:
        raise ValueError(
            f"Expected the table's {len(names)} columns; missing: {sorted(missing)}, unknown: {sorted(unknown)}."
        )
    frame = frame.loc[:, names].astype({column.name: column.dtype for column in COLUMNS})
    strangers = set(frame["metric"]) - set(METRICS)
    if strangers:
        raise ValueError(f"Expected metrics among {sorted(METRICS)}, got {sorted(strangers)}.")
    return frame


def write_table(table: pd.DataFrame, path: str | Path) -> None:
    """Write Parquet, whole or not at all."""
    with written_whole(path) as temporary:
        table_from(table).to_parquet(temporary, index=False)


def read_table(path: str | Path) -> pd.DataFrame:
    """Read and validate a table written by `write_table`."""
    return table_from(pd.read_parquet(path))
