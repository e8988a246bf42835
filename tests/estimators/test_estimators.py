"""The estimators: what scikit-learn expects of them, what they promise of privacy, and what they refuse."""

import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.ensemble import BaggingClassifier, StackingClassifier
from sklearn.exceptions import NotFittedError
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.linear_model import RANSACRegressor
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline

from noisecast.advice.stand_in import Shape, stand_in, stand_in_ratings
from noisecast.estimators import DPLogisticRegression, DPMatrixFactorization, DPSoftmaxRegression, PrivacyWarning
from noisecast.estimators.warned import IN_A_SEARCH

RNG = np.random.default_rng(0)
X = RNG.normal(size=(400, 5))
Y2 = np.where(X[:, 0] > 0, "yes", "no")
Y3 = X[:, :3].argmax(axis=1)
PAIRS = np.stack([RNG.integers(12, size=300), RNG.integers(9, size=300)], axis=1)
RATINGS = 3.0 + (-1.0) ** PAIRS.sum(axis=1)
FAST = {"learning_rate": 0.1, "num_epochs": 3, "target_epsilon": 8.0}


def logistic(**changed) -> DPLogisticRegression:
    return DPLogisticRegression(**({"data_norm": 2.0, "classes": ["no", "yes"], "insecure_seed": 0} | FAST | changed))


def softmax(**changed) -> DPSoftmaxRegression:
    return DPSoftmaxRegression(**({"data_norm": 2.0, "classes": range(3), "insecure_seed": 0} | FAST | changed))


def factorization(**changed) -> DPMatrixFactorization:
    return DPMatrixFactorization(**({"num_users": 12, "num_items": 9, "dim": 2, "insecure_seed": 0} | FAST | changed))


CASES = [(logistic, X, Y2), (softmax, X, Y3), (factorization, PAIRS, RATINGS)]


@pytest.mark.parametrize("make, X, y", CASES)
def test_fit_predict_clone_and_pickle(make, X, y):
    model = make().fit(X, y)
    assert model.predict(X).shape == y.shape and model.n_features_in_ == X.shape[1]
    loaded = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))
    assert clone(model).get_params() == model.get_params() and not hasattr(clone(model), "privacy_")
    assert model.n_iter_ == 30 and model.learning_rate_ == 0.1 and np.isfinite(model.score(X, y))


@pytest.mark.parametrize("make, X, y", CASES)
def test_nothing_of_the_private_rows_is_kept(make, X, y):
    """A canary in the rows must not be found in the pickle, at whatever precision."""
    X, canary = X.astype(float), 1.2345678901234567
    if make is factorization:
        y = y.copy()
        y[7] = canary
    else:
        X[7] = canary
    stored = pickle.dumps(make(learning_rate=0.1).fit(X, y))
    for dtype in (np.float64, np.float32):
        assert np.asarray(canary, dtype).tobytes() not in stored
    assert np.asarray(canary).tobytes() in pickle.dumps(X if make is not factorization else y)  # it would be seen
    assert len(stored) < X.nbytes  # whatever form the rows would be kept in


@pytest.mark.parametrize("make, X, y", CASES)
def test_the_statement_is_of_the_run_and_within_the_budget(make, X, y):
    model = make(insecure_seed=None, target_epsilon=2.0, target_delta=1e-4).fit(X, y)
    statement = model.privacy_
    assert 1.9 < statement.epsilon <= 2.0 and statement.target_delta == 1e-4
    assert statement.noise_multiplier == model.mechanism_.noise_multiplier and statement.num_steps == model.n_iter_
    assert f"The number of rows, {len(X)}, which was treated as public." in statement.not_covered
    assert not statement.reproducible and make().fit(X, y).privacy_.reproducible


def test_fresh_noise_at_every_fit():
    model = logistic(insecure_seed=None)
    first = model.fit(X, Y2).coef_
    assert np.abs(model.fit(X, Y2).coef_ - first).min() > 0
    same = logistic()
    np.testing.assert_array_equal(same.fit(X, Y2).coef_, same.fit(X, Y2).coef_)


def test_epsilon_and_sampling_do_not_depend_on_the_number_of_rows():
    models = [logistic().fit(X[:n], Y2[:n]) for n in (300, 301)]
    assert len({(m.mechanism_.noise_multiplier, m.mechanism_.sampling_probability) for m in models}) == 1
    declared = [logistic(num_examples=300).fit(X[:n], Y2[:n]) for n in (300, 301)]
    assert declared[0].mechanism_ == declared[1].mechanism_  # the divisor neither
    assert not any("number of rows" in sentence for sentence in declared[0].privacy_.not_covered)


