"""noisecast.optax: noisecast's own steps, clipped and noised as the mechanism says, in Optax's terms."""

import math
import os
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import noisecast as nc
from noisecast.engines.dense import DenseRun
from noisecast.engines.keys import batch_key, noise_key
from noisecast.optimizers import OPTIMIZERS
from noisecast.privacy.noise import Purpose, RandomRoot, key_for

optax = pytest.importorskip("optax", reason="Optax is not installed")
from noisecast import optax as no  # noqa: E402
from noisecast.optax import batches as batches_module  # noqa: E402

ROOT = RandomRoot.from_insecure_seed(910_017)  # chosen before any result
KEY = key_for(Purpose.PRIVACY_NOISE, "test", root=ROOT, repeat=0)
MECHANISM = nc.SampledGaussian(noise_multiplier=1.5, l2_clip_norm=0.5, sampler=nc.Poisson.for_batch_size(16, 200))
QUIET = MECHANISM.with_noise_multiplier(0.0)
MAKERS = {"DP-SGD": no.dp_sgd, "DP-SignSGD": no.dp_sign_sgd, "DP-Adam": no.dp_adam}
RNG = np.random.default_rng(5)
X = jnp.asarray(RNG.normal(size=(200, 3)), jnp.float32)
Y = jnp.asarray(RNG.normal(size=(200, 2)), jnp.float32)


@pytest.fixture(autouse=True)
def no_batch_was_handed_out(monkeypatch):
    """The tests have one key; a process draws each of its batches once."""
    monkeypatch.setattr(batches_module, "_next_steps", {})


def params_tree():
    return {"layer": {"w": jnp.full((3, 2), 0.1)}, "b": (jnp.zeros(2), jnp.ones(()))}


def loss(params, example):
    x, y = example
    return 0.5 * jnp.sum((x @ params["layer"]["w"] * params["b"][1] + params["b"][0] - y) ** 2)


@jax.jit
def gradients(params, rows):
    return jax.vmap(jax.grad(loss), (None, 0))(params, (X[rows], Y[rows]))


clipped_sum = jax.jit(no.clipped_sum)


def summed(tree, clip=0.5):
    """As a sum that `clip_and_sum(MECHANISM)` has made."""
    return no.ClippedSum(tree, clip)


def flat(tree) -> np.ndarray:
    return np.asarray(jax.flatten_util.ravel_pytree(tree)[0])


def test_optax_is_the_library_and_noisecasts_is_ours():
    assert optax.__name__ == "optax" and hasattr(optax, "adam") and no.__name__ == "noisecast.optax"
    assert not hasattr(optax, "dp_sign_sgd")


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.name)
def test_a_step_is_noisecasts_own_step_on_the_same_private_gradient(kind):
    """Exact, but for DP-Adam: XLA rounds its last bit by the width of a leaf. Three steps, so that its state counts."""
    own, optimizer = kind(learning_rate=0.3), MAKERS[kind.name](0.3, MECHANISM, KEY)
    private = optax.chain(no.clip_and_sum(MECHANISM), no.add_noise(MECHANISM, KEY))
    params = params_tree()
    vector, state, ours, noise = jnp.asarray(flat(params)), optimizer.init(params), None, private.init(params)
    ours = own.init(vector)
    for step in range(3):
        rows = jnp.arange(10 * step, 10 * step + 9)
        noisy, noise = private.update(gradients(params, rows), noise, params, example_mask=jnp.ones(9, bool))
        direction, ours = own.direction(jnp.asarray(flat(noisy)), ours, step)
        vector = vector - 0.3 * direction
        updates, state = optimizer.update(gradients(params, rows), state, params, example_mask=jnp.ones(9, bool))
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(flat(params), np.asarray(vector), rtol=2.0**-22 if kind.name == "DP-Adam" else 0.0)
    assert no.releases(state) == no.releases(noise) == 3


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.name)
def test_a_run_is_the_dense_engines_run(kind):
    """The same root gives the same batches, the same noise, and so the same parameters, step after step."""
    problem = nc.jax_model(loss, params_tree(), (X, Y))
    scenario = nc.Scenario(problem=problem, mechanism=MECHANISM, optimizer=kind(learning_rate=0.05), num_steps=30)
    run = DenseRun([scenario], repeats=[0], root=ROOT)
    run.advance(30)
    optimizer = MAKERS[kind.name](0.05, MECHANISM, noise_key(scenario, root=ROOT, repeat=0))
    params = params_tree()
    state = optimizer.init(params)
    batches = no.private_batches(
        MECHANISM, batch_key(scenario, root=ROOT, repeat=0), num_steps=30, num_examples=problem.num_examples
    )

    @jax.jit
    def step(params, state, rows, mask):
        updates, state = optimizer.update(gradients(params, rows), state, params, example_mask=mask)
        return optax.apply_updates(params, updates), state

    for rows, mask in batches:
        params, state = step(params, state, rows, mask)
    np.testing.assert_allclose(flat(params), run.params[0, 0], rtol=2e-4, atol=2e-6)
    assert np.abs(flat(params) - flat(params_tree())).max() > 0.01


