"""What an estimator warns of: things that its epsilon does not cover."""

import sys
import warnings

SEARCHES = ("sklearn.model_selection._validation", "sklearn.model_selection._search")
IN_A_SEARCH = "The other fits of the scikit-learn search or cross-validation that this one was part of."


class PrivacyWarning(UserWarning):
    """Something was done that the stated epsilon does not cover, or that makes the model useless."""


def warn(sentence: str) -> None:
    warnings.warn(sentence, PrivacyWarning, stacklevel=4)


def is_in_a_search() -> bool:
    """Whether scikit-learn's cross-validation or a search is what calls: it fits many models on the same rows."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") in SEARCHES:
            return True
        frame = frame.f_back
    return False


def warn_of_a_search(target_epsilon: float) -> None:
    warn(
        f"Each fit of a search or cross-validation releases a model of its own at epsilon {target_epsilon:g}, and "
        "scores are computed without noise: epsilon covers neither. k fits cost at most k times that epsilon "
        "and delta (noisecast.composed_epsilon is tighter). Search on public data, or choose with noisecast.select."
    )
