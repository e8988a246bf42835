"""What the encoders share: how they are written down and read, what they refuse, and rows of norm 1."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar, Self

import numpy as np
import pydantic
import scipy.sparse as sp

from noisecast.problems.datasets.dataset import DataError, Features

ROWS_AT_ONCE = 1024  # what is made on the way to a matrix is made of so many
MOST_UNKNOWN = 0.5  # of the rows: more, and the encoder is likely not of this file


@dataclass(frozen=True)
class BaseEncoder:
    """An encoder is a frozen dataclass of JSON values, with `name` in the file and what rows it `takes`."""

    name: ClassVar[str]
    takes: ClassVar[str]

    def to_json(self) -> dict:
        """The encoder as a dict that JSON can hold."""
        return {"encoder": self.name, **asdict(self)}

    @classmethod
    def from_json(cls, fields: Mapping) -> Self:
        """The encoder that `to_json` wrote; DataError if a field is missing or of the wrong type."""
        values = {name: value for name, value in fields.items() if name != "encoder"}
        try:
            return pydantic.TypeAdapter(cls).validate_python(values)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the fields"
            raise DataError(f"Cannot read the {cls.name} encoder: {where}: {first['msg']}; was it edited?") from None

    def doubts(self, features: Features) -> tuple[str, ...]:
        """Why the rows that became these features are likely of another kind than it knows, a sentence each."""
        del features
        return ()

    def refusal(self, source: str) -> DataError:
        return DataError(f"Expected {self.takes}, as in training, got {source}; give a file of that form.")


def unit_norm_rows(features: Features) -> Features:
    """Each row divided by its own L2 norm; a row of zeros stays."""
    if sp.issparse(features):
        # In float64: the squares of small float32 numbers vanish.
        blocks = [features[i : i + ROWS_AT_ONCE] for i in range(0, features.shape[0], ROWS_AT_ONCE)]
        norms = np.concatenate([np.sqrt(block.astype(np.float64).power(2).sum(axis=1)) for block in blocks])
        data = features.data / np.repeat(norms, np.diff(features.indptr)).clip(min=np.finfo(float).tiny)
        return sp.csr_array((data.astype(np.float32), features.indices, features.indptr), shape=features.shape)
    norms = np.linalg.norm(features.astype(np.float64), axis=1, keepdims=True)
    return (features / np.where(norms > 0, norms, 1)).astype(np.float32)