@cache
def noise_of_five_steps() -> np.ndarray:
    noise = no.add_noise(MECHANISM, KEY)
    zeros = {"a": jnp.zeros((300, 100)), "b": jnp.zeros(70_001)}
    state, drawn = noise.init(zeros), []
    for _ in range(5):
        noisy, state = noise.update(summed(zeros), state)
        drawn.append(flat(noisy))
    return np.concatenate(drawn).astype(float)


@pytest.mark.parametrize("scale, passes", [(1.0, True), (0.99, False), (1.01, False)])
def test_noise_has_the_promised_scale(scale, passes):
    """Of the mean: z C / B, on an empty batch, over two leaves and five steps together."""
    numbers = scale * noise_of_five_steps() / (1.5 * 0.5 / 16)
    statistic = np.sum(numbers**2)
    p = 2 * min(stats.chi2.sf(statistic, numbers.size), stats.chi2.cdf(statistic, numbers.size))
    assert (p > 1e-6) == passes


@pytest.mark.parametrize("make", [lambda: no.add_noise(MECHANISM, KEY), lambda: no.dp_sgd(0.1, MECHANISM, KEY)])
def test_a_second_run_from_one_key_is_refused(make):
    """Its noise would be the first run's; a program that asks for shapes begins none."""
    params, optimizer = {"a": jnp.zeros(3)}, make()
    jax.eval_shape(optimizer.init, params)
    optimizer.init(params)
    jax.eval_shape(optimizer.init, params)
    with pytest.raises(ValueError, match="Expected one run from one key, got a second `init`"):
        optimizer.init(params)


def test_a_run_that_could_begin_again_unseen_is_refused():
    """A compiled or vectorised `init` gives one key to many runs: twice the same noise, and a difference without."""
    params, stack = {"a": jnp.zeros(3)}, {"a": jnp.zeros((4, 3))}
    for begin in (jax.jit, jax.vmap, lambda init: jax.jit(lambda _: init(params))):
        with pytest.raises(ValueError, match=r"Expected `init` outside of jax\.jit and jax.vmap"):
            begin(no.dp_sgd(0.1, MECHANISM, KEY).init)(stack)
    optimizer = no.add_noise(MECHANISM, KEY)
    states = jax.vmap(lambda _: optimizer.init(params))(jnp.arange(4))
    with pytest.raises(ValueError, match=r"Expected the state of one run, got a batch of shape \(4,\)"):
        no.releases(states)


def test_a_trace_for_shapes_that_is_run_all_the_same_releases_nothing():
    params, optimizer = jnp.zeros(3), no.add_noise(MECHANISM, KEY)
    init = jax.jit(optimizer.init)
    jax.eval_shape(init, params)
    state = init(params)  # from the cache
    with pytest.raises(ValueError, match="Expected a state with the key of its noise"):
        optimizer.update(summed(params), state)
    noisy, _ = jax.jit(lambda state: optimizer.update(summed(params), state))(state)
    assert np.isnan(noisy).all()


def test_an_optimizer_does_not_go_to_another_worker():
    """Two copies would draw the same noise, each in its first run."""
    cloudpickle = pytest.importorskip("cloudpickle")
    with pytest.raises(Exception, match="Expected an optimizer that stays in its process"):
        cloudpickle.dumps(no.dp_sgd(0.1, MECHANISM, KEY))


