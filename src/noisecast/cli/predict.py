"""`noisecast predict`: a trained model, used on a file."""

import csv
import io
from pathlib import Path
from typing import Annotated

import numpy as np
from cyclopts import Parameter

from noisecast.cli.output import Json, print_json, to_watcher, warn, whole_number
from noisecast.files import why_unwritable, written_whole
from noisecast.model_dir import SavedModel, load_model
from noisecast.printed import number
from noisecast.problems.datasets import load_features, load_test_file

Guesses = list[tuple[str, float]]  # labels of one row with their probabilities, likeliest first


def predict(
    model: Annotated[Path, Parameter(help="Model directory written by `noisecast train`.")],
    file: Annotated[Path, Parameter(help="File of the form of the training file; its label is not needed.")],
    /,
    *,
    output: Annotated[Path | None, Parameter(help="CSV to write. Default: standard output.")] = None,
    label: Annotated[str | None, Parameter(help="Column with the true label: also says how good it is.")] = None,
    top_k: Annotated[
        int | None,
        Parameter(converter=whole_number, help="The k likeliest labels of each row, whatever they are worth."),
    ] = None,
    json: Json = False,
) -> None:
    """Use a trained model on a file: the likeliest label of each row and its probability.

    A multi-label model gives every label whose probability is above 1/2, which may be none.
    """
    if output is not None and output.exists():
        raise ValueError(f"Expected --output to be a new file, {output} exists; choose another name or remove it.")
    if output is not None and (reason := why_unwritable(output.absolute())) is not None:
        raise ValueError(reason)
    saved = load_model(model)
    if top_k is not None and not 1 <= top_k <= len(saved.label_names):
        raise ValueError(f"Expected 1 <= --top-k <= {len(saved.label_names)} (the labels), got {top_k}.")
    quality = None
    if label is None:
        features = load_features(file, saved.encoder)
    else:
        data = load_test_file(
            file, saved.encoder, saved.label_names, label=label, label_separator=saved.label_separator
        )
        features, quality = data.features, saved.quality(data)
    warn(saved.encoder.doubts(features))
    guesses = _guesses(saved, features, top_k)
    several = top_k is not None or saved.has_label_sets
    if not any(guesses):
        warn(["No label's probability exceeds 1/2 in any row; --top-k K gives the K likeliest of each."])
    text = _as_csv(guesses, separator=(saved.label_separator or "|") if several else None)
    if output is not None:
        with written_whole(output) as temporary:
            temporary.write_text(text, encoding="utf-8")
    if json:
        rows = [[{"label": name, "probability": round(p, 6)} for name, p in row] for row in guesses]
        predictions = [{"labels": row} for row in rows] if several else [row[0] for row in rows]
        measured = quality or dict.fromkeys(saved.metric_names)
        print_json({"non_private_metrics": measured, "predictions": predictions, "output": output and str(output)})
        return
    if output is None:
        print(text, end="")
    if quality is not None:
        found = ", ".join(f"{name.replace('_', ' ')} {number(value)}" for name, value in quality.items())
        to_watcher().print(f"{found.capitalize()} on {len(guesses):,} rows (non_private).")


def _guesses(saved: SavedModel, features, top_k: int | None) -> list[Guesses]:
    """Of each row: its `top_k` likeliest labels; without a number the likeliest, or those above 1/2."""
    probabilities = saved.predict(features)[1]
    order = np.argsort(-probabilities, axis=1, kind="stable")
    above_half = (probabilities > 0.5).sum(axis=1)
    counts = above_half if top_k is None and saved.has_label_sets else np.full(len(order), top_k or 1)
    return [
        [(saved.label_names[k], float(row[k])) for k in best[:count]]
        for row, best, count in zip(probabilities, order, counts)
    ]


def _as_csv(guesses: list[Guesses], *, separator: str | None) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["label", "probability"] if separator is None else ["labels", "probabilities"])
    for row in guesses:
        joint = separator or ""
        writer.writerow([joint.join(name for name, _ in row), joint.join(f"{p:.6f}" for _, p in row)])
    return text.getvalue()
