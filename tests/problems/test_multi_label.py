"""Multi-label models: the likelihood against plain definitions, its data, its engines, its command line."""

import dataclasses
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import scipy.sparse

from noisecast import DPSGD, DPAdam, DPSignSGD, Poisson, SampledGaussian, Scenario, linear_model
from noisecast.cli import main
from noisecast.engines import dense, row_sparse
from noisecast.engines.dense import DenseRun
from noisecast.engines.row_sparse import RowSparseRun
from noisecast.model_dir import load_model
from noisecast.privacy.noise import RandomRoot
from noisecast.problems.datasets import (
    DataError,
    Dataset,
    ReadOptions,
    encode_label_sets,
    label_sets,
    load_file,
    load_test_file,
    split_by_content,
    stackoverflow,
)
from noisecast.problems.linear import LIKELIHOODS, MULTI_LABEL, MULTI_LABEL_MEAN, SOFTMAX, Labelled
from noisecast.problems.rows import rows_from

SEED_DATA, SEED_ENGINE = 910_001, 910_002  # written down before any result
N, P, M = 60, 30, 8
ROOT = RandomRoot.from_insecure_seed(SEED_ENGINE)


def sets_of_labels(count=N, num_labels=M, seed=SEED_DATA) -> np.ndarray:
    """None to all of them."""
    rng = np.random.default_rng(seed)
    return label_sets(
        [np.flatnonzero(row).tolist() for row in rng.random((count, num_labels)) < rng.random((count, 1))]
    )


def toy(name="toy", seed=SEED_DATA) -> Dataset:
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(N, P)) * (rng.random((N, P)) < 0.15)
    return Dataset(name, scipy.sparse.csr_array(features), sets_of_labels(seed=seed), tuple("abcdefgh"))


def scenario(problem, *, z=1.0, clip=0.8, batch_size=12, optimizer=None, num_steps=20) -> Scenario:
    sampler = Poisson.for_batch_size(batch_size, N)
    mechanism = SampledGaussian(noise_multiplier=z, l2_clip_norm=clip, sampler=sampler)
    optimizer = optimizer or DPSGD(learning_rate=0.5)
    return Scenario(problem=problem, mechanism=mechanism, optimizer=optimizer, num_steps=num_steps, target_delta=1e-5)


# --- The likelihood ---------------------------------------------------------------------------------------------------


def answers(labels: np.ndarray, num_labels: int = M) -> np.ndarray:
    return np.array([[label in row for label in range(num_labels)] for row in labels], dtype=float)


def test_the_loss_is_the_log_likelihood_of_independent_outputs():
    labels = sets_of_labels()
    logits = np.random.default_rng(SEED_DATA).normal(size=(N, M)) * 3
    assert (labels < 0).all(axis=1).any() and (labels >= 0).all(axis=1).any(), "an empty set and a full one"
    signs = 2 * answers(labels) - 1
    expected = np.logaddexp(0, -signs * logits).sum(axis=1)
    args = jnp.asarray(logits, jnp.float32), jnp.asarray(labels)
    np.testing.assert_allclose(MULTI_LABEL.loss(*args), expected, rtol=1e-5)
    np.testing.assert_allclose(MULTI_LABEL_MEAN.loss(*args), expected / M, rtol=1e-5)


