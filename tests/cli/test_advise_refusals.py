"""`noisecast advise`: options that would be ignored, and probes that one record could upset, are refused."""

import pytest

from noisecast.cli import main

SCENARIO = """
num_steps = 20
target_delta = 1e-4
[problem]
kind = "file"
path = "rows.csv"
text = "text"
{more}
[mechanism]
noise_multiplier = 2.0
l2_clip_norm = 0.5
batch_size = 8
[[optimizer]]
name = "dp-sgd"
learning_rate = 1.0
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [f"{'good fine' if i % 2 else 'bad dull'} film,{'pos' if i % 2 else 'neg'}" for i in range(60)]
    (tmp_path / "rows.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    (tmp_path / "words.txt").write_text("good\nbad\nfilm\n")
    (tmp_path / "labels.txt").write_text("neg\npos\n")
    return tmp_path


def ask(folder, more, *options):
    (folder / "asked.toml").write_text(SCENARIO.format(more=more))
    return main(["advise", "asked.toml", "--epsilon", "2", *options])


@pytest.mark.parametrize(
    "more, missing",
    [
        ("", "a public label_names and a public vocabulary"),
        ('label_names = "labels.txt"', "a public vocabulary"),
        ('vocabulary = "words.txt"', "a public label_names"),
    ],
)
def test_a_probe_of_a_file_needs_public_labels_and_words(folder, capsys, more, missing):
    """A record with a new label would make another model of all records, and move every count."""
    assert ask(folder, more, "--private-probe", "0.5") == 2
    printed = capsys.readouterr()
    assert f"Expected {missing} in [problem]" in printed.err and printed.out == ""


def test_with_them_it_says_what_is_not_covered(folder, capsys):
    assert ask(folder, 'label_names = "labels.txt"\nvocabulary = "words.txt"', "--private-probe", "0.5") == 0
    assert "Not covered: the number of records" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["asked.toml", "--epsilon", "2", "--private-probe", "0.5", "--public"], "Expected --private-probe with"),
        (
            ["asked.toml", "--epsilon", "2", "--private-probe", "0.5", "--output", "o.parquet"],
            "Expected --private-probe",
        ),
        (["asked.toml", "--numbers", "n.toml"], "Expected --numbers alone"),
        (["--numbers", "n.toml", "--epsilon", "2"], "Expected --numbers alone"),
        (["--numbers", "n.toml", "--private-probe", "2"], "Expected --numbers alone"),
    ],
)
def test_what_would_be_ignored_is_refused(folder, capsys, arguments, sentence):
    assert main(["advise", *arguments]) == 2
    assert sentence in capsys.readouterr().err