def test_the_key_is_hidden_and_can_be_taken_out():
    params, optimizer = params_tree(), no.dp_sgd(0.1, MECHANISM, KEY)
    state = optimizer.init(params)
    words = [str(word) for word in np.asarray(state[1].key)]
    assert "<hidden>" in repr(state) and not any(word in repr(state) for word in words)
    _, state = optimizer.update(gradients(params, jnp.arange(4)), state, params, example_mask=jnp.ones(4, bool))
    stripped = no.without_key(state)
    assert no.releases(stripped) == 1 and jax.tree.structure(stripped) == jax.tree.structure(state)
    assert not any(np.array_equal(leaf, state[1].key) for leaf in jax.tree.leaves(stripped))


def test_float64_is_refused():
    """Its bits below the noise's would be released as they are: a record is there or not, for all to see."""
    with jax.enable_x64(True):
        params = {"w": jnp.zeros(3)}
        optimizer, noise = no.dp_sgd(0.1, MECHANISM, KEY), no.add_noise(MECHANISM, KEY)
        with pytest.raises(ValueError, match="Expected gradients of at most float32, got float64: float32 noise"):
            optimizer.update({"w": jnp.ones((2, 3))}, optimizer.init(params), params, example_mask=jnp.ones(2, bool))
        with pytest.raises(ValueError, match="Expected gradients of at most float32, got float64: float32 noise"):
            noise.update(summed(params), noise.init(params))
        small = {"w": jnp.zeros(3, jnp.float32)}
        noisy, _ = noise.update(summed(small), no.add_noise(MECHANISM, KEY).init(small))
        assert noisy["w"].dtype == jnp.float32


def test_noise_is_fresh_in_every_step_leaf_and_key():
    zeros = {"a": jnp.zeros(1000), "b": jnp.zeros(1000)}
    drawn = []
    for key in (KEY, key_for(Purpose.PRIVACY_NOISE, "other", root=ROOT, repeat=0), jax.random.key(1)):
        noise = no.add_noise(MECHANISM, key)
        state = noise.init(zeros)
        for _ in range(3):
            noisy, state = noise.update(summed(zeros), state)
            drawn += [np.asarray(noisy["a"]), np.asarray(noisy["b"])]
    correlations = np.corrcoef(drawn)[np.triu_indices(len(drawn), 1)]
    assert np.abs(correlations).max() < 5.5 / math.sqrt(1000)


def test_noise_shares_nothing_with_other_uses_of_a_jax_key():
    key = jax.random.key(3)
    words = {tuple(np.asarray(jax.random.bits(k, (2,), jnp.uint32))) for k in (key, *jax.random.split(key, 100))}
    words |= {tuple(np.asarray(jax.random.key_data(k))) for k in (key, *jax.random.split(key, 100))}
    state = no.add_noise(MECHANISM, key).init(jnp.zeros(1))
    assert tuple(np.asarray(state.key)) not in words


ADVERSARIAL = {
    "nan": np.nan, "inf": np.inf, "minus inf": -np.inf, "huge": 1e30, "largest": 3e38, "large": 1e15, "zero": 0.0,
    "tiny": 1e-30, "ordinary": 0.3,
}  # fmt: skip


def unclipped_sum(batch, clip, *, example_mask=None):
    del clip, example_mask
    return jax.tree.map(lambda g: jnp.nan_to_num(g).sum(axis=0), batch)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("value", ADVERSARIAL.values(), ids=ADVERSARIAL)
def test_one_example_moves_the_sum_by_at_most_the_clip(value, dtype):
    """Whatever it is, in one leaf or in all, and also as the only one of its batch."""
    others = {"w": RNG.normal(size=(8, 3, 2)), "b": RNG.normal(size=(8, 5))}
    for spread in (("w",), ("w", "b")):
        bad = {k: np.full((1, *v.shape[1:]), value if k in spread else 0.01) for k, v in others.items()}
        for base in (others, {k: v[:0] for k, v in others.items()}):
            with_it = {k: jnp.asarray(np.concatenate([base[k], bad[k]]), dtype) for k in base}
            without = {k: jnp.asarray(v, dtype) for k, v in base.items()}
            moved = flat(clipped_sum(with_it, 0.5)).astype(float) - flat(clipped_sum(without, 0.5))
            assert np.isfinite(moved).all()
            assert np.linalg.norm(moved) <= 0.5 * (1 + 1e-5) + 8 * 2.0**-23  # rounding of a sum of 8 unit numbers
            if value in (1e15, 0.3):
                assert np.linalg.norm(moved) > 0.49


def test_the_sensitivity_test_sees_a_missing_clip():
    big = {"w": jnp.full((1, 3), 1e15)}
    assert np.linalg.norm(flat(unclipped_sum(big, 0.5))) > 1e6 > np.linalg.norm(flat(clipped_sum(big, 0.5)))


