"""AES is the published one at every width of its instruction, and a tile's words do not depend on what lies beside."""

import os
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest

from noisecast.compiled import aligned_zeros
from noisecast.engines import _noise_kernels as kernels
from noisecast.engines.row_sparse_lanes import generator_keys, scratch_of
from noisecast.privacy.aes_noise import AES, VECTOR, round_keys, words_of_key, words_of_lanes
from noisecast.privacy.noise import key_words

needs_aes = pytest.mark.skipif(not AES, reason="this processor has no AES instructions")
SEED = 920_601  # chosen before any result
STEP, PURPOSE = np.uint32(9), np.uint32(2)


@numba.njit
def _of_key(words, counters, keys, lane, add):
    words_of_key(words, counters, len(words) // VECTOR, keys, lane, add[0], add[1], add[2], add[3])


@numba.njit
def _of_lanes(words, row, counters, keys, lane, add):
    words_of_lanes(words, row, counters, keys, lane, add[0], add[1], add[2], add[3])


def enciphered(key: bytes, *blocks: str) -> list[str]:
    """Four blocks under one key, in hexadecimal digits as the standards print them."""
    counters = np.frombuffer(bytes.fromhex("".join(blocks)), "<u4").astype(np.uint32)
    words = np.zeros(VECTOR, np.uint32)
    _of_key(words, counters, round_keys([bytes(16), key]), 1, np.zeros(4, np.uint32))
    found = words.astype("<u4").tobytes().hex()
    return [found[i : i + 32] for i in range(0, len(found), 32)]


def test_round_keys_are_those_of_the_standard():
    """FIPS 197, appendix A.1: the first and the last key that 2b7e... expands to."""
    keys = round_keys([bytes.fromhex("2b7e151628aed2a6abf7158809cf4f3c")]).astype("<u4")
    assert keys[0].tobytes().hex() == "2b7e151628aed2a6abf7158809cf4f3c"
    assert keys[1].tobytes().hex() == "a0fafe1788542cb123a339392a6c7605"
    assert keys[10].tobytes().hex() == "d014f9a8c9ee2589e13f0cc8b6630ca6"


@needs_aes
def test_blocks_are_those_of_the_standards():
    """FIPS 197, appendix C.1, and NIST SP 800-38A, F.1.1."""
    plain = "00112233445566778899aabbccddeeff"
    assert enciphered(bytes(range(16)), *(4 * [plain])) == 4 * ["69c4e0d86a7b0430d8cdb78070b4c55a"]
    assert enciphered(
        bytes.fromhex("2b7e151628aed2a6abf7158809cf4f3c"),
        "6bc1bee22e409f96e93d7e117393172a", "ae2d8a571e03ac9c9eb76fac45af8e51",
        "30c81c46a35ce411e5fbc1191a0a52ef", "f69f2445df4f9b17ad2b417be66c3710",
    ) == [
        "3ad77bb40d7a3660a89ecaf32466ef97", "f5d3d58503b9699de785895a96fdbaaf",
        "43b1cd7f598ece23881b00e3ed030688", "7b0c785e27e8ad3f8223207104725dd4",
    ]  # fmt: skip


@needs_aes
def test_lanes_and_rows_read_the_same_blocks():
    rng = np.random.default_rng(SEED)
    keys = round_keys([rng.bytes(32) for _ in range(21)])
    counters = np.zeros(4 * 21, np.uint32)
    counters[::4] = np.arange(21)
    along_lanes = np.zeros((8, 21), np.uint32)
    for lane in (0, 5):
        for row in (0, 4):
            _of_lanes(along_lanes, row, counters, keys, lane, np.array([0, 7 + row // 4, 8, 9], np.uint32))
    ramp, along_rows = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    ramp[1::4] = np.arange(8)
    for lane in range(21):
        _of_key(along_rows, ramp, keys, lane, np.array([lane, 7, 8, 9], np.uint32))
        assert np.array_equal(along_rows[:8], along_lanes[:, lane])


@needs_aes
@pytest.mark.parametrize("features", ["+aes,+sse4.2", pytest.param("+aes,+avx2,+vaes", marks=pytest.mark.slow)])
def test_a_processor_with_narrower_instructions_draws_the_same(features, tmp_path):
    """The tests of this file that hold words against the standards, compiled for another processor."""
    wanted = (
        f"{__file__}::test_blocks_are_those_of_the_standards",
        f"{__file__}::test_lanes_and_rows_read_the_same_blocks",
    )
    if "+vaes" in features and "+vaes" not in _host_features():
        pytest.skip("this processor has no AES instructions of 256 bits")
    done = pytest_as({"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": features}, tmp_path, *wanted)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout


def _host_features() -> str:
    from llvmlite import binding

    return binding.get_host_cpu_features().flatten()


def pytest_as(environment: dict[str, str], cache, *tests: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", *tests],
        env={**os.environ, "NUMBA_CACHE_DIR": str(cache), **environment}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip


# --- Tiles ------------------------------------------------------------------------------------------------------------


@numba.njit
def _word_tile(first, count, lanes, scratch):
    kernels.word_tile(first, count, lanes, STEP, PURPOSE, scratch)


@numba.njit
def _normal_tile(first, count, lanes, scratch):
    kernels.normal_tile(first, count, lanes, STEP, PURPOSE, scratch)


@numba.njit
def _block(number, lanes, scratch):
    return kernels.word_block(
        number, lanes.keys, lanes.lane, STEP, PURPOSE, scratch.block, scratch.column, scratch.counters, scratch.ramp,
        scratch.cipher,
    )  # fmt: skip


def lanes_of(keys: list[bytes], columns: int = 1):
    from noisecast.engines._kernels import Lanes

    lane = np.tile(np.arange(columns, dtype=np.uint32), len(keys))
    ones = np.ones(len(lane), np.float32)
    return Lanes(*(6 * [ones]), lane, generator_keys(keys, columns))


def alone(keys: list[bytes], draw, rows: int) -> np.ndarray:
    """(rows, keys): each key drawn on its own."""
    columns = []
    for key in keys:
        lanes = lanes_of([key])
        scratch = scratch_of(10, lanes.lane, 4)
        columns.append(draw(lanes, scratch)[:rows, 0].copy())
    return np.stack(columns, axis=1)


KEYS = [np.random.default_rng(SEED).bytes(32) for _ in range(37)]


@pytest.mark.parametrize("count", [1, 4, 15, 32, 33, 100, 256])
@pytest.mark.parametrize("lanes", [1, 2, 3, 5, 8, 9, 15, 16, 20, 37])
def test_a_tile_does_not_depend_on_the_lanes_beside_nor_on_how_many_rows_it_has(lanes, count):
    def words(lanes, scratch, first=256):
        _word_tile(first, count, lanes, scratch)
        return scratch.words[:count].copy()

    def normals(lanes, scratch, first=256):
        _normal_tile(first, count, lanes, scratch)
        return scratch.normals[:count].copy()

    group = lanes_of(KEYS[:lanes])
    scratch = scratch_of(10, group.lane, 4)
    assert np.array_equal(words(group, scratch), alone(KEYS[:lanes], words, count))
    np.testing.assert_allclose(normals(group, scratch), alone(KEYS[:lanes], normals, count), rtol=1e-6, atol=1e-7)
    assert not np.array_equal(words(group, scratch, 0), words(group, scratch))


def test_a_tile_of_many_lanes_has_fewer_rows_and_the_same_words():
    found, sizes = [], []
    for keys in (KEYS[:3], KEYS[1:2]):
        lanes = lanes_of(keys, 250)
        scratch = scratch_of(10, lanes.lane, 4)
        sizes.append(len(scratch.words))
        _word_tile(64, 64, lanes, scratch)
        found.append(scratch.words[:64])
    assert sizes == [64, 128]
    assert np.array_equal(found[0][:, 250:500], found[1])


@needs_aes
def test_a_tile_has_the_words_it_says():
    """Row 4 b + w has word w of the block of (lane, b, step, purpose)."""
    columns, first = 20, 256
    lanes = lanes_of(KEYS[:2], columns)
    scratch = scratch_of(10, lanes.lane, 4)
    _word_tile(first, 60, lanes, scratch)
    for run, column, block in [(0, 0, 0), (1, 0, 0), (0, 19, 14), (1, 7, 3)]:
        counter = np.array([column, first // 4 + block, STEP, PURPOSE], "<u4").tobytes().hex()
        expected = bytes.fromhex(enciphered(KEYS[run][:16], *(4 * [counter]))[0])
        found = scratch.words[4 * block : 4 * block + 4, run * columns + column]
        assert np.array_equal(found, np.frombuffer(expected, "<u4"))
        assert _block(first // 4 + block, lanes, scratch) == 4
        assert np.array_equal(scratch.block[:4, run * columns + column], found)


@needs_aes
@pytest.mark.parametrize("lanes", [1, 2, 3, 8, 15, 16, 20])
def test_a_block_has_the_words_it_says(lanes):
    """Those of the block of (lane, number, step, purpose), however many lanes there are and however high its number."""
    group = lanes_of(KEYS[:1], lanes)
    scratch = scratch_of(10, group.lane, 4)
    for number in (0, 1, 63, 64, 255, 256, 2047, 2048, 10**6):
        assert _block(number, group, scratch) == 4
        for lane in (0, lanes // 2, lanes - 1):
            counter = np.array([lane, number, STEP, PURPOSE], "<u4").tobytes().hex()
            expected = bytes.fromhex(enciphered(KEYS[0][:16], *(4 * [counter]))[0])
            assert np.array_equal(scratch.block[:4, lane], np.frombuffer(expected, "<u4"))


@needs_aes
@pytest.mark.parametrize("lanes", range(2, 16))
def test_a_block_of_few_lanes_is_written_within_its_room(lanes):
    """One call makes sixteen blocks, of which a row takes one of each lane; the others lie behind them."""
    group = lanes_of(KEYS[:1], lanes)
    scratch = scratch_of(10, group.lane, 4)
    memory, begin = scratch.block.base, scratch.block.ctypes.data - scratch.block.base.ctypes.data
    end = begin + 4 * ((4 * (kernels.VECTOR // lanes) - 1) * lanes + kernels.VECTOR)
    assert end <= memory.nbytes
    memory[:] = 0xAB
    _block(7, group, scratch)
    assert (memory[:begin] == 0xAB).all() and (memory[end:] == 0xAB).all()
    assert (memory[begin:end] != 0xAB).mean() > 0.9  # control: all that room was written


def test_normals_are_the_box_muller_pairs_of_words_sixteen_rows_apart():
    lanes = lanes_of(KEYS[:3])
    scratch = scratch_of(10, lanes.lane, 4)
    _normal_tile(0, 2 * kernels.PAIRED, lanes, scratch)
    first, second = scratch.words[: kernels.PAIRED], scratch.words[kernels.PAIRED : 2 * kernels.PAIRED]
    radius = np.sqrt(-2 * np.log((first + 0.5) / 2.0**32))
    angle = np.pi * (second.view(np.int32) / 2.0**32 + (second & 1))
    expected = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    np.testing.assert_allclose(scratch.normals[: 2 * kernels.PAIRED], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lanes", [1, 5, 16, 20])
def test_words_of_threefry_where_there_is_no_aes(lanes):
    """Row 64 t + 16 w + i has word w of block 16 t + i; on this machine, too, its kernel is compiled and right."""
    from noisecast.privacy.counter_noise import threefry

    word = numba.njit(lambda c, k: threefry(c[0], c[1], c[2], c[3], k[0], k[1], k[2], k[3]))
    keys = np.stack([key_words(key)[:4] for key in KEYS[:lanes]], axis=1)
    words, column, lane_of = aligned_zeros((128, lanes), np.uint32), np.zeros(128, np.uint32), np.arange(lanes)
    kernels_tile = numba.njit(kernels._threefry_tile.py_func)
    kernels_tile(words, column, 128, 128, keys, lane_of.astype(np.uint32), STEP, PURPOSE)
    for row, lane in [(0, 0), (17, lanes - 1), (63, 0), (64, lanes - 1), (127, lanes // 2)]:
        t, w, i = row // 64, row % 64 // 16, row % 16
        counter = np.array([lane, 32 + 16 * t + i, STEP, PURPOSE], np.uint32)
        assert words[row, lane] == word(counter, keys[:, lane].copy())[w]


@pytest.mark.slow
def test_engines_without_aes_have_the_same_law(tmp_path):
    """Postponed noise and runs beside each other, compiled for a processor without AES instructions."""
    contracts = Path(__file__).parents[1] / "contracts"
    tests = [str(contracts / name) for name in ("test_postponed_noise.py", "test_engine_runs.py")]
    done = pytest_as({"NUMBA_CPU_NAME": "generic"}, tmp_path, *tests)
    assert done.returncode == 0, done.stdout
