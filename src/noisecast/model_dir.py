"""The model directory: what `noisecast train` writes and `noisecast predict` reads. Arrays and JSON, nothing that runs.

parameters.npz   the released parameters
model.json       how features are made and what the outputs mean
privacy.json     the guarantee in numbers        PRIVACY.txt   the same in a sentence to quote
non_private.json losses and accuracies, computed without noise: not covered by the guarantee, not for release

Beside the last, nothing here is a function of the examples but the parameters, and what the encoder and the names of
the labels were given as public or read off them, which the statement then says.
"""

import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from noisecast.files import folder_written_whole, read_arrays, reason_of, strict_json
from noisecast.optimizers import CONSTANT
from noisecast.problems.datasets import DataError, Dataset, Encoder, Features, encoder_from_json
from noisecast.problems.linear import LIKELIHOODS, Likelihood, LinearModel, predict, quality
from noisecast.release import TrainedModel

FORMAT = 1


@dataclass(frozen=True)
class SavedModel:
    """A linear model read back.

    Args:
      params: (d,) float32.   likelihood, num_outputs: what the parameters mean.
      label_names: names of the classes.   encoder: how a file becomes features.   privacy: the statement, as JSON.
      label_separator: what stands between the labels of a row in a file, for a multi-label model; else None.
    """

    params: np.ndarray
    likelihood: Likelihood
    num_outputs: int
    label_names: tuple[str, ...]
    encoder: Encoder
    privacy: dict[str, Any]
    label_separator: str | None = None

    def predict(self, features: Features) -> tuple[np.ndarray, np.ndarray]:
        """Names of the likeliest classes (n,) and probabilities (n, number of classes).

        Of a multi-label model, whether each label has a probability above 1/2 instead of names: (n, number of labels).
        """
        predicted, probabilities = predict(features, self.params, self.likelihood, self.num_outputs)
        return predicted if self.has_label_sets else np.array(self.label_names)[predicted], probabilities

    def quality(self, data: Dataset) -> dict[str, float]:
        """The likelihood's metrics (accuracy; of sets of labels recall at 5 and micro F1) on labelled rows."""
        return quality(data, self.params, self.likelihood, self.num_outputs)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The metrics that `quality` has."""
        return tuple(self.likelihood.metrics(np.zeros(self.likelihood.num_scores)))

    @property
    def has_label_sets(self) -> bool:
        """Whether a row carries any number of labels, not exactly one."""
        return self.likelihood.takes_sets


def save_model(
    path: str | Path,
    model: TrainedModel,
    *,
    encoder: Encoder,
    label_names: tuple[str, ...],
    label_separator: str | None = None,
) -> None:
    """Write a model directory, whole or not at all; `path` must not exist yet."""
    problem, scenario = model.scenario.problem, model.scenario
    if not isinstance(problem, LinearModel):
        raise ValueError(
            f"Expected a linear model to write, got {problem.name}; save a JAX model's parameters yourself."
        )
    settings = scenario.columns()
    del settings["scenario"]  # a hash of the examples, too: with it whoever knows all but one would find that one
    del settings["epsilon"], settings["nominal_epsilon"]  # the statement's: of a known seed there is no guarantee
    if scenario.schedule != CONSTANT:
        settings["schedule"] = asdict(scenario.schedule)
    described = {
        "format": FORMAT,
        "model": problem.likelihood.name,
        "num_outputs": problem.num_outputs,
        "label_names": list(label_names),
        "label_separator": label_separator,
        "encoder": encoder.to_json(),
        "scenario": {name: _plain(value) for name, value in settings.items()},
    }
    with folder_written_whole(path) as folder:
        _write_json(folder / "model.json", described)
        _write_parameters(folder, model)


def save_parameters(path: str | Path, model: TrainedModel) -> None:
    """Write parameters and statement alone, of any problem: `predict` needs more, a program of your own does not."""
    with folder_written_whole(path) as folder:
        _write_parameters(folder, model)


def _write_parameters(folder: Path, model: TrainedModel) -> None:
    np.savez(folder / "parameters.npz", params=model.params)
    _write_json(folder / "privacy.json", model.statement.to_json())
    _write_json(folder / "non_private.json", model.non_private_metrics)
    (folder / "PRIVACY.txt").write_text(model.statement.sentence() + "\n", encoding="utf-8")


def load_model(path: str | Path) -> SavedModel:
    """Read a model directory.

    Raises:
      DataError: one sentence: it is missing, incomplete, or its parts do not fit together.
    """
    path = Path(path)
    if not (path / "model.json").is_file():
        alone = " What `noisecast select` writes holds parameters alone, for programs; train with its settings."
        raise DataError(
            f"Expected a model directory written by `noisecast train` at {path}, found no model.json there."
            + (alone if (path / "parameters.npz").is_file() else "")
        )
    try:
        described = json.loads((path / "model.json").read_text(encoding="utf-8"))
        privacy = json.loads((path / "privacy.json").read_text(encoding="utf-8"))
        params = np.asarray(read_arrays(io.BytesIO((path / "parameters.npz").read_bytes()))["params"], np.float32)
        if described["format"] != FORMAT:
            raise ValueError("format")
        model = SavedModel(
            params=params,
            likelihood=LIKELIHOODS[described["model"]],
            num_outputs=int(described["num_outputs"]),
            label_names=tuple(str(name) for name in described["label_names"]),
            encoder=encoder_from_json(described["encoder"]),
            privacy=privacy,
            label_separator=_text_or_none(described.get("label_separator")),
        )
        outputs = model.likelihood.num_outputs(len(model.label_names))
        fits = params.shape == ((model.encoder.num_features + 1) * outputs,) and np.isfinite(params).all()
        if outputs != model.num_outputs or not fits:
            raise ValueError("shape")
    except OSError as error:
        name = error.filename or path
        raise DataError(f"{name}: {reason_of(error)}; mend that, or bring the model back from a copy.") from None
    except (ValueError, KeyError, TypeError, OverflowError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path} is not a readable model directory ({type(error).__name__}); bring it back from a copy: to train "
            "it again would spend its epsilon again."
        ) from None
    return model


def _text_or_none(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError("label_separator")
    return value


def _write_json(path: Path, content: Any) -> None:
    path.write_text(strict_json(content) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