def test_clipping_is_over_all_leaves_and_each_example_on_its_own():
    batch = {"w": jnp.asarray(RNG.normal(size=(6, 3, 2)), jnp.float32), "b": jnp.asarray(RNG.normal(size=(6,)))}
    rows = np.concatenate([np.asarray(batch["b"])[:, None], np.asarray(batch["w"]).reshape(6, -1)], axis=1)
    expected = (rows * np.minimum(1, 0.7 / np.linalg.norm(rows, axis=1))[:, None]).sum(axis=0)
    np.testing.assert_allclose(flat(clipped_sum(batch, 0.7)), expected, rtol=1e-5)
    halves = [jax.tree.map(lambda g, s=s: g[s], batch) for s in (slice(0, 2), slice(2, 6))]
    parts = sum(flat(clipped_sum(half, 0.7)) for half in halves)
    np.testing.assert_allclose(parts, expected, rtol=1e-5)


def test_padded_rows_do_not_count_even_when_they_are_not_numbers():
    batch = jnp.concatenate([jnp.ones((2, 3)), jnp.full((2, 3), jnp.nan), jnp.full((1, 3), 5.0)])
    mask = jnp.array([True, True, False, False, False])
    np.testing.assert_array_equal(no.clipped_sum(batch, 9.0, example_mask=mask), np.full(3, 2.0))
    assert flat(clipped_sum(batch, 9.0, example_mask=jnp.zeros(5, bool))).tolist() == [0, 0, 0]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_it_compiles_and_scans(make):
    """A scan over steps whose batches were drawn beforehand gives what a Python loop gives."""
    optimizer, params = make(0.05, MECHANISM, KEY), params_tree()
    drawn = MECHANISM.sampler.batches(KEY, 0, 12, 200)

    def step(carry, batch):
        params, state = carry
        updates, state = optimizer.update(gradients(params, batch[0]), state, params, example_mask=batch[1])
        return (optax.apply_updates(params, updates), state), None

    looped = params, optimizer.init(params)
    scanned, _ = jax.jit(partial(jax.lax.scan, step))(looped, (jnp.asarray(drawn.indices), jnp.asarray(drawn.mask)))
    compiled = jax.jit(step)
    for batch in zip(drawn.indices, drawn.mask):
        looped, _ = compiled(looped, batch)
    np.testing.assert_allclose(flat(scanned[0]), flat(looped[0]), rtol=1e-4, atol=1e-6)
    assert no.releases(scanned[1]) == 12


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_low_precision_params_get_noise_and_state_in_float32(make):
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params_tree())
    optimizer = make(0.5, MECHANISM, KEY)
    state = optimizer.init(params)
    updates, after = optimizer.update(gradients(params, jnp.arange(9)), state, params, example_mask=jnp.ones(9, bool))
    assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype("float32")}
    assert jax.tree.map(lambda leaf: leaf.dtype, state) == jax.tree.map(lambda leaf: leaf.dtype, after)
    assert {p.dtype for p in jax.tree.leaves(optax.apply_updates(params, updates))} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_schedule_changes_the_learning_rate_and_nothing_else(make):
    schedule = optax.piecewise_constant_schedule(0.5, {1: 0.1})
    fixed, scheduled = make(0.5, MECHANISM, KEY), make(schedule, MECHANISM, KEY)
    static = ("mechanism", "key", *(("b1", "b2", "eps") if make is no.dp_adam else ()))
    injected = optax.inject_hyperparams(make, static_args=static)(schedule, MECHANISM, KEY)
    params, batch = params_tree(), gradients(params_tree(), jnp.arange(9))
    states = [optimizer.init(params) for optimizer in (fixed, scheduled, injected)]
    mask = jnp.arange(9) < 7
    for factor in (1.0, 0.1):
        moved = []
        for i, optimizer in enumerate((fixed, scheduled, injected)):
            update = jax.jit(optimizer.update) if optimizer is injected else optimizer.update
            updates, states[i] = update(batch, states[i], params, example_mask=mask)
            moved.append(flat(updates))
        np.testing.assert_allclose(moved[1], factor * moved[0], rtol=1e-5)
        np.testing.assert_allclose(moved[2], moved[1], rtol=1e-5)
    assert no.releases(states[2]) == 2


