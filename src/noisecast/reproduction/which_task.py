"""Which of the paper's tasks a row of the table is about: the name of its problem says so."""

import numpy as np
import pandas as pd

from noisecast.optimizers import OPTIMIZERS
from noisecast.reproduction.tasks import FORUM, IMDB, MOVIELENS_CENTRED, MOVIELENS_PAPER_LIKE, Task

_WORDS = {
    "imdb": IMDB,
    "forum500": FORUM,
    "movielens, paper-like": MOVIELENS_PAPER_LIKE,
    "movielens, centred": MOVIELENS_CENTRED,
}


def task_of(problem: str) -> Task:
    """The paper's task behind a problem, at the paper's scale.

    Raises: ValueError for a problem of no task.

    >>> task_of("logistic on imdb").epochs
    100
    """
    for word, task in _WORDS.items():
        if word in problem:
            return task
    raise ValueError(f"Expected a problem of {', '.join(task.name for task in _WORDS.values())}, got {problem!r}.")


def title_of(problem: str) -> str:
    """The task's name, and what of it was really run.

    >>> title_of("softmax on forum500, 20 classes")
    'StackOverflow-shaped, 20 classes'
    """
    return task_of(problem).name + (", 20 classes" if "20 classes" in problem else "")


def in_the_papers_order(table: pd.DataFrame) -> pd.DataFrame:
    """Rows sorted: quadratics first, then the tasks and within each the optimizers as the paper has them."""
    words, optimizers = list(_WORDS), [kind.name for kind in OPTIMIZERS]

    def place(problem: str) -> int:
        return next((i for i, word in enumerate(words) if word in problem), -1)

    order = np.lexsort((table["optimizer"].map(optimizers.index), table["problem"].map(place)))
    return table.iloc[order].reset_index(drop=True)
