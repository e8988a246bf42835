"""Measure a PyTorch model, take advice for a smaller budget, train with Opacus and DPSignSGD, check its epsilon.

The data (scikit-learn's digits) are public; on private data the numbers marked non-private must not be published.

    python examples/opacus_advice.py
"""

import warnings

import torch
from opacus import PrivacyEngine
from torch.utils.data import DataLoader, TensorDataset

import noisecast as nc
from noisecast.opacus import DPSignSGD, advise, measure, mechanism_of, poisson_sampler, privacy_spent

NUM_STEPS, TARGET_DELTA, L2_CLIP_NORM = 300, 1e-4, 1.0
warnings.filterwarnings("ignore", message="Secure RNG")  # research grade; a release wants secure_mode
warnings.filterwarnings("ignore", message="Full backward hook")


def digits() -> tuple[TensorDataset, TensorDataset]:
    train, test = (
        TensorDataset(torch.tensor(data.features), torch.tensor(data.labels).long()) for data in nc.bundled("digits")
    )
    return train, test


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))


def accuracy(module: torch.nn.Module, data: TensorDataset) -> float:
    x, y = data.tensors
    with torch.no_grad():
        return float((module(x).argmax(dim=1) == y).float().mean())


def main() -> dict[str, float]:
    train, test = digits()
    module, loss_fn = network(), torch.nn.CrossEntropyLoss()
    loader = DataLoader(train, batch_size=128, shuffle=True)

    seen = measure(module, loss_fn, loader, l2_clip_norm=L2_CLIP_NORM)
    low, median, high = seen.non_private_quantiles(0.1, 0.5, 0.9)
    print(f"{seen.num_params} parameters; gradient norms {low:.2f} to {high:.2f}, median {median:.2f} (non-private);")
    print(f"a clip at {L2_CLIP_NORM} shortens {seen.non_private_share_clipped():.0%} of them (non-private).\n")

    # Both learning rates are the best of a grid (factors of sqrt 2, three runs each) at epsilon 8; the budget is now 1.
    def mechanism_for(epsilon: float) -> nc.SampledGaussian:
        plan = nc.SampledGaussian(noise_multiplier=0.0, l2_clip_norm=L2_CLIP_NORM, sampler=poisson_sampler(loader))
        return nc.calibrate_noise_multiplier(
            plan, target_epsilon=epsilon, target_delta=TARGET_DELTA, num_steps=NUM_STEPS
        )

    tuned = [nc.DPSGD(learning_rate=2.0), nc.DPSignSGD(learning_rate=0.02)]
    advice = advise(
        seen, mechanism_for(8.0), optimizers=tuned, num_steps=NUM_STEPS, target_epsilons=[1.0],
        target_delta=TARGET_DELTA,
    )  # fmt: skip
    at_one = advice.epsilons[0]
    print("Advice for epsilon 1:", *at_one.sentences, *advice.unknown, sep="\n- ", end="\n\n")
    learning_rate = next(o.retuned.learning_rate for o in at_one.optimizers if o.name == "DP-SignSGD" and o.retuned)

    engine = PrivacyEngine(accountant="prv")
    private_module, optimizer, private_loader = engine.make_private(
        module=module, optimizer=DPSignSGD(module.parameters(), lr=learning_rate), data_loader=loader,
        noise_multiplier=at_one.noise_multiplier, max_grad_norm=L2_CLIP_NORM,
    )  # fmt: skip
    for _ in range(NUM_STEPS // len(private_loader)):
        for x, y in private_loader:
            optimizer.zero_grad()
            loss_fn(private_module(x), y).backward()
            optimizer.step()

    print(mechanism_of(optimizer, private_loader).where_is_the_noise())
    spent = privacy_spent(engine, optimizer, private_loader, target_delta=TARGET_DELTA)
    theirs = engine.get_epsilon(TARGET_DELTA)
    found = accuracy(module, test)
    print(
        f"\nepsilon {spent.epsilon:.4f} (noisecast, {spent.accountant}), {theirs:.4f} (Opacus, PRV) at {TARGET_DELTA}"
    )
    print(f"accuracy on the test digits {found:.1%} (non-private)")
    return {"epsilon": spent.epsilon, "epsilon_opacus": theirs, "accuracy": found, "learning_rate": learning_rate}


if __name__ == "__main__":
    main()
