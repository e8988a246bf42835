"""The cipher is the published one, every engine draws from it when asked, and no key is drawn from otherwise."""

import dataclasses

import numba
import numpy as np
import pytest
import scipy.sparse
from scipy import stats

from noisecast import (
    DPSGD,
    DPAdam,
    DPSignSGD,
    FixedSize,
    Poisson,
    SampledGaussian,
    Scenario,
    Shuffled,
    engines,
    linear_model,
)
from noisecast.engines._kernels import Lanes
from noisecast.engines._noise_kernels import TILE_OF_FEW_LANES, word_block
from noisecast.engines.dense import DenseRun
from noisecast.engines.keys import noise_key
from noisecast.engines.row_sparse import RowSparseRun
from noisecast.engines.row_sparse_lanes import scratch_of
from noisecast.privacy import secure_noise
from noisecast.privacy.counter_noise import normal_pair
from noisecast.privacy.noise import Purpose, RandomRoot, SecureKey, key_for, key_words
from noisecast.problems.datasets import Dataset
from noisecast.release import train

ROOT = RandomRoot(b"\x07" * 32, None, secure_noise=True)  # a test may know its secret
SEED = 920_001  # chosen before any result
POISSON = Poisson.for_batch_size(20, 200)


def block(key: bytes, counter: int, nonce: bytes) -> bytes:
    states = secure_noise.first_states(np.tile(np.frombuffer(key, "<u4"), (secure_noise.BESIDE, 1)))
    states[12], states[13:] = counter, np.frombuffer(nonce, "<u4")[:, None]
    words = np.zeros_like(states)
    secure_noise.chacha20(states, words, 1)
    return words[:, 0].astype("<u4").tobytes()


@pytest.mark.parametrize("columns, count", [(16, 1), (16, 16), (17, 17), (31, 20), (40, 40), (64, 50)])
def test_blocks_side_by_side_are_those_of_each(columns, count):
    """Whatever is left of sixteen; and nothing beyond the arrays is written."""
    rng = np.random.default_rng(SEED)
    states = rng.integers(0, 2**32, (16, columns), dtype=np.uint32)
    memory = np.zeros(16 * columns + 64, np.uint32)
    words = memory[32:-32].reshape(16, columns)
    secure_noise.chacha20(states, words, count)
    for i in range(count):
        alone = np.zeros((16, 16), np.uint32)
        secure_noise.chacha20(np.tile(states[:, i : i + 1], 16), alone, 1)
        assert np.array_equal(words[:, i], alone[:, 0])
    assert not memory[:32].any() and not memory[-32:].any()
    for start, to in [(states[:, :15], words[:, :15]), (states, words[:8]), (states[:8], words[:8])]:
        with pytest.raises(ValueError, match="sixteen columns"):
            secure_noise.chacha20(start.copy(), to.copy(), 1)


@pytest.mark.parametrize(
    "key, counter, nonce, words",
    [  # RFC 8439, 2.3.2, and appendix A.1, vectors 1, 2, 3 and 5
        (bytes(range(32)), 1, "000000090000004a00000000",
         "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
         "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"),
        (bytes(32), 0, "00" * 12,
         "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
         "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"),
        (bytes(32), 1, "00" * 12,
         "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
         "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"),
    ],
)  # fmt: skip
def test_the_cipher_is_the_published_one(key, counter, nonce, words):
    assert block(key, counter, bytes.fromhex(nonce)).hex() == words


def test_the_cipher_agrees_with_a_library():
    from randomgen import ChaCha

    key = np.random.default_rng(SEED).bytes(32)
    words = ChaCha(key=int.from_bytes(key, "little"), rounds=20).random_raw(16).view(np.uint32)
    ours = np.frombuffer(b"".join(block(key, counter, bytes(12)) for counter in range(2)), "<u4")
    assert np.array_equal(ours, words)


def test_only_a_secure_root_makes_secure_keys():
    assert isinstance(key_for(Purpose.PRIVACY_NOISE, "a", root=ROOT, repeat=0), SecureKey)
    assert not isinstance(key_for(Purpose.PRIVACY_NOISE, "a", root=RandomRoot(b"\x07" * 32, None), repeat=0), SecureKey)
    with pytest.raises(ValueError, match="no insecure seed"):
        RandomRoot(bytes(32), 3, secure_noise=True)


@numba.njit
def _pairs(words, out):
    for i in range(len(words)):
        out[i, 0], out[i, 1] = normal_pair(words[i, 0], words[i, 1])


