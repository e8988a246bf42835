"""`noisecast predict`: a trained model, used on a file."""

import csv
import io
from pathlib import Path
from typing import Annotated

import numpy as np
from cyclopts import Parameter

from noisecast.cli.output import Json, number, print_json, to_watcher
from noisecast.files import why_unwritable, written_whole
from noisecast.model_dir import load_model
from noisecast.problems.datasets import load_features, load_test_file


def predict(
    model: Annotated[Path, Parameter(help="Model directory written by `noisecast train`.")],
    file: Annotated[Path, Parameter(help="File of the form of the training file; its label is not needed.")],
    /,
    *,
    output: Annotated[Path | None, Parameter(help="CSV to write. Default: standard output.")] = None,
    label: Annotated[str | None, Parameter(help="Column with the true label: also says the accuracy.")] = None,
    json: Json = False,
) -> None:
    """Use a trained model on a file: the likeliest label of each row and its probability."""
    if output is not None and output.exists():
        raise ValueError(f"Expected --output to be a new file, {output} exists; choose another name or remove it.")
    if output is not None and (reason := why_unwritable(output.absolute())) is not None:
        raise ValueError(reason)
    saved = load_model(model)
    accuracy = None
    if label is None:
        features = load_features(file, saved.encoder)
    else:
        data = load_test_file(file, saved.encoder, saved.label_names, label=label)
        features = data.features
    labels, probabilities = saved.predict(features)
    if label is not None:
        accuracy = float(np.mean(labels == np.array(saved.label_names)[data.labels]))
    rows = list(zip(labels.tolist(), probabilities.max(axis=1).tolist()))
    if output is not None:
        with written_whole(output) as temporary:
            temporary.write_text(_as_csv(rows), encoding="utf-8")
    if json:
        predictions = [{"label": name, "probability": round(probability, 6)} for name, probability in rows]
        print_json({"accuracy": accuracy, "predictions": predictions, "output": output and str(output)})
        return
    if output is None:
        print(_as_csv(rows), end="")
    if accuracy is not None:
        to_watcher().print(f"Accuracy {number(accuracy)} on {len(rows):,} rows (non_private).")


def _as_csv(rows: list[tuple[str, float]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["label", "probability"])
    writer.writerows((name, f"{probability:.6f}") for name, probability in rows)
    return text.getvalue()