@pytest.mark.parametrize("likelihood", LIKELIHOODS.values(), ids=LIKELIHOODS)
def test_every_likelihood_is_consistent(likelihood):
    """The residual is the loss's derivative; the first loss and the curvature bounds hold, and are not idle."""
    num_classes = 2 if likelihood.name == "logistic" else M
    m = likelihood.num_outputs(num_classes)
    rng = np.random.default_rng(SEED_DATA)
    labels = sets_of_labels() if likelihood.takes_sets else rng.integers(0, num_classes, N)
    logits = jnp.asarray(rng.normal(size=(N, m)), jnp.float32)
    derivative = jax.grad(lambda z: likelihood.loss(z, jnp.asarray(labels)).sum())(logits)
    np.testing.assert_allclose(likelihood.residual(logits, jnp.asarray(labels)), derivative, atol=1e-6)
    np.testing.assert_allclose(likelihood.loss(0 * logits, jnp.asarray(labels)), likelihood.initial_loss(m), rtol=1e-6)
    largest, trace = likelihood.curvature(m)
    of_one = jax.hessian(lambda z, label: likelihood.loss(z[None], label[None])[0])
    for at in (0 * logits, logits):
        hessians = np.asarray(jax.vmap(of_one)(at, jnp.asarray(labels)), np.float64)
        assert np.linalg.eigvalsh(hessians).max() <= largest * (1 + 1e-6)
        assert np.trace(hessians, axis1=1, axis2=2).max() <= trace * (1 + 1e-6)
    assert likelihood.probabilities(logits).shape == (N, num_classes)
    assert likelihood.scores(logits, jnp.asarray(labels)).shape == (N, likelihood.num_scores)


