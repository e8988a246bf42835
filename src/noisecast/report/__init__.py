"""One self-contained HTML page of a store or a model: `write_report(path, output)`.

answers       which settings are best at each epsilon, and how sure that is
score_thresholds   where the better optimizer changes
tuning_cost   what choosing costs
snippets      settings to copy, in four libraries
chart_data    the table that the sliders read;   static_chart   the main chart without JavaScript
markup        HTML that cannot be broken out of;   parts   pieces of both pages
store_page, trials_page, model_page   the pages;   store_*   one section of the store's page each
page.css, chart.js, page.js   what they look like and do
"""

from __future__ import annotations

from pathlib import Path

from noisecast.files import why_unwritable, written_whole
from noisecast.report.markup import is_report

__all__ = ["report_page", "write_report"]


def report_page(path: str | Path, *, metric: str | None = None) -> str:
    """The page as text; the same store or model gives the same page, to the last byte.

    But for a price that the accountant's tight bound cannot find within its time limit: a slower machine then shows the
    looser upper bound.

    Args:
      path: a folder that `noisecast sweep`, `noisecast train` or `noisecast select --output` wrote.
      metric: of a store: by which the best settings are told; None: the held-out loss, or what was recorded.
    Raises: ValueError: it is neither, or the metric does not fit.
    """
    from noisecast.sweeps.store import Store, is_store

    path = Path(path)
    if is_store(path):
        from noisecast.report.store_page import store_page

        return store_page(Store(path), metric)
    if (path / "privacy.json").is_file():
        from noisecast.report.model_page import model_page

        if metric is not None:
            raise ValueError(f"Expected a metric for a store only, got {metric} for the model {path}; leave it out.")
        return model_page(path)
    raise ValueError(
        f"Expected a store (noisecast sweep) or a model folder (noisecast train) at {path}, found neither; give the "
        "folder that one of them wrote."
    )


def write_report(path: str | Path, output: str | Path, *, metric: str | None = None) -> None:
    """Write the page, whole or not at all. An older report at `output` is replaced, anything else is not.

    Args:
      path, metric: as for `report_page`.   output: file to write.
    Raises: ValueError: as `report_page`, or `output` cannot be written or is something else.
    """
    output = Path(output)
    if (reason := why_unreplaceable(output)) is not None:
        raise ValueError(reason)
    text = report_page(path, metric=metric)
    with written_whole(output) as temporary:
        temporary.write_text(text, encoding="utf-8")


def why_unreplaceable(output: Path) -> str | None:
    """None, or one sentence: why no report can be written there."""
    if (reason := why_unwritable(output.absolute())) is not None:
        return reason
    if output.is_dir():
        return f"Expected a file to write the report to, got the folder {output}; add a name such as report.html."
    if output.exists():
        with open(output, encoding="utf-8", errors="replace") as file:
            if not is_report(file.read(5000)):
                return f"Expected a new file or an older report at {output}, got something else; choose another name."
    return None
