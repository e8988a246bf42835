"""Settings to copy: the same run in noisecast, Opacus, JAX Privacy and Optax, and in what each differs from ours."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from noisecast.privacy.mechanism import Adjacency
from noisecast.privacy.sampling import FixedSize, Poisson, Sampler, Shuffled, Stream

_TOML_NAMES = {"DP-SGD": "dp-sgd", "DP-SignSGD": "dp-sign-sgd", "DP-Adam": "dp-adam"}
_TORCH = {
    "DP-SGD": "torch.optim.SGD(model.parameters(), lr={rate})",
    "DP-SignSGD": "DPSignSGD(model.parameters(), lr={rate})",
    "DP-Adam": "torch.optim.Adam(model.parameters(), lr={rate}, betas=(0.9, 0.999), eps=1e-8)",
}
_OPTAX = {
    "DP-SGD": "optax.sgd({rate})",
    "DP-SignSGD": "optax.sign_sgd({rate})",
    "DP-Adam": "optax.adam({rate}, b1=0.9, b2=0.999, eps=1e-8)",
}
_SAMPLER_NAMES = {Poisson: "poisson", FixedSize: "fixed-size", Shuffled: "shuffled", Stream: "stream"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run, as every library needs it.

    Args:
      optimizer: its name.   learning_rate, noise_multiplier, l2_clip_norm, num_steps, target_delta: as in `Scenario`.
      expected_batch_size: B.   sampling_probability: q; None for a stream.
      sampler: how batches were drawn; None where nobody knows.   adjacency: an `Adjacency`; None likewise.
    """

    optimizer: str
    learning_rate: float
    noise_multiplier: float
    l2_clip_norm: float
    expected_batch_size: float
    sampling_probability: float | None
    num_steps: int
    target_delta: float
    sampler: Sampler | None = None
    adjacency: str | None = None

    @property
    def num_examples(self) -> int | None:
        """n = B / q."""
        q = self.sampling_probability
        return None if q is None else round(self.expected_batch_size / q)

    @property
    def is_poisson(self) -> bool:
        return isinstance(self.sampler, Poisson)


class Snippet(NamedTuple):
    """What to copy, and what is different there; code is None where there is none, and `differs` says why."""

    tool: str
    language: str
    code: str | None
    differs: str


def snippets(settings: Settings) -> tuple[Snippet, ...]:
    """The same settings for every library; those that draw Poisson batches only say so of other samplers."""
    return (_noisecast(settings), _opacus(settings), _jax_privacy(settings), _optax(settings))


# --- Ours -----------------------------------------------------------------------------------------------


def _noisecast(s: Settings) -> Snippet:
    if s.optimizer not in _TOML_NAMES:
        return Snippet("noisecast", "toml", None, f"The optimizer {s.optimizer} has no name in a scenario file.")
    lines = [
        "# Add the [problem] table of your data.",
        f"num_steps = {s.num_steps}",
        f"target_delta = {_toml(s.target_delta)}",
        'runners = ["training"]',
        "",
        "[mechanism]",
        f"noise_multiplier = {_toml(s.noise_multiplier)}",
        f"l2_clip_norm = {_toml(s.l2_clip_norm)}",
        f"batch_size = {_toml(s.expected_batch_size)}",
    ]
    if s.sampler is not None:
        lines.append(f'sampler = "{_SAMPLER_NAMES[type(s.sampler)]}"')
    if s.adjacency is not None:
        lines.append(f'adjacency = "{s.adjacency.replace("_", "-")}"')
    lines += ["", "[[optimizer]]", f'name = "{_TOML_NAMES[s.optimizer]}"', f"learning_rate = {_toml(s.learning_rate)}"]
    unknown = "" if s.sampler is not None else " How batches were drawn is not recorded here: the default is Poisson."
    own = " b1, b2 and eps of Adam are not recorded either; these are the defaults." if s.optimizer == "DP-Adam" else ""
    examples = "" if s.num_examples is None else f" with {s.num_examples:,} examples"
    return Snippet(
        "noisecast",
        "toml",
        "\n".join(lines) + "\n",
        f"The same run{examples}; with another number of examples epsilon is another.{unknown}{own}",
    )


