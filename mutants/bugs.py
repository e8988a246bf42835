"""The bugs, each an exact replacement in a copy of `src/noisecast`. One whose text is no longer there is an error."""

from dataclasses import dataclass

# The checks, all in tests/audit/test_promises.py.
NOISE = "test_dp_sgd_draws_the_noise_that_is_accounted"
SIGNS = "test_signs_are_as_noisy_as_is_accounted"
ATTACK = "test_an_attack_proves_no_more_than_is_accounted"
CLIP = "test_a_record_moves_the_sum_by_at_most_the_clip_norm"
SHUFFLED = "test_shuffled_batches_earn_no_amplification"
ONCE = "test_noise_is_used_once"
POSTPONED = "test_postponed_noise_is_neither_lost_nor_given_twice"
PHASES = "test_postponed_noise_is_of_the_rate_it_was_postponed_at"
SEED = "test_a_release_has_no_seed"
FINITE = "test_a_row_that_is_not_finite_poisons_nothing"
CALIBRATION = "test_calibration_errs_on_the_private_side"
ORDERS = "test_the_renyi_epsilon_is_not_below_that_of_the_loss_distribution"
LEDGER = "test_a_ledger_counts_every_run"
BATCHES = "test_batches_are_drawn_as_they_are_accounted"
RESUMED = "test_a_resumed_run_is_the_run"
BEFORE = "test_a_ledger_knows_of_a_run_before_its_first_step"
LATER = "test_later_steps_have_batches_of_their_own"
RELEASED = "test_files_beside_the_parameters_tell_nothing_of_a_record"
CIPHER = "test_secure_noise_comes_from_the_cipher_and_nothing_else_says_so"


@dataclass(frozen=True)
class Bug:
    """One planted bug.

    Args:
      name: as in the matrix.
      seen_by: the checks that must fail.
      edits: (file under src/noisecast, old text, new text), each old text once in its file.
    """

    name: str
    seen_by: tuple[str, ...]
    edits: tuple[tuple[str, str, str], ...]

    @property
    def is_compiled(self) -> bool:
        """Whether it is in a file that kernels are made of, so that Numba compiles anew."""
        return any(file.rsplit("/", 1)[-1].startswith("_") or "_noise.py" in file for file, _, _ in self.edits)


