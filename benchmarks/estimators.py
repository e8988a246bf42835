"""DPLogisticRegression beside diffprivlib's logistic regression: IMDB tf-idf, the same rows, the same epsilon.

diffprivlib is pure epsilon (delta = 0), ours epsilon at delta = 1e-5: the stronger guarantee is theirs. diffprivlib
0.6.6 does not import with scikit-learn 1.9; --peer-python names an interpreter that has both, say of a virtual
environment with `pip install diffprivlib==0.6.6 scikit-learn==1.5.2`. Words and their rarity come from half of the test
reviews, as a public corpus; accuracy is on the other half.
"""

import json
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np


def main(
    *,
    data_dir: str | None = None,
    words: int = 10_000,
    epsilons: str = "0.1,1,8",
    seeds: int = 5,
    optimizer: str = "DP-Adam",
    inverse_penalties: str = "1,0.01,0.1,10",
    peer_python: str | None = None,
    peer_seeds: int = 3,
) -> None:
    """Accuracy on unseen reviews, its standard error over runs, and seconds a fit.

    Args:
      data_dir: folder with the reviews; else NOISECAST_DATA.   words: size of the public vocabulary.
      epsilons: with commas between.   seeds, peer_seeds: runs of each, with fresh noise.
      inverse_penalties: values of diffprivlib's C.
      peer_python: the interpreter that runs diffprivlib; None: this one.
    """
    parts = reviews(data_dir, words)
    for epsilon in map(float, epsilons.split(",")):
        print(report(f"DPLogisticRegression {optimizer}", epsilon, ours(parts, epsilon, seeds, optimizer)), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "reviews.pkl")
        file.write_bytes(pickle.dumps(parts))
        for epsilon in map(float, epsilons.split(",")):
            for c in map(float, inverse_penalties.split(",")):
                command = [peer_python or sys.executable, __file__, str(file), str(epsilon), str(c), str(peer_seeds)]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    print(f"diffprivlib did not run: {done.stderr.strip().splitlines()[-1]}; see --peer-python.")
                    return
                print(report(f"diffprivlib C={c:g}", epsilon, json.loads(done.stdout)), flush=True)


def reviews(data_dir: str | None, words: int) -> tuple:
    """(training rows, labels, test rows, labels) of unit norm."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    from noisecast.problems.datasets import imdb_texts, public_split

    train, test = imdb_texts(data_dir)
    labels = [part["label"].astype(int).to_numpy() for part in (train, test)]
    corpus, unseen = public_split(len(test), 0.5)
    vectorizer = TfidfVectorizer(max_features=words).fit(test["text"].iloc[corpus])
    rows = vectorizer.transform(train["text"]), vectorizer.transform(test["text"].iloc[unseen])
    return rows[0], labels[0], rows[1], labels[1][unseen]


def ours(parts: tuple, epsilon: float, seeds: int, optimizer: str) -> list[tuple[float, float]]:
    """(accuracy, seconds) of each run, all defaults but the optimizer."""
    from noisecast.estimators import DPLogisticRegression

    train, labels, test, test_labels = parts
    found = []
    for _ in range(seeds):
        began = time.monotonic()
        model = DPLogisticRegression(target_epsilon=epsilon, optimizer=optimizer, classes=[0, 1]).fit(train, labels)
        found.append((float(model.score(test, test_labels)), time.monotonic() - began))
    return found


def peer(parts: tuple, epsilon: float, c: float, seeds: int) -> list[tuple[float, float]]:
    """The same of diffprivlib."""
    import warnings

    from diffprivlib.models import LogisticRegression

    warnings.simplefilter("ignore")
    train, labels, test, test_labels = parts
    dense = train.toarray()  # it clips dense rows only
    found = []
    for _ in range(seeds):
        began = time.monotonic()
        model = LogisticRegression(epsilon=epsilon, data_norm=1.0, C=c).fit(dense, labels)
        seconds = time.monotonic() - began
        scores = test @ model.coef_.ravel() + model.intercept_
        found.append((float(((scores > 0) == test_labels).mean()), seconds))
    return found


def report(name: str, epsilon: float, runs: list[tuple[float, float]]) -> str:
    """One line of the table."""
    accuracy, seconds = np.array(runs).T
    error = accuracy.std(ddof=1) / np.sqrt(len(accuracy)) if len(accuracy) > 1 else np.nan
    return (
        f"{name:32} epsilon {epsilon:<4g} accuracy {accuracy.mean():.4f} (standard error {error:.4f}, {len(accuracy)} "
        f"runs), {np.median(seconds):.1f} s a fit"
    )


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1].endswith(".pkl"):
        found = peer(pickle.loads(Path(sys.argv[1]).read_bytes()), *map(float, sys.argv[2:4]), int(sys.argv[4]))
        print(json.dumps(found))
    else:
        import cyclopts

        cyclopts.run(main)
