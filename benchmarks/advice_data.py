"""Two data sets that the forecast was not made on, with a scenario file each for `benchmarks.advice`.

  python -m benchmarks.advice_data titles FOLDER --posts so_titles_tags_30k.csv.gz
  python -m benchmarks.advice_data heavy-tails FOLDER
  python -m benchmarks.advice FOLDER/titles.toml --epsilon 0.3,1,3 --finalist-seeds 32 --store DIR

The learning rates and clip norms are those that `noisecast forecast FOLDER/titles.toml --best` named at epsilon 8.
"""

from collections.abc import Sequence
from pathlib import Path

import cyclopts
import numpy as np
import pandas as pd

LANGUAGES = ("c#", "javascript")
LARGEST = 6.0  # of a heavy-tailed number: all are clamped to it
SCENARIO = """num_steps = 3000
target_delta = 1e-5
runners = ["training"]

[problem]
kind = "file"
path = "{name}.csv"
{columns}

[mechanism]
target_epsilon = 8.0
l2_clip_norm = {clip}
batch_size = 64

[[optimizer]]
name = "dp-sgd"
learning_rate = {rates[0]}

[[optimizer]]
name = "dp-sign-sgd"
learning_rate = {rates[1]}

[[optimizer]]
name = "dp-adam"
learning_rate = {rates[2]}
"""
app = cyclopts.App(help=__doc__, help_format="plaintext")


@app.command
def titles(folder: Path, /, *, posts: Path) -> None:
    """Titles of forum posts whose first tag is C# or JavaScript. --posts: a CSV file with columns title and tags."""
    table = pd.read_csv(posts)
    table = table.assign(first=table["tags"].str.split("|").str[0])
    table = table.loc[table["first"].isin(LANGUAGES), ["title", "first"]].sample(frac=1, random_state=0)
    _write(folder, "titles", table, 'text = "title"\nlabel = "first"', clip=0.23, rates=(23.2, 0.054, 0.055))


@app.command
def heavy_tails(folder: Path, /) -> None:
    """9,000 rows of 40 correlated columns of Student's t with 4 degrees of freedom, and a logistic answer."""
    rng, n, d = np.random.default_rng(5), 9000, 40
    mixing = rng.standard_normal((d, d)) / np.sqrt(d)
    rows = rng.standard_t(4, (n, d)) @ mixing + 0.3 * rng.standard_normal((n, 1))
    weights = rng.standard_normal(d) * (rng.random(d) < 0.4)
    says_yes = rng.random(n) < 1 / (1 + np.exp(-(1.5 * rows @ weights - 1.0)))
    names = [f"x{column}" for column in range(d)]
    table = pd.DataFrame(np.clip(rows, -LARGEST, LARGEST).round(4), columns=pd.Index(names))
    table = table.assign(answer=np.where(says_yes, "yes", "no"))
    columns = 'bounds = "bounds.toml"\nlabel = "answer"'
    _write(folder, "heavy", table, columns, clip=0.67, rates=(2.58, 0.0225, 0.026))
    (folder / "bounds.toml").write_text("".join(f"{name} = [-{LARGEST:g}, {LARGEST:g}]\n" for name in names))


def _write(folder: Path, name: str, table: pd.DataFrame, columns: str, *, clip: float, rates: Sequence[float]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    table.to_csv(folder / f"{name}.csv", index=False)
    scenario = SCENARIO.format(name=name, columns=columns, clip=clip, rates=rates)
    (folder / f"{name}.toml").write_text(scenario, encoding="utf-8")
    print(f"{len(table):,} rows in {folder / name}.csv, settings in {folder / name}.toml")


if __name__ == "__main__":
    app()
