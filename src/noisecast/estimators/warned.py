"""What an estimator warns of: things that its epsilon does not cover."""

import sys
import warnings

# Parts of scikit-learn that fit one estimator many times on the same rows.
SEVERAL_FITS = tuple(
    f"sklearn.{part}"
    for part in (
        "model_selection", "multiclass", "multioutput", "ensemble", "calibration", "semi_supervised",
        "feature_selection", "inspection", "linear_model",
    )
)  # fmt: skip
IN_A_SEARCH = (
    "The other fits of the scikit-learn search, cross-validation or meta-estimator that this one was part of; what it "
    "learnt of scores without noise (a choice, a calibration, a final estimator); and rows that a bootstrap repeated."
)


class PrivacyWarning(UserWarning):
    """Something was done that the stated epsilon does not cover, or that makes the model useless."""


def warn(sentence: str) -> None:
    warnings.warn(sentence, PrivacyWarning, stacklevel=4)


def is_in_a_search() -> bool:
    """Whether a search, cross-validation or meta-estimator of scikit-learn is what calls: it fits many models."""
    frame = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(SEVERAL_FITS):
            return True
        frame = frame.f_back
    return False


def warn_of_a_search(target_epsilon: float) -> None:
    # No "k times" of a bootstrap: a row that was 3, 5 and 2 times in three fits of epsilon 1 spent 7.4 (at 3 delta).
    warn(
        "Each fit of a search, cross-validation or meta-estimator releases a model of its own at epsilon "
        f"{target_epsilon:g}, and scores are computed without noise, also those that a calibration or the final "
        "estimator of a stack learns from: epsilon covers none of it. k fits cost at most k times that epsilon and "
        "delta (noisecast.composed_epsilon is tighter) where no fit has a row twice; a bootstrap repeats rows, and "
        "protects one that is there m times as a group of m: take bootstrap=False. Search on public data, or choose "
        "with noisecast.select."
    )
