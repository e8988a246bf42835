"""Expectations of multi-output examples against plain Monte Carlo and against derivatives."""

import math

import numpy as np
import pytest

from noisecast.theory.softmax_moments import (
    INDEPENDENT_OUTPUTS,
    MEAN_OF_OUTPUTS,
    SOFTMAX_OUTPUTS,
    Nodes,
    expected_labels_in_top,
    output_expectations,
    probability_of_likeliest,
)

SEED = 670_001
LAWS = {"softmax": SOFTMAX_OUTPUTS, "multi-label": INDEPENDENT_OUTPUTS, "multi-label mean": MEAN_OF_OUTPUTS}
N, M = 2000, 5  # one kind of example, many times: their nodes differ, so that means over them are nearly exact


def an_example(law, *, std=1.2):
    mean = np.array([0.5, -1.0, 0.2, 1.5, 0.0])
    targets = np.array([0.0, 0.0, 1.0, 0.0, 0.0 if law.is_coupled else 1.0])
    return mean, np.full(M, std**2), targets


def many(law, bound, *, std=1.2, mean_shift=0.0):
    mean, variance, targets = (np.tile(part, (N, 1)) for part in an_example(law, std=std))
    return output_expectations(law, mean + mean_shift, variance, targets, np.full(N, bound), Nodes(N, M, num_nodes=128))


def sampled(law, bound, *, std=1.2, count=400_000):
    """Residuals, losses and whether they are clipped, written down anew."""
    mean, _, targets = an_example(law)
    half = std * np.random.default_rng(SEED).standard_normal((count // 2, M))
    z = mean + np.concatenate([half, -half])  # pairs: Stein's quotient does not feel the mean
    if law.is_coupled:
        p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
        loss = -np.log(p[:, targets == 1][:, 0])
    else:
        p = 1 / (1 + np.exp(-z))
        loss = -np.log(np.where(targets == 1, p, 1 - p)).sum(axis=1)
    scale = law.scale(M)
    r = scale * (p - targets)
    length = np.linalg.norm(r, axis=1)
    return z - mean, r * np.minimum(1, bound / length)[:, None], scale * loss, length > bound


@pytest.mark.parametrize("share", [0.6, 0.9, math.inf])
@pytest.mark.parametrize("name", LAWS)
def test_expectations_are_those_of_samples(name, share):
    """Within 1 % of the largest; logits 10 % more spread are seen."""
    law = LAWS[name]
    bound = share * law.scale(M)
    moved, clipped, loss, is_clipped = sampled(law, bound)
    wanted = {
        "residual": clipped.mean(axis=0),
        "squared_residual": (clipped**2).mean(axis=0),
        "slope": (moved * clipped).mean(axis=0) / 1.2**2,  # Stein
        "loss": loss.mean(),
        "clip_fraction": is_clipped.mean(),
    }

    def worst(found):
        return {
            key: float(np.abs(getattr(found, key).mean(axis=0) - value).max() / max(np.abs(value).max(), 1e-12))
            for key, value in wanted.items()
        }

    gaps, control = worst(many(law, bound)), worst(many(law, bound, std=1.32))
    print(f"\n{name}, {share}: {gaps}")
    assert max(gaps.values()) < 0.01
    assert control["loss"] > 0.01 and control["slope"] > 0.01


@pytest.mark.parametrize("name", LAWS)
def test_sure_logits_are_a_plain_derivative(name):
    """Without spread and clipping, curve is the Jacobian of the residual."""
    law = LAWS[name]
    mean, _, targets = (part[None] for part in an_example(law))
    direction = np.random.default_rng(SEED).standard_normal((1, M)).astype(np.float32)

    def residual(at):
        return output_expectations(law, at, 0 * at, targets, np.array([math.inf]), Nodes(1, M))

    numeric = (residual(mean + 0.01 * direction).residual - residual(mean - 0.01 * direction).residual) / 0.02
    assert np.allclose(residual(mean).curve(direction), numeric, atol=1e-3 * law.scale(M))
    assert not np.allclose(residual(mean + 0.3).curve(1.05 * direction), numeric, atol=1e-3 * law.scale(M))


def test_clipping_takes_the_curvature_along_the_residual_away():
    """Two classes: a clipped residual has one direction and one length, so nothing is left."""
    mean, targets = np.zeros((1, 2)), np.eye(2)[:1]
    found = output_expectations(SOFTMAX_OUTPUTS, mean, 0 * mean, targets, np.array([0.1]), Nodes(1, 2))
    assert np.abs(found.curve(np.array([[1.0, -1.0]]))).max() < 1e-6
    assert np.abs(found.slope).max() < 1e-6


def test_accuracy_and_labels_in_the_top_are_those_of_samples():
    mean, variance, targets = an_example(INDEPENDENT_OUTPUTS)
    z = mean + 1.2 * np.random.default_rng(SEED).standard_normal((400_000, M))
    means, variances, wanted_labels = (np.tile(part, (N, 1)) for part in (mean, variance, targets))
    right = probability_of_likeliest(means, variances, np.full(N, 2), Nodes(N, M)).mean()
    assert right == pytest.approx((z.argmax(axis=1) == 2).mean(), abs=0.004)
    top = expected_labels_in_top(means, variances, wanted_labels, Nodes(N, M), top=2).mean()
    wanted = ((np.argsort(-z, axis=1)[:, :2, None] == np.flatnonzero(targets)).any(axis=1)).sum(axis=1).mean()
    assert top == pytest.approx(wanted, abs=0.008)
    assert abs(expected_labels_in_top(means, variances, wanted_labels, Nodes(N, M), top=3).mean() - wanted) > 0.1
