"""`noisecast report`: one page of a store or a model."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from noisecast.cli.output import Json, print_json, to_reader
from noisecast.report import write_report


def report(
    path: Annotated[Path, Parameter(help="Store of a sweep, or folder of a model.")],
    /,
    *,
    output: Annotated[
        Path, Parameter(name=("--output", "-o"), help="HTML file to write; an older report there is replaced.")
    ] = Path("report.html"),
    metric: Annotated[
        str | None, Parameter(help="Of a store: by which the best is told. Default: the test loss, if recorded.")
    ] = None,
    json: Json = False,
) -> None:
    """One page of a store or a model: the answer, charts, the privacy statement, settings to copy.

    The page is one file that loads nothing. Its losses and accuracies are non-private.
    """
    write_report(path, output, metric=metric)
    size = output.stat().st_size
    if json:
        print_json({"report": str(output), "of": str(path), "bytes": size})
        return
    to_reader().print(
        f"Written: {output} ({size / 1000:,.0f} kB). Its losses and accuracies are non-private.", soft_wrap=True
    )
