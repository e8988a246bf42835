"""Where commands write, looked at before they compute."""

from pathlib import Path

from noisecast.files import why_unwritable


def check_new(output: Path | None) -> None:
    if output is not None and output.is_file():
        raise ValueError(f"Expected --output to be a new file, {output} exists; choose another name or remove it.")


def check_places(output: Path | None, figure: Path | None) -> None:
    """Whether results can be written, before they are computed; a table not over another file, which may be data."""
    check_new(output)
    for path, what, suffixes in ((output, "table", (".parquet",)), (figure, "figure", (".png", ".pdf", ".svg"))):
        if path is None:
            continue
        if path.is_dir():
            raise ValueError(f"Expected a file to write to, got the directory {path}.")
        if path.suffix not in suffixes:
            raise ValueError(f"Expected a {what} that ends in {' or '.join(suffixes)}, got {path}.")
        if (reason := why_unwritable(path.absolute())) is not None:
            raise ValueError(reason)