def test_pieces_go_into_a_chain_with_optaxs_own():
    optimizer = optax.chain(
        no.clip_and_sum(QUIET), no.add_noise(QUIET, KEY), optax.add_decayed_weights(0.1), optax.scale_by_sign(),
        optax.scale_by_learning_rate(0.2),
    )  # fmt: skip
    params = params_tree()
    updates, _ = optimizer.update(
        gradients(params, jnp.arange(9)), optimizer.init(params), params, example_mask=jnp.ones(9, bool)
    )
    np.testing.assert_allclose(np.abs(flat(updates)), 0.2, rtol=1e-6)


@pytest.mark.parametrize("key, error", [
    (None, TypeError), (0, TypeError), (np.zeros(2, np.uint32), TypeError), (bytes(8), ValueError),
    (jnp.zeros(2, jnp.uint32), TypeError),
    (key_for(Purpose.PRIVACY_NOISE, root=RandomRoot.from_os_entropy(secure_noise=True), repeat=0), TypeError),
], ids=["none", "integer", "raw words", "too short", "raw JAX words", "of a cipher"])  # fmt: skip
def test_no_noise_without_a_key(key, error):
    with pytest.raises(error, match=r"Expected (a )?key"):
        no.dp_sign_sgd(0.1, MECHANISM, key)


@pytest.mark.parametrize("make", [*MAKERS.values(), lambda rate, mechanism: no.add_noise(mechanism)])
def test_there_is_no_default_key(make):
    with pytest.raises(TypeError, match="key"):
        make(0.1, MECHANISM)


def test_what_is_not_an_examples_gradient_is_refused():
    optimizer, params = no.dp_sgd(0.1, MECHANISM, KEY), params_tree()
    state, batch = optimizer.init(params), gradients(params, jnp.arange(4))
    with pytest.raises(ValueError, match="got no params"):
        optimizer.update(batch, state)
    with pytest.raises(ValueError, match="Expected example_mask, got none: batches of Poisson sampling"):
        optimizer.update(batch, state, params)
    summed = jax.grad(lambda p: jax.vmap(loss, (None, 0))(p, (X, Y)).mean())(params)
    with pytest.raises(ValueError, match="Expected a gradient of shape"):
        optimizer.update(summed, state, params)
    with pytest.raises(ValueError, match="same structure"):
        optimizer.update(batch["layer"], state, params)
    for mask in (jnp.ones(3, bool), jnp.ones(4), jnp.full(4, 2)):
        with pytest.raises(ValueError, match="Expected example_mask"):
            optimizer.update(batch, state, params, example_mask=mask)
    for rate in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="learning_rate"):
            no.dp_sgd(rate, MECHANISM, KEY)


def test_a_part_of_the_gradient_is_refused():
    """Each part clipped to C on its own: together they would move by more; masked-out leaves would pass unclipped."""
    params = {"a": jnp.zeros(3), "b": jnp.zeros(2)}
    batch = {"a": jnp.ones((4, 3)), "b": jnp.ones((4, 2))}
    one, two, three = (no.dp_sgd(0.1, MECHANISM, KEY) for _ in range(3))
    split = optax.partition({"x": one, "y": two}, {"a": "x", "b": "y"})
    for optimizer in (optax.masked(three, {"a": True, "b": False}), split):
        with pytest.raises(ValueError, match="a part of it"):
            optimizer.update(batch, optimizer.init(params), params)


def at_even_steps(step):
    return step % 2 == 0


WRAPPERS = {
    "apply_if_finite": lambda inner: optax.apply_if_finite(inner, 3),
    "conditionally_transform": lambda inner: optax.conditionally_transform(inner, at_even_steps),
    "conditionally_mask": lambda inner: optax.conditionally_mask(inner, at_even_steps),
    "MultiSteps": lambda inner: optax.MultiSteps(inner, 2).gradient_transformation(),
}