def test_rows_beyond_data_norm_count_as_rows_on_it():
    """Also huge ones, whose squares overflow; dense and sparse agree; data_norm is a unit."""
    unit = X / np.linalg.norm(X, axis=1, keepdims=True)

    def features(rows, data_norm=2.0):
        found = logistic(data_norm=data_norm)._dataset(rows, Y2, np.array(["no", "yes"])).features
        return found.toarray() if sp.issparse(found) else found

    expected = features(2.0 * unit)
    np.testing.assert_allclose(np.linalg.norm(expected, axis=1), 4.0, rtol=1e-5)
    for same in (features(1e200 * unit), features(sp.csr_array(9.0 * unit)), features(20.0 * unit, data_norm=20.0)):
        np.testing.assert_allclose(same, expected, rtol=1e-5)
    np.testing.assert_allclose(features(0.5 * unit), expected / 4, rtol=1e-5)  # shorter ones stay short


def test_probabilities_are_of_the_classes_in_order():
    for model, y in ((logistic(), Y2), (softmax(), Y3), (softmax(classes=["no", "yes"]), Y2)):
        model.fit(X, y)
        probabilities = model.predict_proba(X)
        np.testing.assert_allclose(probabilities.sum(axis=1), 1.0)
        np.testing.assert_allclose(np.exp(model.predict_log_proba(X)), probabilities)
        np.testing.assert_array_equal(model.classes_[probabilities.argmax(axis=1)], model.predict(X))
        assert model.score(X, y) > 0.6


