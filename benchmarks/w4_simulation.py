"""W4: simulation, d = 1024, 200 paths: the SDEs of DP-SGD and DP-SignSGD, and the discrete optimizers themselves.

Peers solve the same equations in their plainest form, with no clipping to look up: ours pays for the general one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.race import Contestant

NAME = "W4"
LEARNING_RATE, CLIP = 1e-3, 100.0
SDE, STEPS, STUDENT = "SDE", "steps", "steps, Student-t"


@dataclass(frozen=True)
class Task:
    """A quadratic with eigenvalues from 1/2 to 2, whose gradients are not clipped at first.

    Args:
      kind: SDE, its privacy noise alone; STEPS, B = 1 with Gaussian examples; STUDENT, with nu = 1.
    """

    kind: str
    sign: bool
    num_params: int
    runs: int

    @property
    def label(self) -> str:
        return f"{'sign' if self.sign else 'SGD'}, {self.kind}"

    @property
    def hessian_diag(self) -> np.ndarray:
        return np.linspace(0.5, 2.0, self.num_params).astype(np.float32)

    @property
    def start(self) -> np.ndarray:
        return np.where(np.arange(self.num_params) % 2 == 0, 1.0, -1.0).astype(np.float32)

    def noise_stds(self, noise_multiplier: float) -> tuple[float, float]:
        """Of the private mean gradient and of an example: the check of equal steps asks for next to none of either."""
        return 0.2 * CLIP * noise_multiplier, 0.0 if self.kind == SDE else 0.1 * noise_multiplier


def contestants(data_dir: str | None) -> tuple[str, list[Contestant]]:
    """What is simulated, and who does it."""
    return "d = 1024, 200 paths", contestants_of(num_params=1024, runs=200)


def contestants_of(*, num_params: int, runs: int) -> list[Contestant]:
    found = []
    for kind in (SDE, STEPS, STUDENT):
        for sign in (False, True):
            task = Task(kind, sign, num_params, runs)
            peers: list[tuple[str, str | None, Callable]] = [
                ("simulate", None, ours),
                ("torch loop", "torch / JAX", torch_loop),
                ("jax.lax loop", "torch / JAX", jax_loop),
            ]
            if kind == SDE:
                peers += [("torchsde", "torchsde", torchsde_paths), ("diffrax", "diffrax", diffrax_paths)]
            found += [Contestant(name, peer, task.label, runs, partial(start, task)) for name, peer, start in peers]
    return found


class Ours:
    def __init__(self, run: Any):
        self._run = run

    def advance(self, num_steps: int) -> None:
        self._run.advance(self._run.step + num_steps)

    def params(self) -> np.ndarray:
        return self._run.params[0, 0]


def ours(task: Task, noise_multiplier: float) -> Ours:
    from noisecast import DPSGD, DPSignSGD, SampledGaussian, Scenario, Stream, quadratic
    from noisecast.engines.simulate import SimulatedPaths, SimulatedRun
    from noisecast.privacy.noise import RandomRoot

    std, sigma = task.noise_stds(noise_multiplier)
    problem = quadratic(
        task.hessian_diag,
        task.start,
        example_noise_std=sigma,
        degrees_of_freedom=1.0 if task.kind == STUDENT else float("inf"),
    )
    mechanism = SampledGaussian(noise_multiplier=std / CLIP, l2_clip_norm=CLIP, sampler=Stream(1))
    optimizer = (DPSignSGD if task.sign else DPSGD)(learning_rate=LEARNING_RATE)
    scenario = Scenario(problem=problem, mechanism=mechanism, optimizer=optimizer, num_steps=10**9)
    asked: dict[str, Any] = {"repeats": range(task.runs), "root": RandomRoot.from_insecure_seed(0)}
    if task.kind == SDE:
        return Ours(SimulatedPaths([scenario], **asked, substeps=1))
    return Ours(SimulatedRun([scenario], **asked))


@dataclass
class Loop:
    """A peer: `take(num_steps)`, and where its first path is."""

    take: Callable[[int], None]
    params: Callable[[], np.ndarray]

    def advance(self, num_steps: int) -> None:
        self.take(num_steps)


def torch_loop(task: Task, noise_multiplier: float) -> Loop:
    """What one writes by hand: whole arrays in place, no allocation, torch's own generator."""
    import torch  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    h = torch.from_numpy(task.hessian_diag)
    x = torch.from_numpy(np.tile(task.start, (task.runs, 1)))
    g, noise, one = torch.empty_like(x), torch.empty_like(x), torch.empty(task.runs, 1)
    eta, (std, sigma) = LEARNING_RATE, task.noise_stds(noise_multiplier)

    def path_step() -> None:
        noise.normal_()
        torch.mul(x, h, out=g)
        if task.sign:
            torch.erf(g.mul_(1 / (2**0.5 * std)), out=g)
            x.add_(g, alpha=-eta)
            x.addcmul_(g.square_().neg_().add_(1).sqrt_(), noise, value=eta)
        else:
            x.add_(g, alpha=-eta).add_(noise, alpha=eta * std)

    def train_step() -> None:
        noise.normal_()
        torch.mul(x, h, out=g)
        if task.kind == STUDENT:
            g.addcmul_(noise, one.normal_().abs_().reciprocal_().mul_(sigma))
        else:
            g.add_(noise, alpha=sigma)
        g.mul_((CLIP / torch.linalg.vector_norm(g, dim=1, keepdim=True)).clamp_(max=1.0))
        g.add_(noise.normal_(), alpha=std)
        x.add_(g.sign_() if task.sign else g, alpha=-eta)

    def take(num_steps: int) -> None:
        with torch.no_grad():
            for _ in range(num_steps):
                path_step() if task.kind == SDE else train_step()

    return Loop(take, lambda: x[0].numpy())