def after(optimizer, updates, num_steps, params):
    """(the last updates, the state) of so many steps on the same updates, of four examples if they are of examples."""
    optimizer = optax.with_extra_args_support(optimizer)
    state, last = optimizer.init(params), None
    for _ in range(num_steps):
        last, state = optimizer.update(updates, state, params, example_mask=jnp.ones(4, bool))
    return last, state


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_what_leaves_steps_out_goes_around_what_follows_the_noise(wrap):
    """A private gradient that is skipped or accumulated afterwards was released and is counted."""
    params = params_tree()
    private = optax.chain(no.clip_and_sum(MECHANISM), no.add_noise(MECHANISM, KEY), wrap(optax.sgd(0.1)))
    _, state = after(private, gradients(params, jnp.arange(4)), 3, params)
    assert no.releases(state) == 3


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_around_the_noise_nothing_fits_and_nothing_is_counted(wrap):
    """A step that is left out would hand on the sum without noise, or another sum than the accounted one."""
    params = params_tree()
    private = optax.chain(no.clip_and_sum(MECHANISM), wrap(optax.chain(no.add_noise(MECHANISM, KEY), optax.sgd(0.1))))
    state = private.init(params)
    with pytest.raises(ValueError, match=r"outside of any wrapper that leaves steps out, got it within a \w+State:"):
        no.releases(state)
    with pytest.raises((TypeError, ValueError, AttributeError), match=r"clip_and_sum|ClippedSum"):
        after(optax.chain(no.clip_and_sum(MECHANISM), wrap(no.add_noise(MECHANISM, KEY))),
              gradients(params, jnp.arange(4)), 1, params)  # fmt: skip


BETWEEN = {
    "scale": lambda: optax.scale(10.0),
    "trace": lambda: optax.trace(0.9),
    "apply_every": lambda: optax.apply_every(4),
    "ema": lambda: optax.ema(0.9),
    "scale_by_adam": optax.scale_by_adam,
    "normalize_by_update_norm": optax.normalize_by_update_norm,
    "scale_by_learning_rate": lambda: optax.scale_by_learning_rate(100.0),
    "scale_by_schedule": lambda: optax.scale_by_schedule(lambda step: 10.0),
    "add_decayed_weights": lambda: optax.add_decayed_weights(0.1),
    "zero_nans": optax.zero_nans,
    "clip": lambda: optax.clip(1.0),
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(1.0),
    "centralize": optax.centralize,
    "keep_params_nonnegative": optax.keep_params_nonnegative,
    "stateless": lambda: optax.stateless_with_tree_map(lambda g, p: 10 * g),
}


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("params", [jnp.zeros(2), {"a": jnp.zeros(3), "b": jnp.zeros(2)}], ids=["array", "tree"])
@pytest.mark.parametrize("make", BETWEEN.values(), ids=BETWEEN)
def test_nothing_goes_between_the_clipping_and_the_noise(make, params, is_compiled):
    """One example would move what is given noise by ten times the clip norm (trace), or by as much as it is scaled."""
    batch = jax.tree.map(lambda p: jnp.ones((4, *p.shape)), params)
    private = optax.chain(no.clip_and_sum(MECHANISM), make(), no.add_noise(MECHANISM, KEY))
    update = jax.jit(private.update) if is_compiled else private.update
    with pytest.raises((TypeError, ValueError, AttributeError)):
        update(batch, private.init(params), params, example_mask=jnp.ones(4, bool))


def test_what_goes_between_is_told_in_a_sentence():
    params = jnp.zeros(2)
    private = optax.chain(no.clip_and_sum(MECHANISM), optax.scale(10.0), no.add_noise(MECHANISM, KEY))
    with pytest.raises(TypeError, match="Expected nothing between clip_and_sum and add_noise"):
        private.update(jnp.ones((4, 2)), private.init(params), params, example_mask=jnp.ones(4, bool))


def test_the_noise_is_given_to_a_sum_of_its_own_clip_norm_alone():
    params, noise = jnp.zeros(2), no.add_noise(MECHANISM, KEY)
    state = noise.init(params)
    with pytest.raises(ValueError, match="Expected what clip_and_sum hands on, got Array"):
        noise.update(params + 0.0, state)
    with pytest.raises(ValueError, match=r"clipped to the mechanism's l2_clip_norm 0.5, got one clipped to 5"):
        noise.update(summed(params, clip=5.0), state)
    # A batch in two parts: what docs/optax.md tells.
    total = no.clipped_sum(jnp.ones((2, 2)), 0.5) + no.clipped_sum(jnp.ones((3, 2)), 0.5)
    quiet = no.add_noise(QUIET, KEY)
    noisy, _ = quiet.update(no.ClippedSum(total, 0.5), quiet.init(params))
    np.testing.assert_allclose(noisy, 5 * 0.5 / math.sqrt(2) / 16, rtol=1e-5)


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_around_the_clipping_nothing_fits(wrap):
    params = params_tree()
    with pytest.raises((TypeError, ValueError), match=r"cond branches|Expected a gradient of shape"):
        after(wrap(no.dp_sgd(0.1, MECHANISM, KEY)), gradients(params, jnp.arange(4)), 1, params)


