"""Encoders against encodings computed by hand; what they are made from; writing them down."""

import json

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import example, given
from hypothesis import strategies as st

from noisecast.problems.datasets import (
    DataError,
    MatrixEncoder,
    TabularEncoder,
    TextEncoder,
    encoder_from_json,
    read_vocabulary,
    tokenize,
    words,
)
from noisecast.problems.datasets.words import words_of

TEXTS = ["the cat saw the dog", "the cat", "", "zebra zebra cat"]
WORDS = ("the", "cat", "saw")


@pytest.mark.parametrize(
    "text, tokens",
    [
        ("One<br /><br />two", ["one", "two"]),
        ("a<br>b<BR/>c", ["a", "b", "c"]),
        ("Don't 'quote' rock'n'roll'", ["don't", "quote", "rock'n'roll"]),
        ("snake_case x-ray 3.5 C++", ["snake", "case", "x", "ray", "3", "5", "c"]),
        ("Über café — 日本", ["über", "café", "日本"]),
        ("... !?", []),
    ],
)
def test_tokens_are_lower_case_words_with_inner_apostrophes(text, tokens):
    assert tokenize(text) == tokens


@given(st.text(st.one_of(st.sampled_from("a'_<br/>\x1c\x85 "), st.characters(max_codepoint=0x17F))))
@example("'a''b' c'd'e '' f'<br>'g")
def test_latin_letters_are_cut_as_all_others_are(text):
    """A letter of another alphabet behind it sends the text to the regular expression."""
    assert [*tokenize(text), "ж"] == tokenize(text + " ж")


def test_a_long_text_has_the_same_words_in_pieces(monkeypatch):
    """Wherever a piece may end, which is at every place: no word, no line break and no first words change."""
    text = "It's  a <br\t/>film;<BR />\n\n it isn't<br   />ΟΔΟΣ ΟΔΟΣ 'x' naïve\u2003end <br"
    whole = tokenize(text)
    for piece in range(len(text)):
        monkeypatch.setattr(words, "PIECE", piece)
        assert tokenize(text) == whole
        assert [found.words.to_pylist() for found in words_of([text], 3)] == [whole[:3]]