def test_numbers_are_gaussians_of_its_words():
    keys = [bytes([i]) * 32 for i in (1, 2)]
    drawn = secure_noise.standard_normals(keys, 5, 3, 2500)
    assert drawn.shape == (3, 2, 2500)
    nonce = np.array([0, 6, 0], "<u4").tobytes()  # lane, step, purpose
    little = key_words(keys[1]).astype("<u4").tobytes()
    words = np.stack([np.frombuffer(block(little, i, nonce), "<u4") for i in range(64)]).astype(np.uint32)  # (64, 16)
    pairs = np.zeros((64 * 8, 2), np.float32)
    _pairs(words.reshape(-1, 2), pairs)
    exact = pairs.reshape(64, 16).T.ravel()  # row by row of sixty-four blocks
    np.testing.assert_allclose(drawn[1, 1, :1024], exact, rtol=1e-6, atol=1e-6)
    assert np.array_equal(drawn[1:], secure_noise.standard_normals(keys, 6, 2, 2500))  # any range of steps on its own


@numba.njit
def _block(number, lanes, scratch):
    return word_block(
        number, lanes.keys, lanes.lane, 5, 7, scratch.block, scratch.column, scratch.counters, scratch.ramp,
        scratch.cipher,
    )  # fmt: skip


def test_a_block_of_a_row_has_the_words_of_its_number():
    """Coins beyond the first 32: of a number that no tile reaches, too."""
    key, lane = np.frombuffer(bytes(range(32)), "<u4"), np.arange(3, dtype=np.uint32)
    states = secure_noise.first_states(np.repeat(key[None], len(lane), axis=0))
    states[13] = lane
    scratch, ones = scratch_of(4, lane, 1, states), np.ones(len(lane), np.float32)
    lanes = Lanes(*(6 * [ones]), lane, np.zeros((11, 4 * len(lane)), np.uint32))
    for number in (0, 1, 63, 64, 255, 256, 2047, 2048, 10**6):
        assert _block(number, lanes, scratch) == secure_noise.WORDS
        for each in lane:
            nonce = np.array([each, 5, 7], "<u4").tobytes()
            assert scratch.block[:, each].astype("<u4").tobytes() == block(bytes(range(32)), number, nonce)


def sparse_problem(num_features: int):
    rng = np.random.default_rng(SEED)
    features = scipy.sparse.random(200, num_features, 0.02, format="csr", random_state=rng, dtype=np.float32)
    return linear_model(Dataset("secure", features, rng.integers(0, 2, 200).astype(np.int32), ("a", "b")))


def question(optimizer, *, num_features=3000, z=1e4) -> Scenario:
    mechanism = SampledGaussian(noise_multiplier=z, l2_clip_norm=1e-6, sampler=POISSON)
    return Scenario(
        problem=sparse_problem(num_features), mechanism=mechanism, optimizer=optimizer, num_steps=700, target_delta=1e-5
    )