def test_batches_are_the_samplers_own_across_blocks_and_never_cut():
    drawn = list(no.private_batches(MECHANISM, KEY, num_steps=600, num_examples=200))
    expected = [row[mask] for row, mask in zip(*MECHANISM.sampler.batches(KEY, 0, 600, 200))]
    assert len(drawn) == 600
    for (rows, mask), want in zip(drawn, expected):
        np.testing.assert_array_equal(rows[mask], want)
    crowded = nc.SampledGaussian(noise_multiplier=1.0, l2_clip_norm=1.0, sampler=nc.Poisson(1e-3, 4))
    # Batches of 4 at q = 1/1000 come from 4,000 examples; one record more or less does not matter, another size does.
    assert len(list(no.private_batches(crowded, bytes(32), num_steps=2, num_examples=4_001))) == 2
    with pytest.raises(ValueError, match=r"Expected num_examples near the sampler's own 4000 \(B/q\), got 10000"):
        no.private_batches(crowded, KEY, num_steps=1, num_examples=10_000)


@pytest.mark.parametrize("sampler", [nc.Poisson(0.08, 16), nc.FixedSize(16, 200), nc.Shuffled(20, 200)])
def test_a_loop_goes_on_with_the_batches_that_follow(sampler):
    mechanism = nc.SampledGaussian(
        noise_multiplier=1.0, l2_clip_norm=1.0, sampler=sampler, adjacency=nc.Adjacency.REPLACE_ONE
    )
    size = {"num_examples": 200}
    begun = list(no.private_batches(mechanism, KEY, num_steps=30, **size))
    begun += no.private_batches(mechanism, KEY, num_steps=270, first_step=30, **size)
    batches_module._next_steps.clear()
    assert len(begun) == 300
    for (rows, mask), (same, its_mask) in zip(begun, no.private_batches(mechanism, KEY, num_steps=300, **size)):
        np.testing.assert_array_equal(rows[mask], same[its_mask])


def test_batches_are_handed_out_once():
    """Ten epochs of one key's first hundred steps are the same batches ten times: epsilon 23 where 1.8 is accounted."""
    asked = {"num_steps": 5, "num_examples": 200}
    first, second = (no.private_batches(MECHANISM, KEY, **asked) for _ in range(2))
    next(first)
    with pytest.raises(ValueError, match="got step 0 of a key whose steps up to 0 were handed out"):
        no.private_batches(MECHANISM, KEY, **asked)
    with pytest.raises(ValueError, match="Go on with first_step=1"):
        next(second)
    assert len(list(first)) == 4
    with pytest.raises(ValueError, match="Go on with first_step=5"):
        no.private_batches(MECHANISM, KEY, first_step=4, **asked)
    assert len(list(no.private_batches(MECHANISM, KEY, first_step=5, **asked))) == 5
    with pytest.raises(ValueError, match="Expected first_step >= 0"):
        no.private_batches(MECHANISM, KEY, first_step=-1, **asked)
    assert not any(KEY in known for known in batches_module._next_steps)


def test_batches_need_rows_and_a_key():
    stream = nc.SampledGaussian(noise_multiplier=1.0, l2_clip_norm=1.0, sampler=nc.Stream(4))
    with pytest.raises(ValueError, match="Expected a sampler of a data set"):
        no.private_batches(stream, KEY, num_steps=1, num_examples=10)
    for key in (None, 3, b"short"):
        with pytest.raises(TypeError, match="Expected key"):
            no.private_batches(MECHANISM, key, num_steps=1, num_examples=10)


def test_releases_wants_exactly_one_mechanism():
    params = jnp.zeros(2)
    for optimizer in (optax.sgd(0.1), optax.chain(no.add_noise(MECHANISM, KEY), no.add_noise(MECHANISM, KEY))):
        with pytest.raises(ValueError, match="one add_noise"):
            no.releases(optimizer.init(params))


def test_os_entropy_is_enough_to_start():
    first, second = (no.add_noise(MECHANISM, os.urandom(32)).init(jnp.zeros(1)).key for _ in range(2))
    assert tuple(np.asarray(first)) != tuple(np.asarray(second))
