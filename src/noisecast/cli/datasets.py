"""`noisecast datasets`: what can be read."""

from rich.table import Table

from noisecast.cli.output import TABLE_STYLE, Json, facts, print_json, to_reader
from noisecast.problems.datasets import DATASETS

FORMATS = {
    ".csv .tsv .parquet": "a table: a label column, and numeric columns or one text column",
    ".svm .svmlight .libsvm": "a sparse matrix: label feature:value feature:value ...",
    ".npz": "arrays: features (or indptr, indices, data) and labels",
}


def datasets(*, json: Json = False) -> None:
    """The data sets that are read by name, and the files that `train` reads."""
    if json:
        listed = [
            {"name": d.name, "what": d.what, "rows": d.rows, "columns": d.columns, "obtain": d.obtain} for d in DATASETS
        ]
        print_json({"datasets": listed, "formats": FORMATS})
        return
    table = Table(title="Data sets by name", **TABLE_STYLE)
    for column in ("name", "what", "rows (train + test)", "columns"):
        table.add_column(column, overflow="fold")
    for entry in DATASETS:
        table.add_row(entry.name, entry.what, entry.rows, entry.columns)
    console = to_reader()
    console.print(table)
    rows = [(entry.name, entry.obtain) for entry in DATASETS if entry.needs_data_dir]
    console.print(facts(rows, title="How to get them (data folder: environment variable NOISECAST_DATA)"))
    console.print(facts(FORMATS.items(), title="Files that `noisecast train` reads, each perhaps with .gz"))
