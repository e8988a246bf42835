"""`noisecast results`: what lies in a store."""

from decimal import Decimal
from pathlib import Path
from typing import Annotated

import pandas as pd
from cyclopts import Parameter
from rich.table import Table

from noisecast.cli.answer import summaries
from noisecast.cli.output import TABLE_STYLE, Json, print_json, print_whole, to_reader, warn
from noisecast.cli.places import check_new
from noisecast.cli.unfinished import why_unfinished
from noisecast.files import why_unwritable, written_whole
from noisecast.printed import number
from noisecast.privacy.accounting import epsilon_text
from noisecast.sweeps import Store
from noisecast.table import OK, write_table

ROWS_SHOWN = 50


def results(
    store: Annotated[Path, Parameter(help="Folder that `noisecast sweep` wrote.")],
    /,
    *,
    sql: Annotated[
        str | None, Parameter(help="A DuckDB query of the table `results`, one row a number; see --columns.")
    ] = None,
    columns: Annotated[
        bool, Parameter(negative=(), show_default=False, help="List the columns and metrics of `results`.")
    ] = False,
    metric: Annotated[str, Parameter(help="What to show of each scenario at its end.")] = "loss",
    output: Annotated[Path | None, Parameter(help="Write all rows shown to a .csv or .parquet file.")] = None,
    json: Json = False,
) -> None:
    """Read a store: the end of every scenario, or any question in SQL. All metrics are non-private."""
    _check_output(output)
    opened = Store(store)
    table = opened.read()
    warn(why_unfinished(opened, table))
    if columns:
        rows = pd.DataFrame({"column": table.columns, "type": [str(t) for t in table.dtypes]})
    elif sql is not None:
        rows = query(table, sql)
    else:
        known = sorted(set(table["metric"]))
        if not known:
            raise ValueError(f"{store} has no finished group yet, so there is nothing to read.")
        if metric not in known:
            raise ValueError(f"Expected a metric among {', '.join(known)}, got '{metric}'.")
        rows = _ends(table, metric)
    if output is not None:
        _write(rows, table if sql is None and not columns else None, output)
    metrics = {"metrics": sorted(set(table["metric"]))} if columns else {}
    if json:
        # A query makes what it likes: dates, intervals, bytes.
        print_json(
            {"rows": rows.to_dict("records"), **metrics},
            default=lambda it: float(it) if isinstance(it, Decimal) else str(it),
        )
        return
    is_ends = sql is None and not columns
    console = to_reader()
    console.print(f"{store} (non_private)", style="bold", soft_wrap=True, markup=False)
    print_whole(console, _shown(_for_a_screen(rows, metric) if is_ends else rows))
    if columns:
        console.print(f"Metrics: {', '.join(metrics['metrics']) or 'none yet'}")
    if is_ends and opened.is_of_trials:
        print("These are random trials: their number, and all of them but the best, must stay secret.")


def _ends(table: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Each scenario's metric at its end, with its settings."""
    about = table.drop_duplicates("scenario").set_index("scenario")[["problem", "expected_batch_size"]]
    rows = pd.DataFrame(summaries(table, metric)).join(about, on="scenario")
    rows = rows.drop(columns=["step", "num_steps", "nominal_epsilon"])
    return rows.sort_values(["problem", "optimizer", "noise_multiplier", "mean"], ignore_index=True)


def _for_a_screen(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The columns that differ, with short names; epsilon rounded up."""
    shown = rows.assign(epsilon=[epsilon_text(epsilon, 3) for epsilon in rows["epsilon"]])
    names = {
        "problem": "problem", "runner": "runner", "optimizer": "optimizer", "learning_rate": "rate",
        "l2_clip_norm": "clip", "noise_multiplier": "noise", "expected_batch_size": "batch", "epsilon": "ε",
        "mean": metric.replace("_", " "), "half_width": "± 95 %", "num_seeds": "seeds", "num_diverged": "diverged",
        "status": "status",
    }  # fmt: skip
    if not any(shown["num_diverged"].tolist()):
        del names["num_diverged"]
    if set(shown["status"].tolist()) == {OK}:
        del names["status"]
    for name in ("problem", "runner", "expected_batch_size"):
        if len(set(shown[name].tolist())) < 2:
            del names[name]
    return pd.DataFrame({short: shown[name] for name, short in names.items()})


def query(table: pd.DataFrame, sql: str) -> pd.DataFrame:
    """Rows that a DuckDB query selects from the table, by the name `results`; it reads no file.

    Raises: ValueError with DuckDB's reason, or where there is not one query.
    """
    import duckdb

    with duckdb.connect(":memory:") as connection:
        connection.register("results", table)
        # After this a query sees nothing but the table: not this machine's files, not the network.
        connection.execute("SET enable_external_access = false; SET lock_configuration = true")
        try:
            count = len(connection.extract_statements(sql))
            if count != 1:
                raise ValueError(f"Expected one query, got {count or 'none'}.")
            return connection.execute(sql).fetch_df()
        except duckdb.Error as error:
            reason = str(error).split("\n")[0]
            raise ValueError(f"Expected a query of the table `results`, got an error: {reason}") from None


def _check_output(output: Path | None) -> None:
    if output is None:
        return
    if output.suffix not in (".csv", ".parquet"):
        raise ValueError(f"Expected an output that ends in .csv or .parquet, got {output}.")
    check_new(output)
    if (reason := why_unwritable(output.absolute())) is not None:
        raise ValueError(reason)


def _write(rows: pd.DataFrame, whole: pd.DataFrame | None, output: Path) -> None:
    """What was asked for: all rows of the store, or those of a query."""
    if output.suffix == ".parquet" and whole is not None:
        write_table(whole, output)
        return
    frame = rows if whole is None else whole
    with written_whole(output) as temporary:
        if output.suffix == ".csv":
            frame.to_csv(temporary, index=False)
        else:
            frame.to_parquet(temporary, index=False)


def _shown(rows: pd.DataFrame) -> Table:
    caption = f"{len(rows):,} row{'' if len(rows) == 1 else 's'}"
    if len(rows) > ROWS_SHOWN:
        caption = f"The first {ROWS_SHOWN} of {len(rows):,} rows; --output FILE.csv for all of them"
    table = Table(caption=caption + ".", **TABLE_STYLE)
    for name in rows.columns:
        is_number = pd.api.types.is_numeric_dtype(rows[name])
        table.add_column(str(name).replace("_", " "), justify="right" if is_number else "left", overflow="fold")
    for row in rows.head(ROWS_SHOWN).itertuples(index=False):
        table.add_row(*(_cell(value) for value in row))
    return table


def _cell(value) -> str:
    if value is None or value is pd.NA:
        return number(None)
    return number(float(value)) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