def _toml(value: float) -> str:
    """A float in full, so that what is copied is what was run."""
    return repr(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))


# --- Others ---------------------------------------------------------------------------------------------


def _why_not_elsewhere(s: Settings, known: dict[str, str]) -> str | None:
    if s.optimizer not in known:
        return f"There is no {s.optimizer} there."
    if not s.is_poisson:
        name = "unknown" if s.sampler is None else _SAMPLER_NAMES[type(s.sampler)]
        return (
            f"Batches of this run: {name}. What is printed here draws Poisson batches, whose epsilon is another; "
            "account for those anew: noisecast account."
        )
    if s.adjacency not in (None, Adjacency.ADD_OR_REMOVE_ONE):
        kind = s.adjacency.replace("_", " ")
        return f"This run's neighbours: {kind}. What is printed here accounts for adding or removing one example."
    return None


def _opacus(s: Settings) -> Snippet:
    reason = _why_not_elsewhere(s, _TORCH)
    if reason is not None:
        return Snippet("Opacus", "python", None, reason)
    n, batch = s.num_examples or 1, max(1, round(s.expected_batch_size))
    imports = "from noisecast.opacus import DPSignSGD\n" if s.optimizer == "DP-SignSGD" else ""
    code = f"""\
import torch
from opacus import PrivacyEngine
{imports}
# Yours: model; loss_of(model, batch), a mean over the batch; dataset, a torch Dataset of {n} examples.
engine = PrivacyEngine()
optimizer = {_TORCH[s.optimizer].format(rate=_toml(s.learning_rate))}
loader = torch.utils.data.DataLoader(dataset, batch_size={batch})
model, optimizer, loader = engine.make_private(
    module=model,
    optimizer=optimizer,
    data_loader=loader,
    noise_multiplier={_toml(s.noise_multiplier)},
    max_grad_norm={_toml(s.l2_clip_norm)},
    poisson_sampling=True,
)
step, num_steps = 0, {s.num_steps}
while step < num_steps:
    for batch in loader:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        step += 1
        if step == num_steps:
            break
print("epsilon", engine.get_epsilon(delta={_toml(s.target_delta)}))
"""
    return Snippet("Opacus", "python", code, _what_opacus_does_differently(s, n, batch))


def _what_opacus_does_differently(s: Settings, n: int, batch: int) -> str:
    length = math.ceil(n / batch)
    divisor = int(n / length)
    differs = (
        f"Opacus draws each example with probability 1 / len(loader) = 1/{length} = {1 / length:.4g} (ours: "
        f"{s.sampling_probability:.4g}) and divides by int(n / len(loader)) = {divisor} (ours: "
        f"{s.expected_batch_size:g}), so its epsilon is its own: the last line prints it. "
    )
    if s.optimizer == "DP-SGD" and divisor != s.expected_batch_size:
        differs += f"For steps as long as ours multiply the learning rate by {divisor}/{s.expected_batch_size:g}. "
    if s.optimizer == "DP-SignSGD":
        differs += "Opacus has no sign optimizer: DPSignSGD is noisecast's. "
    return f"{differs}It has no defence against a seeded generator: for a release make PrivacyEngine(secure_mode=True)."


_KEY = 'jax.random.wrap_key_data(np.frombuffer(secrets.token_bytes(8), np.uint32), impl="threefry2x32")'