def plain_metrics(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Pair by pair, with sets."""
    truth = [{label for label in row if label >= 0} for row in labels.tolist()]
    top = [set(sorted(range(len(z)), key=lambda j: (-z[j], j))[:5]) for z in logits.tolist()]
    guesses = [{j for j, value in enumerate(z) if value > 0} for z in logits.tolist()]
    asked = sum(map(len, truth))
    right = sum(len(t & g) for t, g in zip(truth, guesses))
    return {
        "recall_at_5": sum(len(t & five) for t, five in zip(truth, top)) / max(asked, 1),
        "micro_f1": 2 * right / max(asked + sum(map(len, guesses)), 1),
    }


@pytest.mark.parametrize("case", ["any", "ties", "no labels", "nothing guessed", "all guessed"])
def test_metrics_are_those_of_sets(case):
    labels = np.full((N, 1), -1) if case == "no labels" else sets_of_labels()
    logits = np.random.default_rng(SEED_DATA + 1).normal(size=(N, M)).astype(np.float32)
    logits = {"ties": np.round(logits) + 0.0, "nothing guessed": logits - 9, "all guessed": logits + 9}.get(
        case, logits
    )
    scores = MULTI_LABEL.scores(jnp.asarray(logits), jnp.asarray(labels))
    found = MULTI_LABEL.metrics(scores.mean(axis=0))
    expected = plain_metrics(logits, labels)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6)
    if case == "any":
        assert 0.3 < expected["recall_at_5"] < 0.9 and 0.2 < expected["micro_f1"] < 0.8, "a metric that says something"


# --- Engines ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group_size", [1, 3])
def test_the_engines_count_the_same(group_size):
    problem = linear_model(toy(), toy("other", SEED_DATA + 1))
    group = [scenario(problem, clip=clip) for clip in (0.8, 0.5, 3.0)[:group_size]]
    assert row_sparse.why_unsupported(group[0]) is None
    run = RowSparseRun(group, repeats=(0, 1), root=ROOT)
    for step in (0, 20):  # the first look is at ties
        run.advance(step)
        clip = jnp.array([s.mechanism.l2_clip_norm for s in group])
        plain, found = dense.evaluate(problem, jnp.asarray(run.params), clip), run.evaluate()
        assert {"recall_at_5", "test_recall_at_5", "micro_f1", "test_micro_f1", "test_loss"} <= found.keys()
        assert plain.keys() == found.keys()
        for name in plain:
            slack = 1.01 / N if name == "clip_fraction" else 1e-7
            np.testing.assert_allclose(found[name], plain[name], rtol=2e-5, atol=slack, err_msg=name)
    logits = np.asarray(problem.logits(problem.train.rows, jnp.asarray(run.params[1, 0])))
    for name, value in plain_metrics(logits, np.asarray(problem.train.labels)).items():
        np.testing.assert_allclose(found[name][1, 0], value, rtol=1e-6)


@pytest.mark.parametrize("engine", [RowSparseRun, DenseRun])
def test_hostile_rows_move_a_sum_by_no_more_than_the_clip_norm(engine):
    """Every example, next to no noise: whatever it holds, each moves the parameters by at most eta C / B a step."""
    data = toy()
    features = data.features.toarray()
    for row, value in enumerate([1e4, 1e18, -1e19, 3e38]):
        features[row, row] = value
    problem = linear_model(dataclasses.replace(data, features=scipy.sparse.csr_array(features)))
    mechanism = SampledGaussian(noise_multiplier=1e-7, l2_clip_norm=0.6, sampler=Poisson(1.0, 1.0))
    question = dataclasses.replace(scenario(problem), mechanism=mechanism, optimizer=DPSGD(learning_rate=1.0))
    run, before = engine([question], repeats=(0,), root=ROOT), 0.0
    for step in range(1, 4):
        run.advance(step)
        assert np.isfinite(run.params).all()
        assert np.linalg.norm(run.params - before) <= N * 0.6 * (1 + 1e-5)
        before = run.params


@pytest.mark.parametrize("l2_clip_norm", [0.2, 3.0])
@pytest.mark.parametrize("num_labels", [8, 500])
def test_one_example_moves_the_sum_by_at_most_the_clip_norm(l2_clip_norm, num_labels):
    """One joint norm over all outputs; clipping each output by itself would let sqrt(m) C through."""
    rng = np.random.default_rng(SEED_DATA)
    labels, names = sets_of_labels(num_labels=num_labels), tuple(map(str, range(num_labels)))
    problem = linear_model(Dataset("wide", rng.normal(size=(N, P)), labels, names))
    problem = dataclasses.replace(problem, train=Labelled(rows_from(rng.normal(size=(N, P))), problem.train.labels))
    params = jnp.asarray(rng.normal(size=problem.num_params), jnp.float32)
    alone = jnp.arange(N)[:, None] == jnp.arange(N)
    everyone = problem.examples(jnp.arange(N), jnp.ones(N, bool))
    one = jax.jit(lambda mask: problem.clipped_sum(params, dataclasses.replace(everyone, mask=mask), l2_clip_norm))
    norms = np.array([np.linalg.norm(np.asarray(one(mask), np.float64)) for mask in alone])
    assert norms.max() <= l2_clip_norm * (1 + 1e-6)
    assert (norms > 0.99 * l2_clip_norm).all()  # control: they are as long as they may be


@pytest.mark.parametrize(
    "of_sum, of_mean",
    [
        (DPSGD(learning_rate=0.5), DPSGD(learning_rate=0.5 * M)),
        (DPSignSGD(learning_rate=0.05), DPSignSGD(learning_rate=0.05)),
        (DPAdam(learning_rate=0.05, eps=1e-3), DPAdam(learning_rate=0.05, eps=1e-3 / M)),
    ],
    ids=["sgd", "sign", "adam"],
)
def test_the_mean_is_the_sum_in_other_units(of_sum, of_mean):
    """Without dice, which each problem rolls for itself: everyone, no noise. Its std z C / m scales as the gradient."""
    params = []
    for likelihood, clip, optimizer in [(MULTI_LABEL, 0.8, of_sum), (MULTI_LABEL_MEAN, 0.8 / M, of_mean)]:
        problem = linear_model(toy(), likelihood=likelihood)
        question = scenario(problem, z=0.0, clip=clip, batch_size=N, optimizer=optimizer)
        run = DenseRun([question], repeats=(0,), root=ROOT)
        run.advance(20)
        params.append(run.params)
    np.testing.assert_allclose(params[0], params[1], rtol=1e-4, atol=1e-5)
    assert np.abs(params[0]).max() > 0.1


def test_the_mean_is_left_to_the_dense_engine():
    why = row_sparse.why_unsupported(scenario(linear_model(toy(), likelihood=MULTI_LABEL_MEAN)))
    assert why == "There is no row-sparse form of multi-label mean."


def test_likelihoods_refuse_labels_of_another_kind():
    single = Dataset("single", np.eye(3), np.array([0, 1, 2]), ("a", "b", "c"))
    with pytest.raises(ValueError, match="Expected one label a row for softmax, got a set of labels a row in toy"):
        linear_model(toy(), likelihood=SOFTMAX)
    with pytest.raises(
        ValueError, match="Expected a set of labels a row for multi-label, got one label a row in single"
    ):
        linear_model(toy(), single)
    with pytest.raises(ValueError, match="Expected two classes for logistic, got 3"):
        linear_model(single, likelihood=LIKELIHOODS["logistic"])


def test_what_is_no_dataset_is_named():
    with pytest.raises(TypeError, match=r"Arrays become one by noisecast.problems.datasets.Dataset\(name, features"):
        linear_model(np.eye(3), np.array([0, 1, 1]))  # type: ignore[arg-type]


# --- Data -------------------------------------------------------------------------------------------------------------


def test_sets_are_written_in_one_way():
    names = ("a", "b", "c")
    one = Dataset("x", np.eye(3), np.array([[2, 0, -1, 2], [-1, -1, -1, -1], [-1, 1, -1, -1]]), names)
    other = Dataset("y", np.eye(3), np.array([[0, 2], [-1, -1], [1, -1]]), names)
    assert one.labels.tolist() == [[0, 2], [-1, -1], [1, -1]] and one.labels.dtype == np.int32
    assert one.content_hash == other.content_hash
    assert linear_model(one).fingerprint == linear_model(other).fingerprint
    changed = Dataset("y", np.eye(3), np.array([[0, 2], [1, -1], [1, -1]]), names)
    assert changed.content_hash != one.content_hash
    assert one.rows([1, 2]).labels.tolist() == [[-1], [1]]
    assert Dataset("none", np.eye(2), np.full((2, 3), -1), names).labels.tolist() == [[-1], [-1]]


def test_labels_are_stored_compactly():
    rng = np.random.default_rng(SEED_DATA)
    labels = label_sets(rng.integers(0, 500, (250_000, 5)).tolist())
    assert labels.nbytes <= 250_000 * 5 * 4


@pytest.mark.parametrize("labels", [[[3]], [[-2]], [[[0]]], [[0.5]]])
def test_labels_that_are_none_are_refused(labels):
    with pytest.raises(DataError, match="Expected"):
        Dataset("bad", np.eye(1), np.array(labels), ("a", "b", "c"))


def test_a_split_by_content_does_not_move_when_another_row_has_more_labels():
    """The padding is as long as the longest set of all rows, so it must not decide where a row goes."""
    data = toy()
    wide = Dataset(
        "wide",
        scipy.sparse.vstack([data.features, scipy.sparse.csr_array(np.ones((1, P)))]).tocsr(),
        label_sets([*(row[row >= 0] for row in data.labels), range(20)]),
        (*data.label_names, *map(str, range(len(data.label_names), 20))),
    )
    before, after = split_by_content(data, 0.4)[1], split_by_content(wide, 0.4)[1]
    assert before.tolist() == [row for row in after if row < N]
    emptied = Dataset("emptied", data.features, np.full((N, 1), -1), tuple("abcdefgh"))
    assert split_by_content(emptied, 0.4)[1].tolist() != before.tolist(), "labels do decide"


TABLE = {
    "text": ["loop in python", "join tables", "hello", "php and sql"],
    "tags": ["python|c", " sql ", "", "php|sql|php"],
}


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet", ".csv.gz"])
def test_a_column_of_label_sets_is_read(tmp_path, suffix):
    file, frame = tmp_path / f"q{suffix}", pd.DataFrame(TABLE)
    if suffix == ".parquet":
        frame.loc[2, "tags"] = None  # missing is empty
        frame.to_parquet(file)
    else:
        frame.to_csv(file, index=False, sep="\t" if suffix == ".tsv" else ",")
    data, encoder = load_file(file, ReadOptions(label="tags", label_separator="|", text="text"))
    assert data.label_names == ("c", "php", "python", "sql")
    assert data.labels.tolist() == [[0, 2], [3, -1], [-1, -1], [1, 3]]
    again = load_test_file(file, encoder, data.label_names, label="tags", label_separator="|")
    assert again.content_hash == data.content_hash


def test_public_label_names_are_imposed(tmp_path):
    file, names = tmp_path / "q.csv", tmp_path / "names.txt"
    pd.DataFrame(TABLE).to_csv(file, index=False)
    names.write_text("sql\nrust\n\npython\nc\nphp\n")
    options = ReadOptions(label="tags", label_separator="|", label_names=names, text="text")
    data, _ = load_file(file, options)
    assert data.label_names == ("sql", "rust", "python", "c", "php")
    assert data.labels.tolist() == [[2, 3], [0, -1], [-1, -1], [0, 4]]
    names.write_text("sql\npython\nphp\n")
    with pytest.raises(
        DataError, match=r"Row 1 of .* has the label 'c', which is not one of those expected: sql, python"
    ):
        load_file(file, options)
    for text, says in [("sql\nsql\n", "'sql' twice"), ("sql\n", "Expected two labels or more"), ("", "is empty")]:
        names.write_text(text)
        with pytest.raises(DataError, match=says):
            load_file(file, options)


@pytest.mark.parametrize(
    "cells, separator, says",
    [
        (["a|b", "b"], "", "Expected a label separator of one character or more"),
        (["", " | "], "|", "Expected a label in f.csv, got only rows without one"),
        ([f"text {i}|more {i}" for i in range(9)], "|", "name another label column or separator"),
    ],
)
def test_bad_cells_are_refused(cells, separator, says):
    with pytest.raises(DataError) as error:
        encode_label_sets(cells, separator, source="f.csv")
    assert says in str(error.value) and "\n" not in str(error.value)


def test_only_tables_have_cells(tmp_path):
    file = tmp_path / "m.npz"
    np.savez(file, X=np.eye(4), y=np.array([0, 1, 0, 1]))
    with pytest.raises(DataError, match="Expected a table for a label separator, got the matrix"):
        load_file(file, ReadOptions(label_separator="|"))
    table = tmp_path / "q.parquet"
    pd.DataFrame({"a": [1.0, 2.0], "tags": [["x", "y"], ["x"]]}).to_parquet(table)
    with pytest.raises(DataError, match="Expected text in column 'tags'"):
        load_file(table, ReadOptions(label="tags", label_separator="|"))


SHARED = Path(os.environ.get("NOISECAST_DATA", Path(__file__).parents[2] / "../shared/data"))


@pytest.mark.skipif(not (SHARED / "so_titles_tags_30k.csv.gz").exists(), reason="needs so_titles_tags_30k.csv.gz")
def test_stack_overflow_titles_keep_all_their_tags():
    train, test = stackoverflow(SHARED, multi_label=True)
    assert train.num_examples == 24_000 and test.num_examples == 6_000, "no title is left out"
    assert train.labels.shape[1] == 5 and train.num_classes == 100
    single, _ = stackoverflow(SHARED)
    assert train.label_names == single.label_names
    few, _ = stackoverflow(SHARED, multi_label=True, num_tags=10)
    assert few.num_examples == 24_000 and (few.labels < 0).all(axis=1).any(), "titles without a top tag are empty sets"
    direct, _ = load_file(
        SHARED / "so_titles_tags_30k.csv.gz", ReadOptions(label="tags", label_separator="|", text="title")
    )
    assert direct.num_examples == 30_000 and set(direct.label_names) == set(train.label_names)


# --- Command line -----------------------------------------------------------------------------------------------------


def question(kind: int) -> tuple[str, str]:
    """A title and its tags, by number: about php, sql, both, or neither."""
    words = ["array echo", "join table", "echo join array", "hello there"][kind]
    return words, ["php", "sql", "php|sql", ""][kind]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    rows = "".join(f"{title},{tags}\n" for title, tags in (question(i % 4) for i in range(400)))
    (tmp_path / "q.csv").write_text("title,tags\n" + rows)
    (tmp_path / "names.txt").write_text("sql\nphp\nrust\n")
    (tmp_path / "words.txt").write_text("array\necho\njoin\ntable\nhello\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


TRAIN = [
    *("train", "q.csv", "--text", "title", "--label", "tags", "--label-separator", "|", "--features", "binary"),
    *("--noise-multiplier", "0.5", "--batch-size", "100", "--num-steps", "150", "--output", "model"),
]


def test_a_multi_label_model_is_trained_saved_and_used(folder, capsys):
    assert main([*TRAIN, "--learning-rate", "3", "--test", "q.csv", "--insecure-seed", "7"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for words in ("training F1 (micro)", "test recall at 5"):
        assert words in printed
    saved = load_model(folder / "model")
    assert (saved.likelihood, saved.label_separator, saved.label_names) == (MULTI_LABEL, "|", ("php", "sql"))

    assert main(["predict", "model", "q.csv", "--label", "tags", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    measured = found["non_private_metrics"]
    assert measured["micro_f1"] > 0.95 and measured["recall_at_5"] == 1
    labels = [{guess["label"] for guess in row["labels"]} for row in found["predictions"]]
    assert labels[:4] == [{"php"}, {"sql"}, {"php", "sql"}, set()]
    assert all(guess["probability"] > 0.5 for row in found["predictions"] for guess in row["labels"])

    assert main(["predict", "model", "q.csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "labels,probabilities" and lines[1].startswith("php,0.") and lines[4] == ","
    assert main(["predict", "model", "q.csv", "--top-k", "2", "--label", "tags", "--output", "out.csv"]) == 0
    assert "Recall at 5 1, micro f1" in capsys.readouterr().err
    assert {row.split(",")[0] for row in (folder / "out.csv").read_text().splitlines()[1:]} <= {"php|sql", "sql|php"}


def test_public_label_names_need_no_confession(folder, capsys):
    assert (
        main([*TRAIN, "--label-names", "names.txt", "--vocabulary", "words.txt", "--num-examples", "400", "--json"])
        == 0
    )
    result = json.loads(capsys.readouterr().out)
    assert not any("labels" in sentence or "vocabulary" in sentence for sentence in result["privacy"]["not_covered"])
    assert result["learning_rate_origin"].startswith("a starting value") and result["learning_rate"] > 0
    assert result["non_private_metrics"]["loss"] < 3 * np.log(2)
    assert load_model(folder / "model").label_names == ("sql", "php", "rust")


@pytest.mark.parametrize(
    "arguments, says",
    [
        (
            [*TRAIN, "--label-names", "few.txt"],
            "Row 1 of q.csv has the label 'php', which is not one of those expected",
        ),
        (["" if word == "|" else word for word in TRAIN], "Expected a label separator of one character or more"),
        (
            [*TRAIN, "--test", "other.csv"],
            "Row 2 of other.csv has the label 'rust', which is not one of those expected",
        ),
        (["predict", "model", "q.csv", "--top-k", "3"], "Expected 1 <= --top-k <= 2 (the labels), got 3."),
    ],
)
def test_bad_input_meets_a_sentence(folder, capsys, arguments, says):
    (folder / "few.txt").write_text("sql\nrust\n")
    (folder / "other.csv").write_text("title,tags\njoin,sql\nborrow,rust|sql\n")
    if arguments[0] == "predict":
        assert main([*TRAIN, "--learning-rate", "1"]) == 0
        capsys.readouterr()
    assert main(arguments) == 2
    (sentence,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("Warning")]
    assert says in sentence
