"""`noisecast reproduce`: a figure of the paper, with its numbers."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.table import Table

from noisecast.cli.output import TABLE_STYLE, Json, number, print_json, to_reader
from noisecast.cli.progress import share_progress
from noisecast.files import why_unwritable, written_whole
from noisecast.reproduction import fig_sde
from noisecast.table import write_table

FIGURES = {"fig-sde": fig_sde}


def reproduce(
    figure: Annotated[Literal["fig-sde"], Parameter(help="Which figure: fig-sde.")],
    *,
    scale: Annotated[
        Literal["quick", "paper"], Parameter(help="quick: 16 runs, about a minute; paper: its 200 runs, some minutes.")
    ] = "quick",
    output: Annotated[Path, Parameter(help="Folder for the picture and the table.")] = Path("noisecast-figures"),
    json: Json = False,
) -> None:
    """A figure of the paper by one command, its claims beside its numbers."""
    reason = why_unwritable((output / "x" if output.exists() else output).absolute())
    if reason is not None:
        raise ValueError(reason)
    module = FIGURES[figure]
    with share_progress(f"Reproducing {figure}") as progress:
        table = module.run(scale, progress=progress)
    frame = module.data(table)
    misfits = module.misfits(frame)
    output.mkdir(exist_ok=True)
    picture, rows = output / f"{figure}.png", output / f"{figure}.parquet"
    write_table(table, rows)
    with written_whole(picture) as temporary:
        module.draw(frame).savefig(temporary, format="png", dpi=150)
    if json:
        print_json({"misfits": misfits.to_dict("records"), "picture": str(picture), "table": str(rows)})
        return
    console = to_reader()
    console.print(_shown(misfits, scale))
    console.print(f"\nPicture: {picture}   all rows: {rows}", soft_wrap=True)


def _shown(misfits, scale: str) -> Table:
    table = Table(
        title="SDE validation: how far each form of the SDE is from the optimizer it models",
        caption=(
            f"Relative distance of mean losses over {fig_sde.REPETITIONS[scale]} runs at {len(fig_sde.times())} times. "
            "noise: one standard error of that distance where it is largest. phases: the paper's two-phase, linearised "
            "forms. one-well: the quartic without the coordinate that has two wells; inf: the printed form diverges."
        ),
        **TABLE_STYLE,
    )
    for column in ("problem", "optimizer", "loss", "SDE"):
        table.add_column(column)
    for column in ("largest", "at step", "noise", "median"):
        table.add_column(column, justify="right")
    for row in misfits.to_dict("records"):
        table.add_row(
            row["problem"], row["optimizer"],
            "one-well" if row["metric"] == "one_well_loss" else "all",
            "phases" if row["runner"] == fig_sde.PHASES else "unified",
            _percent(row["largest"]), number(row["at_step"]), _percent(row["noise"]), _percent(row["median"]),
        )  # fmt: skip
    return table


def _percent(share: float) -> str:
    return number(share) if share != share or share == float("inf") else f"{100 * share:.1f} %"