def _jax_privacy(s: Settings) -> Snippet:
    reason = _why_not_elsewhere(s, _OPTAX)
    if reason is not None:
        return Snippet("JAX Privacy", "python", None, reason)
    code = f"""\
import secrets

import jax
import numpy as np
import optax
from jax_privacy import batch_selection, clipped_grad
from jax_privacy.noise_addition import gaussian_privatizer

# Yours: loss(params, example) of one example; params; examples, an array of {s.num_examples} rows.
noise_multiplier, l2_clip_norm = {_toml(s.noise_multiplier)}, {_toml(s.l2_clip_norm)}
expected_batch_size, num_steps = {_toml(s.expected_batch_size)}, {s.num_steps}
key = {_KEY}
clipped_sum = clipped_grad(loss, l2_clip_norm=l2_clip_norm, batch_argnums=1, keep_batch_dim=False)
privatizer = gaussian_privatizer(stddev=noise_multiplier * l2_clip_norm, prng_key=key)
optimizer = {_OPTAX[s.optimizer].format(rate=_toml(s.learning_rate))}
noise_state, state = privatizer.init(params), optimizer.init(params)
batches = batch_selection.CyclicPoissonSampling(
    sampling_prob=expected_batch_size / len(examples), iterations=num_steps
)
for rows in batches.batch_iterator(len(examples), rng=secrets.randbits(128)):
    # A batch may be empty: then the step is noise alone.
    total = clipped_sum(params, examples[rows]) if len(rows) else jax.tree.map(np.zeros_like, params)
    noisy_sum, noise_state = privatizer.update(total, noise_state)
    mean = jax.tree.map(lambda total: total / expected_batch_size, noisy_sum)
    updates, state = optimizer.update(mean, state)
    params = optax.apply_updates(params, updates)
"""
    return Snippet(
        "JAX Privacy",
        "python",
        code,
        "The same mechanism: Poisson batches, the clipped sum, noise on it, divided by the expected batch size. It "
        "accounts for nothing by itself; epsilon is that of this page if you have as many examples. Batches differ in "
        "size: before jax.jit, pad them with rows whose gradient is zero.",
    )


def _optax(s: Settings) -> Snippet:
    reason = _why_not_elsewhere(s, _OPTAX)
    if reason is not None:
        return Snippet("Optax", "python", None, reason)
    width = s.sampler.width if isinstance(s.sampler, Poisson) else 0
    code = f"""\
import secrets

import jax
import jax.numpy as jnp
import numpy as np
import optax

# Yours: loss(params, example) of one example; params; examples, an array of {s.num_examples} rows.
expected_batch_size, width, num_steps = {_toml(s.expected_batch_size)}, {width}, {s.num_steps}
key = {_KEY}
optimizer = optax.chain(
    optax.contrib.differentially_private_aggregate(
        l2_norm_clip={_toml(s.l2_clip_norm)}, noise_multiplier={_toml(s.noise_multiplier)}, key=key
    ),
    optax.scale(width / expected_batch_size),  # it divides by the rows it is given
    {_OPTAX[s.optimizer].format(rate=_toml(s.learning_rate))},
)
state = optimizer.init(params)
gradients_of = jax.vmap(jax.grad(loss), in_axes=(None, 0))
rng = np.random.default_rng(secrets.randbits(128))
for _ in range(num_steps):
    rows = np.flatnonzero(rng.random(len(examples)) < expected_batch_size / len(examples))
    assert len(rows) <= width, "rarer than once in a million steps"
    is_drawn = np.arange(width) < len(rows)
    padded = np.pad(rows, (0, width - len(rows)))

    def zero_unless_drawn(each):
        return jnp.where(is_drawn.reshape(-1, *[1] * (each.ndim - 1)), each, 0)

    gradients = jax.tree.map(zero_unless_drawn, gradients_of(params, examples[padded]))
    updates, state = optimizer.update(gradients, state, params)
    params = optax.apply_updates(params, updates)
"""
    return Snippet(
        "Optax",
        "python",
        code,
        "differentially_private_aggregate divides by the number of rows that it is given, which in a Poisson batch is "
        "private: here the rows are padded to a fixed width and rescaled to the expected batch size. Optax accounts "
        "for nothing; epsilon is that of this page if you have as many examples.",
    )