@pytest.mark.parametrize("engine", [RowSparseRun, DenseRun])
@pytest.mark.parametrize("size", [1, 9])
def test_noise_of_engines_has_the_promised_variance(engine, size):
    """Next to the noise there is no gradient: after k steps of DP-SGD each weight is N(0, k (eta z C / B)^2)."""
    scenario = question(DPSGD(learning_rate=1.0))
    group = [dataclasses.replace(scenario, target_delta=1e-5 * (1 + i)) for i in range(size)]
    run = engine(group, repeats=range(20 // size), root=ROOT)
    run.advance(40)
    first = run.params.astype(np.float64)
    run.advance(90)
    moves = (run.params - first) / (scenario.mechanism.mean_noise_std * np.sqrt(50))
    print(moves.shape, np.square(moves).mean())
    for off, passes in ((1.0, True), (0.93, False), (1.07, False)):
        statistic, count = np.square(moves).sum() * off, moves.size
        p = 2 * min(stats.chi2.cdf(statistic, count), stats.chi2.sf(statistic, count))
        assert (p > 1e-6) == passes
    flat = moves.reshape(-1, moves.shape[-1])
    assert np.abs(np.corrcoef(flat)[np.triu_indices(len(flat), 1)]).max() < 5.5 / np.sqrt(flat.shape[1])
    assert abs(np.corrcoef(moves.ravel(), first.ravel())[0, 1]) < 5.5 / np.sqrt(moves.size)


@pytest.mark.parametrize("size", [1, 9])
def test_coins_of_untouched_rows_are_fair_and_all_there(size):
    scenario = question(DPSignSGD(learning_rate=1.0))
    group = [dataclasses.replace(scenario, target_delta=1e-5 * (1 + i)) for i in range(size)]
    run = RowSparseRun(group, repeats=[0, 1], root=ROOT)
    for look in (20, 53, 700):  # within a word, across one, across a block of the cipher
        before = run.params.astype(np.float64) if look > 20 else 0.0
        begin = run.step
        run.advance(look)
        heads = (run.params - before + (look - begin)) / 2
        assert np.array_equal(heads, np.round(heads))
        z = (heads.mean() - (look - begin) / 2) / np.sqrt((look - begin) / 4 / heads.size)
        spread = heads.var() / ((look - begin) / 4)
        print(f"{begin} to {look}: z = {z:.2f}, variance {spread:.3f}")
        assert abs(z) < 5 and abs(spread - 1) < 6 * np.sqrt(2 / heads.size)


@pytest.mark.parametrize(
    "optimizer", [DPSGD(learning_rate=1.0), DPSignSGD(learning_rate=0.1), DPAdam(learning_rate=0.1)]
)
@pytest.mark.parametrize("engine", [RowSparseRun, pytest.param(DenseRun, marks=pytest.mark.slow)])
def test_a_secure_run_resumes_bit_for_bit_and_does_not_see_its_neighbours(engine, optimizer):
    scenario = question(optimizer, num_features=200)
    other = dataclasses.replace(scenario, target_delta=1e-6)
    whole = engine([scenario], repeats=[3], root=ROOT)
    whole.advance(60)
    half = engine([scenario], repeats=[3], root=ROOT)
    half.advance(25)
    rest = engine([scenario], repeats=[3], root=ROOT)
    rest.restore(half.state())
    rest.advance(60)
    assert np.array_equal(rest.params, whole.params)
    group = engine([other, scenario], repeats=[1, 3], root=ROOT)
    group.advance(60)
    np.testing.assert_allclose(group.params[1, 1], whole.params[0, 0], rtol=1e-4, atol=1e-9)


def test_the_fast_generator_is_not_touched(monkeypatch):
    """With a secure root no key of privacy noise reaches the kernels' fast generator: its words may be anything."""
    scenario = question(DPSGD(learning_rate=1.0), num_features=200)
    run = RowSparseRun([scenario], repeats=[0], root=ROOT)
    block = run._blocks[0]
    assert block._scratch.cipher.start.shape == (16, TILE_OF_FEW_LANES // 16)
    words = key_words(noise_key(scenario, root=ROOT, repeat=0))
    assert np.array_equal(block._scratch.cipher.start[4:12, 0], words)
    block._lanes = block._lanes._replace(keys=np.zeros_like(block._lanes.keys))
    run.advance(30)
    plain = RowSparseRun([scenario], repeats=[0], root=ROOT)
    plain.advance(30)
    assert np.array_equal(run.params, plain.params)


@pytest.mark.parametrize("optimizer", [DPSGD(learning_rate=1.0), DPAdam(learning_rate=1.0)])
@pytest.mark.parametrize("engine", [RowSparseRun, DenseRun])
def test_outputs_of_one_feature_have_noise_of_their_own(engine, optimizer):
    rng = np.random.default_rng(SEED)
    features = scipy.sparse.random(200, 2000, 0.005, format="csr", random_state=rng, dtype=np.float32)
    data = Dataset("secure", features, rng.integers(0, 3, 200).astype(np.int32), ("a", "b", "c"))
    scenario = dataclasses.replace(question(optimizer), problem=linear_model(data))
    run = engine([scenario], repeats=[0], root=ROOT)
    run.advance(30)
    correlations = np.corrcoef(run.params.reshape(-1, 3).T)[np.triu_indices(3, 1)]
    assert np.abs(correlations).max() < 5.5 / np.sqrt(2000)


def test_batches_of_a_secure_root_come_from_the_cipher(monkeypatch):
    """Its generator's words may be anything: whoever draws from Philox fails here, whatever the statement says."""

    def no_philox(*args, **kwargs):
        raise AssertionError("Philox was asked")

    roots = RandomRoot(b"\x07" * 32, None), ROOT
    plain, secure = (key_for(Purpose.BATCHES, "a", root=root, repeat=0) for root in roots)
    monkeypatch.setattr(np.random, "Philox", no_philox)
    for sampler in (POISSON, FixedSize(20, 200), Shuffled(20, 200)):
        sampler.batches(secure, 0, 30, 200)
        with pytest.raises(AssertionError, match="Philox"):
            sampler.batches(plain, 0, 30, 200)


@pytest.mark.parametrize("is_secure", [False, True])
def test_a_released_model_was_drawn_as_its_statement_says(is_secure, monkeypatch):
    roots, start = [], engines.start

    def noted(scenarios, *, root, **more):
        roots.append(root)
        return start(scenarios, root=root, **more)

    monkeypatch.setattr(engines, "start", noted)
    scenario = dataclasses.replace(question(DPSGD(learning_rate=1.0), num_features=200), num_steps=5)
    model = train(scenario, secure_noise=is_secure)
    assert [root.secure_noise for root in roots] == [is_secure]
    assert ("ChaCha20" in model.statement.noise, "ChaCha20" in model.statement.sentence()) == (is_secure, is_secure)