BUGS = (
    Bug(
        "noise x 0.9, every engine",
        (NOISE, SIGNS,),
        (("privacy/mechanism.py", "return self.noise_multiplier * self.l2_clip_norm",
          "return 0.9 * self.noise_multiplier * self.l2_clip_norm"),),
    ),
    Bug(
        "noise x 0.9, sign coins alone",
        (SIGNS,),
        (("engines/row_sparse_lanes.py", "per_noise_std=each(1.0 / s.mechanism.noise_std for",
          "per_noise_std=each(1.0 / 0.9 / s.mechanism.noise_std for"),
         ("engines/row_sparse_lanes.py", "noise_std=each(s.mechanism.noise_std for s in scenarios),\n        per",
          "noise_std=each(0.9 * s.mechanism.noise_std for s in scenarios),\n        per")),
    ),
    Bug(
        "noise / 2, dense",
        (NOISE, ATTACK,),
        (("privacy/jax_noise.py", "* jnp.asarray(noise_std, clipped_sum.dtype)",
          "* jnp.asarray(0.5 * noise_std, clipped_sum.dtype)"),),
    ),
    Bug(
        "noise / 2, row-sparse DP-SGD",
        (NOISE, ATTACK,),
        (("engines/row_sparse_lanes.py", "s.optimizer.learning_rate * s.mechanism.mean_noise_std for",
          "s.optimizer.learning_rate * 0.5 * s.mechanism.mean_noise_std for"),),
    ),
    Bug(
        "missing clip, row-sparse",
        (CLIP, ATTACK,),
        (("engines/_linear_kernels.py",
          "clipped = residual * min(f32(1.0), lanes.clip[lane] / max(length, f32(1e-38)))", "clipped = residual"),),
    ),
    Bug(
        "missing clip, jax_model",
        (CLIP,),
        (("problems/jax_model.py", "jnp.isfinite(norm), leaf * factor, 0.0", "jnp.isfinite(norm), leaf, 0.0"),),
    ),
    Bug(
        "clip after the sum, dense",
        (CLIP,),
        (("problems/linear.py",
          "clipped, _ = self._clipped_residuals(params, examples, l2_clip_norm)\n        return self._gradient_sum("
          "examples.rows, jnp.where(examples.mask[:, None], clipped, 0.0))",
          "clipped, _ = self._clipped_residuals(params, examples, jnp.inf)\n        total = self._gradient_sum("
          "examples.rows, jnp.where(examples.mask[:, None], clipped, 0.0))\n"
          "        return total * jnp.minimum(1.0, l2_clip_norm / jnp.maximum(jnp.linalg.norm(total), 1e-30))"),),
    ),
    Bug(
        "divided by the drawn batch, dense",
        (CLIP,),
        (("engines/dense.py", "noise_std=noise_std, expected_batch_size=group.expected_batch_size",
          "noise_std=noise_std,\n            "
          "expected_batch_size=jnp.maximum(jax.tree.leaves(examples)[-1].sum(), 1)"),),
    ),
    Bug(
        "divided by the drawn batch, row-sparse",
        (CLIP,),
        (("engines/row_sparse.py", "batches, sizes = _packed(drawn.indices, drawn.mask)",
          "batches, sizes = _packed(drawn.indices, drawn.mask)\n"
          "            lanes.step_size[:] *= self._mechanism.expected_batch_size / max(1, sizes[0])"),),
    ),
    Bug(
        "shuffled accounted as Poisson",
        (SHUFFLED,),
        (("privacy/sampling.py", "return _compose(GaussianDpEvent(noise_multiplier), self.num_epochs(num_steps))",
          "from dp_accounting import PoissonSampledDpEvent\n\n"
          "        step = PoissonSampledDpEvent(self.sampling_probability, GaussianDpEvent(noise_multiplier))\n"
          "        return _compose(step if self.sampling_probability < 1 else step.event, num_steps)"),),
    ),
    Bug(
        "one key at every step, dense",
        (ONCE,),
        (("engines/dense.py", "standard_normal(noise_key, step, params.shape)",
          "standard_normal(noise_key, 0 * step, params.shape)"),),
    ),
    Bug(
        "one key for all scenarios",
        (ONCE,),
        (("engines/keys.py", "key_for(Purpose.PRIVACY_NOISE, scenario.id, root=root",
          'key_for(Purpose.PRIVACY_NOISE, "run", root=root'),),
    ),
    Bug(
        "noise on touched rows alone, never flushed",
        (NOISE, ATTACK,),
        (("engines/row_sparse.py", "if self._flush is not None:", "if self._flush is None:"),),
    ),
    Bug(
        "lazy count off by one, DP-SGD",
        (POSTPONED,),
        (("engines/_kernels.py", "spread = f32(math.sqrt(f32(step - last[row])))\n            last[row] = step\n",
          "spread = f32(math.sqrt(f32(step - last[row])))\n            last[row] = step + 1\n"),),
    ),
    Bug(
        "lazy count off by one, DP-SignSGD",
        (POSTPONED,),
        (("engines/_kernels.py", "count, lanes, k, k + 1, STEP_NOISE", "count, lanes, k, k, STEP_NOISE"),),
    ),
    Bug(
        "postponed past a change of the learning rate",
        (PHASES,),
        (("engines/row_sparse.py", "if ends_phase:  # what", "if False:  # what"),),
    ),
    Bug(
        "sensitivity halved (replace one)",
        (NOISE, ATTACK,),
        (("privacy/worst_case.py", "return 2.0 if self.adjacency == Adjacency.REPLACE_ONE else 1.0", "return 1.0"),),
    ),
    Bug(
        "another multiplier accounted than drawn",
        (NOISE,),
        (("privacy/accounting.py",
          "z, sampler = mechanism.noise_multiplier, mechanism.sampler\n    spent",
          "z, sampler = 1.25 * mechanism.noise_multiplier, mechanism.sampler\n    spent"),),
    ),
    Bug(
        "constant seed",
        (SEED,),
        (("release.py", "root = RandomRoot.from_os_entropy(secure_noise=secure)",
          "root = RandomRoot(bytes(32), None, secure)"),),
    ),
    Bug(
        "NaN poisons the sum, rows",
        (FINITE,),
        (("problems/rows.py", "values = np.where(finite[:, None], values, np.float32(0.0))", "pass"),),
    ),
    Bug(
        "NaN poisons the sum, jax_model",
        (FINITE,),
        (("problems/jax_model.py", "jnp.where(jnp.isfinite(norm), leaf * factor, 0.0)", "leaf * factor"),),
    ),
    Bug(
        "calibration takes what is nearly enough",
        (CALIBRATION,),
        (("privacy/calibration.py", "- CLOSE <= value <= 0:", "- CLOSE <= value <= 0.02:"),),
    ),
    Bug(
        "an order is the best unseen",
        (ORDERS,),
        (("privacy/renyi.py", "if order in known[0]:", "if True:"),),
    ),
    Bug(
        "the ledger forgets a run",
        (LEDGER,),
        (("ledger.py", "for entry in entries]", "for entry in entries[1:]]"),),
    ),
    Bug(
        "the ledger is written after training",
        (BEFORE,),
        (("release.py",
          "                _write_down(account, run, scenario)\n", "                pass\n"),
         ("release.py", "        save(model)\n",
          "        if account is not None:\n            _write_down(account, run, scenario)\n        save(model)\n")),
    ),
    Bug(
        "a tenth more records drawn than accounted",
        (BATCHES,),
        (("privacy/sampling.py", "rng.binomial(num_rows, self.sampling_probability, STEPS_PER_BLOCK)",
          "rng.binomial(num_rows, 1.1 * self.sampling_probability, STEPS_PER_BLOCK)"),),
    ),
    Bug(
        "amplification of a smaller q",
        (BATCHES,),
        (("privacy/sampling.py", "PoissonSampledDpEvent(self.sampling_probability, step)",
          "PoissonSampledDpEvent(0.8 * self.sampling_probability, step)"),),
    ),
    Bug(
        "resumed with other noise",
        (RESUMED,),
        (("release.py", "engine = engines.start([scenario], repeats=[0], root=saved.root)",
          "engine = engines.start([scenario], repeats=[0], root=RandomRoot.from_os_entropy())"),),
    ),
    Bug(
        "the batches of thousands of steps once more",
        (LATER,),
        (("engines/row_sparse.py", "drawn = sampler.batches(self._batch_key, step, stop, ",
          "first = step % STEPS_PER_CHUNK\n            "
          "drawn = sampler.batches(self._batch_key, first, first + stop - step, "),),
    ),
    Bug(
        "a hash of the examples beside the model",
        (RELEASED,),
        (("model_dir.py", "del settings[\"scenario\"]", "settings[\"scenario\"]"),),
    ),
    Bug(
        "one secure stream for all outputs",
        (CIPHER,),
        (("engines/row_sparse_lanes.py", "    states[13] = lanes.lane\n", ""),),
    ),
    Bug(
        "secure noise, but not the batches",
        (CIPHER,),
        (("privacy/drawing.py", "if isinstance(key, SecureKey):", "if False:"),),
    ),
    Bug(
        "a statement of a cipher that was not used",
        (CIPHER,),
        (("release.py", "secure_noise=run.root.secure_noise,", "secure_noise=True,"),),
    ),
    Bug(
        "the ledger forgets that records are replaced",
        (LEDGER,),
        (("privacy/mechanism.py", "\"adjacency\": str(self.adjacency)}", "\"adjacency\": \"add_or_remove_one\"}"),),
    ),
)  # fmt: skip