def test_a_class_that_no_row_has_is_a_class_all_the_same():
    model = softmax(classes=range(4)).fit(X, Y3)
    assert model.predict_proba(X).shape == (400, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        logistic().fit(X, np.full(400, "yes"))  # what y holds is private once classes are named


def test_labels_read_from_y_are_warned_of_and_named_in_the_statement():
    with pytest.warns(PrivacyWarning, match="2 class labels were read from y"):
        model = logistic(classes=None).fit(X, Y2)
    assert "The set of class labels, which was read from y." in model.privacy_.not_covered


def test_in_a_pipeline_on_text():
    texts, y = ["good fine film", "bad dull film"] * 100, [1, 0] * 100
    model = logistic(data_norm=1.0, classes=[0, 1])
    pipeline = make_pipeline(HashingVectorizer(n_features=256, norm="l2"), model).fit(texts, y)
    assert pipeline.score(texts, y) > 0.9 and sp.issparse(pipeline[0].transform(texts))


def test_a_grid_search_runs_and_says_that_it_is_not_covered():
    search = GridSearchCV(logistic(), {"learning_rate": [0.01, 0.1]}, cv=2)
    with pytest.warns(PrivacyWarning, match="k fits cost at most k times"):
        search.fit(X, Y2)
    assert IN_A_SEARCH in search.best_estimator_.privacy_.not_covered
    assert IN_A_SEARCH not in logistic().fit(X, Y2).privacy_.not_covered


def test_k_times_epsilon_is_not_claimed_of_a_bootstrap():
    """Which repeats rows: one that is in a fit m times is a group of m, and the fit's epsilon is not its own."""
    bag = BaggingClassifier(logistic(classes=[0, 1]), n_estimators=2, random_state=0)
    with pytest.warns(PrivacyWarning, match="where no fit has a row twice; a bootstrap repeats rows") as warned:
        bag.fit(X, Y2)  # labels reach the fits as numbers
    assert "take bootstrap=False" in str(warned[0].message)
    for model in bag.estimators_:
        assert IN_A_SEARCH in model.privacy_.not_covered and "rows that a bootstrap repeated" in IN_A_SEARCH


@pytest.mark.parametrize("around, X, y", [
    (CalibratedClassifierCV(logistic(), method="isotonic", cv=2), X, Y2),
    (StackingClassifier([("private", logistic(classes=[0, 1]))], cv=2), X, Y2),
    (RANSACRegressor(factorization(), min_samples=200, max_trials=1, residual_threshold=9.0), PAIRS, RATINGS),
], ids=["calibrated", "stack", "ransac"])  # fmt: skip
def test_what_learns_from_scores_is_warned_of(around, X, y):
    with pytest.warns(PrivacyWarning, match="also those that a calibration or the final estimator of a stack learns"):
        around.fit(X, y)


def test_the_names_of_columns_are_kept_and_said_to_be():
    pandas = pytest.importorskip("pandas")
    said = "The names of the columns, which are kept in feature_names_in_."
    named = logistic().fit(pandas.DataFrame(X, columns=[*"abcd", "of Jane"]), Y2)
    assert b"of Jane" in pickle.dumps(named) and said in named.privacy_.not_covered
    assert said not in named.fit(X, Y2).privacy_.not_covered


@pytest.mark.parametrize("name", ["dp-sgd", pytest.param("DP-Adam", marks=pytest.mark.slow)])
def test_the_forecast_looks_at_no_private_row(name):
    """Other rows of the same shape, the same learning rate to the last digit."""
    rates = set()
    for rows, y in ((X, Y2), (-5 * X[::-1] ** 3, Y2[::-1].copy())):
        model = logistic(learning_rate="forecast", optimizer=name).fit(rows, y)
        rates.add(model.learning_rate_)
    assert len(rates) == 1 and model.forecast_ is not None


@pytest.mark.slow
def test_the_forecast_on_public_data_looks_at_them():
    public = X[:200], Y2[:200]
    rate = logistic(learning_rate="forecast", public_data=public).fit(X, Y2).learning_rate_
    assert rate != logistic(learning_rate="forecast").fit(X, Y2).learning_rate_


@pytest.mark.slow
def test_a_hopeless_budget_is_warned_of():
    with pytest.warns(PrivacyWarning, match="almost nothing can be learnt"):
        logistic(learning_rate="forecast", target_epsilon=1e-4).fit(X, Y2)


BAD_PARAMETERS = [
    ({"target_epsilon": -1}, "target_epsilon to be a finite number > 0, got -1"),
    ({"target_delta": 1.5}, "0 < target_delta < 1"),
    ({"optimizer": "adam"}, "an optimizer among DP-SGD, DP-SignSGD, DP-Adam, got 'adam'"),
    ({"learning_rate": "best"}, "learning_rate to be a finite number > 0 or \"forecast\", got 'best'"),
    ({"l2_clip_norm": 0}, "l2_clip_norm to be a finite number > 0"),
    ({"num_epochs": 0}, "num_epochs to be a finite number > 0"),
    ({"num_examples": 2.5}, "num_examples to be a whole number"),
    ({"expected_batch_size": 1e6}, "0 < batch_size <= num_examples"),
    ({"insecure_seed": 1, "secure_noise": True}, "got both"),
]


@pytest.mark.parametrize("changed, words", BAD_PARAMETERS)
@pytest.mark.parametrize("make, X, y", CASES)
def test_a_bad_parameter_is_refused_in_a_sentence(make, X, y, changed, words):
    with pytest.raises(ValueError, match=words):
        make(**changed).fit(X, y)


NAN = np.where(np.arange(400)[:, None] == 3, np.nan, X)
BAD_DATA = [
    (logistic(), (NAN, Y2), "NaN"),
    (logistic(), (X, Y2[:10]), "inconsistent numbers of samples"),
    (logistic(classes=None), (X, np.zeros(400)), "two or more classes, got one class only"),
    (logistic(classes=None), (X, Y3), "use DPSoftmaxRegression"),
    (logistic(), (X, Y3), "labels among classes"),
    (logistic(data_norm=0.0), (X, Y2), "data_norm to be a finite number > 0"),
    (logistic(data_norm="x"), (X, Y2), "data_norm to be a finite number > 0"),
    (factorization(num_users=None), (PAIRS, RATINGS), "num_users to be a whole number"),
    (factorization(num_users=3), (PAIRS, RATINGS), "Expected whole ids 0 .. 2"),
    (factorization(), (PAIRS + 0.5, RATINGS), "Expected whole ids 0 .. 11"),
    (factorization(), (X, RATINGS[:1].repeat(400)), "two columns"),
    (factorization(), (PAIRS, RATINGS + 10), "rating"),
]


@pytest.mark.parametrize("model, data, words", BAD_DATA)
def test_bad_data_are_refused_in_a_sentence(model, data, words):
    with pytest.raises(ValueError, match=words):
        model.fit(*data)


def test_what_would_break_the_guarantee_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="a weight would multiply what one row can change"):
        logistic().fit(X, Y2, sample_weight=np.ones(400))
    assert not hasattr(logistic(), "partial_fit")
    with pytest.raises(AttributeError, match="would spend more than target_epsilon"):
        _ = logistic().partial_fit


def test_predicting_needs_a_fit_and_the_same_columns():
    with pytest.raises(NotFittedError):
        logistic().predict(X)
    with pytest.raises(ValueError, match="5 features"):
        logistic().fit(X, Y2).predict(X[:, :3])


def test_stand_ins_follow_from_public_numbers_alone():
    shapes = [Shape(500, 40, 3, row_norm=4.0, is_sparse=is_sparse) for is_sparse in (True, False)]
    for shape in shapes:
        data = stand_in(shape)
        assert data.content_hash == stand_in(shape).content_hash and set(data.labels) == {0, 1, 2}
        rows = data.features.toarray() if shape.is_sparse else data.features
        np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 4.0, rtol=1e-5)
    for is_sparse in (True, False):
        assert stand_in(Shape(1, 1, 2, row_norm=4.0, is_sparse=is_sparse)).num_examples == 1
    ratings = stand_in_ratings(num_examples=50, num_users=1, num_items=2, rating_scale=(-1.0, 1.0))
    assert np.abs(ratings.rating).max() <= 1.0


def test_the_package_does_not_import_scikit_learn():
    code = "import sys, noisecast; print('sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
