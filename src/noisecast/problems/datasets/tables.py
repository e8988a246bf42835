"""Tables as users have them (CSV, TSV, Parquet, gzipped or not), strictly: what is odd is reported, not guessed at."""

import re

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pa_parquet

from noisecast.files import is_bomb
from noisecast.problems.datasets.columns import MOST_COLUMNS, check_columns, too_wide, with_rows
from noisecast.problems.datasets.contents import file_suffix, read_bytes
from noisecast.problems.datasets.csv_file import first_line, open_csv
from noisecast.problems.datasets.dataset import DataError


def read_table(path) -> pd.DataFrame:
    """A CSV or TSV file with all cells as text (empty cells as ""), or a Parquet file with its own types.

    Args:
      path: ends in .csv, .tsv or .parquet, and perhaps .gz.

    Raises: DataError for a file that is unreadable, without rows, ragged (naming the row), not UTF-8 (naming the line),
      with too many columns, or with a column name twice.
    """
    if file_suffix(path) != ".parquet":
        return open_csv(path).frame()
    content = read_bytes(path)
    try:
        said = pa_parquet.read_metadata(pa.BufferReader(content))
        is_wide, is_large = said.num_columns > MOST_COLUMNS, is_bomb(8 * said.num_rows * said.num_columns, len(content))
        table = None if is_wide or is_large else pa_parquet.read_table(pa.BufferReader(content))
        if table is not None:
            table.validate(full=True)
    except Exception as error:  # Garbled bytes make Arrow raise errors of many types.
        raise DataError(f"{path} is not a readable Parquet file: {first_line(error)}") from None
    if is_wide:
        raise too_wide(said.num_columns, path)
    if table is None:
        raise DataError(
            f"{path} of {len(content):,} bytes says it holds {said.num_rows:,} rows of {said.num_columns} columns; if "
            "that is meant, save it as CSV."
        )
    names = [name.strip() for name in table.column_names]  # as those of a CSV file
    check_columns(names, path)
    table = table.rename_columns(names)
    # The index that pandas wrote into the file is no measurement.
    table = table.drop_columns([name for name in names if re.fullmatch(r"__index_level_\d+__", name)])
    return with_rows(table.replace_schema_metadata(None).to_pandas(ignore_metadata=True), path)
