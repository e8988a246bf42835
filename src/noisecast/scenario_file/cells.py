"""The cells of a file: every combination of its lists, or random draws from its ranges."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from noisecast.scenario_file.document import Document
from noisecast.scenario_file.tables import OptimizerTable
from noisecast.scenario_file.values import LogUniform, Values


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One scenario's settings, the same for every problem; `noise` is a noise multiplier or a target epsilon."""

    batch_size: float
    noise: float
    optimizer: OptimizerTable
    l2_clip_norm: float
    learning_rate: float


def cells(document: Document) -> list[Cell]:
    """A grid, whose batch size turns slowest and learning rate fastest; with [draws], `count` cells an optimizer."""
    return list(_grid(document) if document.draws is None else _drawn(document))


def _grid(document: Document) -> Iterator[Cell]:
    mechanism = document.mechanism
    for batch_size, noise, table in itertools.product(
        mechanism.batch_size, _listed(mechanism.noise), document.optimizers
    ):
        clips = _listed(table.l2_clip_norm or mechanism.l2_clip_norm)
        for clip, learning_rate in itertools.product(clips, _listed(table.learning_rate)):
            yield Cell(
                batch_size=batch_size, noise=noise, optimizer=table, l2_clip_norm=clip, learning_rate=learning_rate
            )


def _drawn(document: Document) -> Iterator[Cell]:
    """Independent uniform draws of every setting; of a range by its own law.

    An optimizer's draws depend on the public seed and its own name and settings only, and more of them go on where
    fewer ended: a sweep can be enlarged without losing a cell.
    """
    draws, mechanism = document.draws, document.mechanism
    assert draws is not None
    names: list[str] = []
    for table in document.optimizers:
        key = [draws.public_seed, names.count(table.name), *table.name.encode()]
        names.append(table.name)
        for shares in np.random.Generator(np.random.PCG64(key)).random((draws.count, 4)):
            yield Cell(
                batch_size=_at(mechanism.batch_size, shares[0]),
                noise=_at(mechanism.noise, shares[1]),
                optimizer=table,
                l2_clip_norm=_at(table.l2_clip_norm or mechanism.l2_clip_norm, shares[2]),
                learning_rate=_at(table.learning_rate, shares[3]),
            )


def _listed(values: Values) -> list[float]:
    assert isinstance(values, list), "a range without [draws] is refused by the rules"
    return values


def _at(values: Values, share: float) -> float:
    return values.at(float(share)) if isinstance(values, LogUniform) else values[int(share * len(values))]
