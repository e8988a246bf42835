"""What the row-sparse kernels are handed beside the data: a lane for each run's column, its keys, and their scratch."""

from collections.abc import Sequence

import numpy as np

from noisecast.compiled import aligned, aligned_zeros
from noisecast.engines import _kernels
from noisecast.engines._noise_kernels import ROOM, Cipher, tile_of
from noisecast.engines.keys import noise_key
from noisecast.privacy.aes_noise import AES, ROUNDS, VECTOR, round_keys
from noisecast.privacy.noise import RandomRoot, key_words
from noisecast.privacy.secure_noise import WORDS, first_states
from noisecast.scenario import Scenario

# The places of a lane's number and a block's number in a counter.
FIRST_OF_FOUR, SECOND_OF_FOUR = np.array([1, 0, 0, 0], np.uint32), np.array([0, 1, 0, 0], np.uint32)


def lanes_of(scenarios: Sequence[Scenario], columns: int, root: RandomRoot, repeat: int) -> _kernels.Lanes:
    """What the kernels must know of each lane: a column of one run.

    Args:
      scenarios: of one block, side by side.   columns: parameters that a row holds of one run.
      root, repeat: where their noise comes from.
    Returns: Lanes of len(scenarios) * columns.
    """

    def each(values) -> np.ndarray:
        return aligned(np.repeat(np.asarray(list(values), np.float32), columns))

    return _kernels.Lanes(
        clip=each(s.mechanism.l2_clip_norm for s in scenarios),
        noise_std=each(s.mechanism.noise_std for s in scenarios),
        per_noise_std=each(1.0 / s.mechanism.noise_std for s in scenarios),
        learning_rate=each(s.optimizer.learning_rate for s in scenarios),
        step_size=each(s.optimizer.learning_rate / s.mechanism.expected_batch_size for s in scenarios),
        step_noise=each(s.optimizer.learning_rate * s.mechanism.mean_noise_std for s in scenarios),
        # A column of a run, not a place in the group: a run's noise must not depend on its neighbours.
        lane=aligned(np.tile(np.arange(columns, dtype=np.uint32), len(scenarios))),
        keys=aligned(generator_keys([noise_key(s, root=root, repeat=repeat) for s in scenarios], columns)),
    )


def one_lane(scenario: Scenario, cipher: np.ndarray | None, root: RandomRoot, repeat: int) -> tuple:
    """Lanes and scratch of which the noise of a run's numbers is drawn, as if each were a row of one lane.

    Args:
      scenario: of the run that is alone in its block.   cipher: `cipher_states` of its lanes, or None.
      root, repeat: as `lanes_of`.
    """
    lanes = lanes_of([scenario], 1, root, repeat)
    return lanes, scratch_of(1, lanes.lane, 1, None if cipher is None else cipher[:, :1])


def generator_keys(keys: Sequence[bytes], columns: int) -> np.ndarray:
    """Keys of the fast generator as its kernels take them, each `columns` times.

    Args:
      keys: one a run; 32 bytes each.   columns: lanes of a run.
    Returns: uint32, (4, lanes) for Threefry or round keys in vectors for AES.
    """
    if not AES:
        return np.repeat(np.stack([key_words(key)[:4] for key in keys], axis=1), columns, axis=1)
    of_key = round_keys(keys).reshape(ROUNDS + 1, len(keys), 4)
    of_lanes = np.repeat(of_key, columns, axis=1)
    lane, _ = in_vectors(of_lanes.shape[1])
    return of_lanes[:, lane].reshape(ROUNDS + 1, -1)


def in_vectors(lanes: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of lanes, and of blocks, as AES takes them: fewer than 16 lanes fill a vector with several blocks each.

    Args:
      lanes: >= 1.
    Returns: the lane and the block of each place of a vector; (max(lanes, 16),) each.

    >>> in_vectors(6)[0].tolist(), in_vectors(6)[1].tolist()
    ([0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3], [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2])
    """
    place = np.arange(max(lanes, VECTOR))
    return place % lanes, place // lanes


def cipher_states(
    scenarios: Sequence[Scenario], lanes: _kernels.Lanes, root: RandomRoot, repeat: int
) -> np.ndarray | None:
    """The cipher's state for each lane; None where nobody asked for it.

    Args:
      scenarios, root, repeat: as `lanes_of`.   lanes: of them.
    Returns: (16, lanes) uint32, or None.
    """
    if not root.secure_noise:
        return None
    keys = np.stack([key_words(noise_key(scenario, root=root, repeat=repeat)) for scenario in scenarios])
    states = first_states(np.repeat(keys, len(lanes.lane) // len(scenarios), axis=0))
    states[13] = lanes.lane
    return states


def scratch_of(rows: int, lane: np.ndarray, width: int, cipher: np.ndarray | None = None) -> _kernels.Scratch:
    """What the kernels write to and forget: made once, for a block.

    Args:
      rows: of the table of weights.   lane: each lane's number; (lanes,) uint32.   width: examples of the widest batch.
      cipher: `cipher_states`, or None.
    Returns: Scratch, as of no step yet.
    """
    lanes = len(lane)
    tile = tile_of(lanes)
    states = None if cipher is None else aligned(np.tile(cipher, tile // WORDS))
    roomy, (own, block) = aligned_zeros(tile * lanes + ROOM, np.uint32), in_vectors(lanes)
    counters = np.outer(lane[own], FIRST_OF_FOUR) + np.outer(block, SECOND_OF_FOUR)
    return _kernels.Scratch(
        stamp=np.zeros(rows, np.int32),
        slot=np.arange(rows, dtype=np.uint32),
        touched=np.zeros(rows + 1, np.uint32),
        due=np.zeros(rows + 1, np.uint32),
        skipped=np.zeros(rows + 1, np.int32),
        coefficients=aligned_zeros((max(width, 1), lanes)),
        gradient=aligned_zeros((rows, lanes)),
        normals=aligned_zeros((tile, lanes)),
        words=roomy[: tile * lanes].reshape(tile, lanes),
        roomy=roomy,
        column=aligned_zeros(tile, np.uint32),
        block=aligned_zeros(WORDS * lanes + ROOM, np.uint32)[: WORDS * lanes].reshape(WORDS, lanes),
        blocks=aligned_zeros(4 * tile, np.uint32),
        counters=aligned(counters.astype(np.uint32).ravel()),
        ramp=aligned(np.outer(np.arange(tile // 4, dtype=np.uint32), SECOND_OF_FOUR).ravel()),
        numbered=aligned_zeros(4 * tile, np.uint32),
        every_row=np.arange(rows, dtype=np.uint32),
        cipher=None if states is None else Cipher(states, aligned_zeros(states.shape, np.uint32)),
    )
