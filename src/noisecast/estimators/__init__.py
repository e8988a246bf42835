"""scikit-learn estimators that train privately: `fit` to an epsilon, `privacy_` says what is guaranteed.

They need the extra [train]. What is public, what every default is and why: docs/estimators.md.
"""

from noisecast.estimators.factorization import DPMatrixFactorization
from noisecast.estimators.linear import DPLogisticRegression, DPSoftmaxRegression
from noisecast.estimators.warned import PrivacyWarning

__all__ = ["DPLogisticRegression", "DPMatrixFactorization", "DPSoftmaxRegression", "PrivacyWarning"]
