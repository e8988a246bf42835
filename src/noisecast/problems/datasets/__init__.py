"""Data as arrays: a user's file, a bundled data set or one of the paper's tasks; every bad input meets one sentence.

`load_file` reads a file, `bundled` and the functions named after the tasks read what `DATASETS` lists. scikit-learn is
imported only where a call needs it.
"""

from noisecast.problems.datasets.archives import (
    Ratings,
    TaggedTexts,
    data_folder,
    every_tag,
    first_tag,
    forum500,
    imdb,
    imdb_texts,
    movielens,
    read_tagged_texts,
    stackoverflow,
)
from noisecast.problems.datasets.bundled import BUNDLED, bundled
from noisecast.problems.datasets.catalogue import DATASETS, Entry
from noisecast.problems.datasets.dataset import (
    DataError,
    Dataset,
    Features,
    encode_label_sets,
    encode_labels,
    label_sets,
)
from noisecast.problems.datasets.encoders import (
    Encoder,
    MatrixEncoder,
    TabularEncoder,
    encoder_from_json,
)
from noisecast.problems.datasets.files import ReadOptions, load_features, load_file, load_test_file
from noisecast.problems.datasets.public_columns import PublicColumns, read_public_columns
from noisecast.problems.datasets.splits import public_split, split_by_content
from noisecast.problems.datasets.text_encoder import TextEncoder, TextKind, read_vocabulary
from noisecast.problems.datasets.words import tokenize

__all__ = [
    "BUNDLED",
    "DATASETS",
    "DataError",
    "Dataset",
    "Encoder",
    "Entry",
    "Features",
    "MatrixEncoder",
    "PublicColumns",
    "Ratings",
    "ReadOptions",
    "TabularEncoder",
    "TaggedTexts",
    "TextEncoder",
    "TextKind",
    "bundled",
    "data_folder",
    "encode_label_sets",
    "encode_labels",
    "encoder_from_json",
    "every_tag",
    "first_tag",
    "forum500",
    "imdb",
    "imdb_texts",
    "label_sets",
    "load_features",
    "load_file",
    "load_test_file",
    "movielens",
    "public_split",
    "read_public_columns",
    "read_tagged_texts",
    "read_vocabulary",
    "split_by_content",
    "stackoverflow",
    "tokenize",
]