def jax_loop(task: Task, noise_multiplier: float) -> Loop:
    """One compiled loop over steps, whole arrays, jax.random."""
    import jax
    import jax.numpy as jnp

    h, eta, (std, sigma) = jnp.asarray(task.hessian_diag), LEARNING_RATE, task.noise_stds(noise_multiplier)

    def path_step(key, x):
        noise = jax.random.normal(key, x.shape)
        if not task.sign:
            return x - eta * h * x + eta * std * noise
        m = jax.scipy.special.erf(h * x / (2**0.5 * std))
        return x - eta * m + eta * jnp.sqrt(1 - m**2) * noise

    def train_step(key, x):
        example_key, noise_key, scale_key = jax.random.split(key, 3)
        scale: Any = sigma
        if task.kind == STUDENT:
            scale = sigma / jnp.abs(jax.random.normal(scale_key, (task.runs, 1)))
        g = h * x + scale * jax.random.normal(example_key, x.shape)
        g *= jnp.minimum(1.0, CLIP / jnp.linalg.norm(g, axis=1, keepdims=True))
        g += std * jax.random.normal(noise_key, x.shape)
        return x - eta * (jnp.sign(g) if task.sign else g)

    step = path_step if task.kind == SDE else train_step

    @partial(jax.jit, donate_argnums=0)
    def steps(x, key, begin, stop):
        return jax.lax.fori_loop(begin, stop, lambda k, x: step(jax.random.fold_in(key, k), x), x)

    state = jnp.tile(jnp.asarray(task.start), (task.runs, 1)), 0

    def take(num_steps: int) -> None:
        nonlocal state
        x, begin = state
        state = jax.block_until_ready(steps(x, jax.random.key(0), begin, begin + num_steps)), begin + num_steps

    return Loop(take, lambda: np.asarray(state[0][0]))


def torchsde_paths(task: Task, noise_multiplier: float) -> Loop:
    """torchsde: `sdeint` with Euler and diagonal noise, dt = eta."""
    import torch  # pyright: ignore[reportMissingImports]
    import torchsde  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    h = torch.from_numpy(task.hessian_diag)
    eta, (std, _) = LEARNING_RATE, task.noise_stds(noise_multiplier)

    class Equation(torch.nn.Module):
        noise_type, sde_type = "diagonal", "ito"

        def f_and_g(self, t, x):  # both at once: the sign's share an erf
            if not task.sign:
                return -h * x, (eta**0.5 * std) * torch.ones_like(x)
            m = torch.erf(h * x * (1 / (2**0.5 * std)))
            return -m, (1 - m.square()).sqrt_().mul_(eta**0.5)

        def f(self, t, x):
            return self.f_and_g(t, x)[0]

        def g(self, t, x):
            return self.f_and_g(t, x)[1]

    equation, x = Equation(), torch.from_numpy(np.tile(task.start, (task.runs, 1)))

    def take(num_steps: int) -> None:
        nonlocal x
        with torch.no_grad():
            times = torch.tensor([0.0, eta * num_steps], dtype=torch.float64)
            x = torchsde.sdeint(equation, x, times, dt=eta, method="euler")[-1]

    return Loop(take, lambda: x[0].numpy())


def diffrax_paths(task: Task, noise_multiplier: float) -> Loop:
    """diffrax: Euler on an UnsafeBrownianPath, its fastest."""
    import diffrax  # pyright: ignore[reportMissingImports]
    import jax
    import jax.numpy as jnp
    import lineax  # pyright: ignore[reportMissingImports]

    h, eta, (std, _) = jnp.asarray(task.hessian_diag), LEARNING_RATE, task.noise_stds(noise_multiplier)

    def sign(x):
        return jax.scipy.special.erf(h * x / (2**0.5 * std))

    def drift(t, x, args):
        return -sign(x) if task.sign else -h * x

    def diffusion(t, x, args):
        spread = jnp.sqrt(1 - sign(x) ** 2) if task.sign else jnp.full_like(x, std)
        return lineax.DiagonalLinearOperator(eta**0.5 * spread)

    @jax.jit
    def steps(x, key, num_steps):
        path = diffrax.UnsafeBrownianPath(shape=x.shape, key=key)
        terms = diffrax.MultiTerm(diffrax.ODETerm(drift), diffrax.ControlTerm(diffusion, path))
        solution = diffrax.diffeqsolve(
            terms, diffrax.Euler(), 0.0, num_steps * eta, eta, x, max_steps=None, adjoint=diffrax.DirectAdjoint(),
            saveat=diffrax.SaveAt(t1=True), throw=False,
        )  # fmt: skip
        return solution.ys[0]

    x = jnp.tile(jnp.asarray(task.start), (task.runs, 1))

    def take(num_steps: int) -> None:
        nonlocal x
        x = jax.block_until_ready(steps(x, jax.random.key(0), num_steps))

    return Loop(take, lambda: np.asarray(x[0]))