@given(st.lists(st.text("aé'ж ", max_size=12)), st.none() | st.integers(0, 3), st.integers(1, 3))
def test_words_of_many_texts_are_those_of_each(texts, most, at_once):
    """However many are cut at once: empty ones, other alphabets and more words than wanted in between."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "TEXTS_AT_ONCE", at_once)
        found = list(words_of(texts, most))
    assert [length for some in found for length in some.lengths] == [len(tokenize(text)[:most]) for text in texts]
    assert [word for some in found for word in some.words.to_pylist()] == [w for t in texts for w in tokenize(t)[:most]]


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("binary", [[1, 1, 1], [1, 1, 0], [0, 0, 0], [0, 1, 0]]),
        ("count", [[2, 1, 1], [1, 1, 0], [0, 0, 0], [0, 1, 0]]),
        ("term-frequency", [[2 / 5, 1 / 5, 1 / 5], [1 / 2, 1 / 2, 0], [0, 0, 0], [0, 1 / 3, 0]]),
    ],
)
def test_encodings_computed_by_hand(kind, expected):
    encoded = TextEncoder(kind, WORDS).encode(TEXTS)
    assert isinstance(encoded, sp.csr_array) and encoded.dtype == np.float32
    np.testing.assert_allclose(encoded.toarray(), expected, rtol=1e-6)


def test_the_padded_encoding_computed_by_hand():
    """Four tokens: START the cat saw | START the cat PAD | START PAD PAD PAD | START zebra zebra cat."""
    encoder = TextEncoder("padded-term-frequency", WORDS, max_tokens=4)
    pad_start_oov_words = [[0, 1, 0, 1, 1, 1], [1, 1, 0, 1, 1, 0], [3, 1, 0, 0, 0, 0], [0, 1, 2, 0, 1, 0]]
    np.testing.assert_allclose(encoder.encode(TEXTS).toarray(), np.array(pad_start_oov_words) / 4)


def test_padded_rows_sum_to_one_with_290_tokens_in_the_given_number_of_columns():
    encoder = TextEncoder.fit([*TEXTS, "word " * 1000], "padded-term-frequency", vocabulary_size=6)
    assert encoder.max_tokens == 290 and encoder.num_features == 6 and len(encoder.vocabulary) == 3
    encoded = encoder.encode([*TEXTS, "word " * 1000]).toarray()
    np.testing.assert_allclose(encoded.sum(axis=1), 1, rtol=1e-6)
    assert encoded[-1, 3] == np.float32(289 / 290), "START and 289 words: cut at the end"


def test_term_frequencies_sum_to_one_where_all_words_are_known():
    texts = [text for text in TEXTS if text]
    encoded = TextEncoder.fit(texts, "term-frequency").encode(texts)
    np.testing.assert_allclose(encoded.sum(axis=1), 1, rtol=1e-6)


def test_max_tokens_cuts_the_other_kinds_as_well():
    encoder = TextEncoder("term-frequency", WORDS, max_tokens=2)
    np.testing.assert_allclose(encoder.encode(TEXTS[:1]).toarray(), [[1 / 2, 1 / 2, 0]])


def test_the_vocabulary_is_the_most_frequent_words_and_ties_go_by_the_alphabet():
    encoder = TextEncoder.fit(["b b a", "c a d", "d"], "count", vocabulary_size=3)
    assert encoder.vocabulary == ("a", "b", "d")
    assert encoder.vocabulary_is_private, "read from the texts, so it tells what they hold"


@pytest.mark.parametrize("kind", ["binary", "count", "term-frequency", "padded-term-frequency"])
def test_unit_rows_have_unit_norm_and_zero_rows_stay(kind):
    plain = TextEncoder(kind, WORDS).encode(TEXTS).toarray()
    unit = TextEncoder(kind, WORDS, unit_rows=True).encode(TEXTS).toarray()
    norms = np.linalg.norm(plain, axis=1, keepdims=True)
    np.testing.assert_allclose(unit, plain / np.where(norms > 0, norms, 1), rtol=1e-6)


def test_unit_rows_are_the_same_dense_and_sparse():
    rows = np.array([[3, 4, 0], [0, 0, 0], [1e-20, 0, 0]], dtype=np.float32)
    encoder = MatrixEncoder(3, unit_rows=True)
    expected = [[0.6, 0.8, 0], [0, 0, 0], [1, 0, 0]]
    np.testing.assert_allclose(encoder.encode(rows), expected, rtol=1e-6)
    np.testing.assert_allclose(encoder.encode(sp.csr_array(rows)).toarray(), expected, rtol=1e-6)


def test_a_row_is_encoded_alike_whatever_stands_beside_it():
    encoder = TextEncoder("padded-term-frequency", WORDS)
    together = encoder.encode(TEXTS).toarray()
    alone = np.concatenate([encoder.encode([text]).toarray() for text in TEXTS])
    np.testing.assert_array_equal(together, alone)


def test_columns_are_clamped_to_the_bounds_and_scaled():
    encoder = TabularEncoder.fit(["b", "a"], bounds={"a": [0, 10], "b": [-1, 3], "unused": [0, 1]})
    frame = pd.DataFrame({"a": [0, 5, 99], "b": ["-1", "1", "-7"], "c": ["x", "y", "z"]})
    np.testing.assert_allclose(encoder.encode(frame), [[-1, -1], [0, 0], [-1, 1]])


def test_without_bounds_values_are_used_as_they_are():
    frame = pd.DataFrame({"a": [1.5, -2.0], "b": [0, 7]})
    np.testing.assert_array_equal(TabularEncoder.fit(["a", "b"]).encode(frame), frame.to_numpy())


ENCODERS = [
    TextEncoder("padded-term-frequency", WORDS, column="review", unit_rows=True, vocabulary_is_private=False),
    TextEncoder("count", WORDS, max_tokens=3),
    TabularEncoder(("a", "b")),
    TabularEncoder(("b", "a"), (0.0, -1.0), (1.0, 1.5), unit_rows=True),
    TabularEncoder(("a",), (0.0,), (4.0,), unit_rows=True, categories=(("b", ("1", "2", "*")),)),
    MatrixEncoder(2, first_column=1),
]
ROWS = pd.DataFrame({"review": TEXTS, "text": TEXTS, "a": [0.1, 2, 3, 4], "b": [1, 2, 3, 0.3]})


@pytest.mark.parametrize("encoder", ENCODERS, ids=lambda e: e.name)
def test_an_encoder_survives_json_and_encodes_the_same(encoder):
    again = encoder_from_json(json.loads(json.dumps(encoder.to_json())))
    assert again == encoder
    rows = sp.csr_array(np.array([[0, 1, 0.3]])) if isinstance(encoder, MatrixEncoder) else ROWS
    first, second = (sp.csr_array(e.encode(rows)).toarray() for e in (encoder, again))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("kind", ["binary", "count", "term-frequency", "padded-term-frequency"])
def test_texts_without_a_known_word_are_doubted_if_they_are_most(kind):
    encoder = TextEncoder(kind, ("zebra", "cat"), unit_rows=True)
    assert encoder.doubts(encoder.encode(["a cat", "perro", "a zebra", "", "gato", "cat"])) == ()
    [doubt] = encoder.doubts(encoder.encode(["a cat", "perro", "gato"]))
    assert doubt.startswith("2 of 3 texts have no word of the vocabulary")


@pytest.mark.parametrize("unit_rows", [False, True])
def test_categories_without_a_listed_value_are_doubted_if_they_are_most(unit_rows):
    categories = (("city", ("*", "Oslo")), ("size", ("s", "m")), ("street", ("A", "B", "*")))
    encoder = TabularEncoder(("age",), categories=categories, unit_rows=unit_rows)
    rows = {"age": [1, 2, 3], "city": ["Oslo", "OSLO", "oslo"], "size": ["s"] * 3, "street": ["A", "B", "C"]}
    [doubt] = encoder.doubts(encoder.encode(pd.DataFrame(rows)))
    assert doubt.startswith("2 of 3 rows have none of the values listed for column 'city'")
    assert encoder.doubts(encoder.encode(pd.DataFrame(rows | {"city": ["Oslo"] * 3}))) == ()


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"encoder": "pickle"}, "text, tabular, matrix, got 'pickle'"),
        ([], "got 'None'"),
        ({"encoder": "text", "kind": "tf-idf", "vocabulary": ["a"]}, "kind"),
        ({"encoder": "text", "kind": "count"}, "vocabulary"),
        ({"encoder": "text", "kind": "count", "vocabulary": [1]}, "vocabulary.0"),
        ({"encoder": "tabular", "columns": ["a"], "lower": [0.0]}, "lower and upper"),
        ({"encoder": "matrix", "num_features": "many"}, "num_features"),
    ],
)
def test_an_edited_encoder_is_refused(fields, says):
    with pytest.raises(DataError) as error:
        encoder_from_json(fields)
    assert says in str(error.value)


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: TextEncoder("tf-idf", WORDS), "binary, count, term-frequency, padded-term-frequency, got 'tf-idf'"),  # type: ignore[arg-type]
        (lambda: TextEncoder("count", ()), "one word or more"),
        (lambda: TextEncoder("count", ("a", "b", "a")), "'a' twice"),
        (lambda: TextEncoder("count", WORDS, max_tokens=0), "max_tokens >= 1, got 0"),
        (lambda: TextEncoder.fit(["", "..."], "count"), "are the texts or the file empty"),
        (lambda: TextEncoder.fit(["a"], "padded-term-frequency", vocabulary_size=3), "got 3"),
        (lambda: TextEncoder("count", WORDS).encode("one text"), "a table with a text column"),
        (lambda: TextEncoder("count", WORDS).encode(np.eye(2), "x.npz"), "got x.npz"),
        (lambda: TextEncoder("count", WORDS).encode(ROWS[["a", "b"]], "x.csv"), "'text' in x.csv, got the columns a"),
        (lambda: TabularEncoder(("a", "a")), "'a' twice"),
        (lambda: TabularEncoder(()), "got none"),
        (lambda: TabularEncoder(("a",), (0.0,), (0.0,)), "low < high for column 'a', got [0.0, 0.0]"),
        (lambda: TabularEncoder(("a",), (0.0, 1.0), (1.0, 2.0)), "2 lower and 2 upper bounds for 1 columns"),
        (lambda: TabularEncoder.fit(["a", "b"], bounds={"a": [0, 1]}), "got none for b"),
        (lambda: TabularEncoder(("a",), categories=(("a", ("x",)),)), "'a' twice"),
        (lambda: TabularEncoder((), categories=(("a", ("x", "x ")),)), "'x' twice"),
        (lambda: TabularEncoder((), categories=(("a", ()),)), "a value or more for column 'a'"),
        (lambda: TabularEncoder(("a",)).encode(np.eye(1), "x.npz"), "got x.npz"),
        (lambda: MatrixEncoder(0), "num_features >= 1"),
        (lambda: MatrixEncoder(2).encode(pd.DataFrame({"a": [1]}), "x.csv"), "got x.csv"),
        (lambda: MatrixEncoder(2).encode(np.eye(3), "x.npz"), "Expected 2 features in x.npz, as in training, got 3"),
        (lambda: MatrixEncoder(3).encode(np.eye(2), "x.npz"), "Expected 3 features in x.npz, as in training, got 2"),
        (lambda: MatrixEncoder(2, 1).encode(sp.csr_array(np.eye(3)), "x.svm"), "numbered from 1 in x.svm"),
    ],
)  # fmt: skip
def test_a_bad_encoder_or_row_is_refused(make, says):
    with pytest.raises(DataError) as error:
        make()
    assert says in str(error.value)


def test_a_public_vocabulary_is_read_in_its_order(tmp_path):
    file = tmp_path / "words.txt"
    file.write_text("zebra\n\ncat\r\ndon't\n", encoding="utf-8")
    assert read_vocabulary(file) == ("zebra", "cat", "don't")


@pytest.mark.parametrize(
    "content, says",
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"cat\ndog\ncat\n", "Line 3"),
        (b"cat\nhot dog\n", "Line 2"),
        (b"Cat\n", "Line 1"),
        (b"cat\n\xff\xfe\n", "Line 2"),
    ],
)
def test_a_bad_vocabulary_is_refused(tmp_path, content, says):
    file = tmp_path / "words.txt"
    file.write_bytes(content)
    with pytest.raises(DataError) as error:
        read_vocabulary(file)
    assert says in str(error.value) and "words.txt" in str(error.value)
