"""The policy gradient: advantages within groups, the clipped surrogate, distances to a reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class RunningStats:
    """Mean and spread of each prompt's rewards over a whole run. Immutable: `add` returns the next one.

    Attributes:
        moments: prompt -> (count, mean, sum of squared distances from the mean).
    """

    moments: Mapping[int, tuple[int, float, float]] = field(default_factory=dict)

    def add(self, rewards: Tensor, group: Tensor) -> RunningStats:
        """These statistics with the finite ones of rewards [N], of the prompts `group` [N], taken in."""
        moments = dict(self.moments)
        scored = rewards.isfinite()
        for prompt in sorted(set(group[scored].tolist())):
            r = rewards[scored & (group == prompt)].double()
            n, mean = len(r), float(r.mean())
            squares = float(((r - mean) ** 2).sum())
            n0, mean0, squares0 = moments.get(prompt, (0, 0.0, 0.0))
            # Two sets of moments join exactly (Chan, Golub and LeVeque 1983).
            apart = mean - mean0
            both = n0 + n
            moments[prompt] = (both, mean0 + apart * n / both, squares0 + squares + apart**2 * n0 * n / both)
        return RunningStats(moments)

    def of(self, prompt: int) -> tuple[float, float]:
        """Mean and population std of one prompt's rewards so far."""
        n, mean, squares = self.moments[prompt]
        return mean, float((squares / n) ** 0.5)

    def state(self) -> dict[str, list[float]]:
        """Plain lists, fit for JSON; `RunningStats.load` gives the same statistics, bit for bit."""
        rows = [(prompt, *self.moments[prompt]) for prompt in sorted(self.moments)]
        names = ("prompt", "count", "mean", "squares")
        return {name: [row[i] for row in rows] for i, name in enumerate(names)}

    @classmethod
    def load(cls, state: Mapping[str, Sequence[float]]) -> RunningStats:
        """The statistics that `state()` wrote."""
        rows = zip(state["prompt"], state["count"], state["mean"], state["squares"], strict=True)
        return cls({int(p): (int(n), float(mean), float(squares)) for p, n, mean, squares in rows})


@dataclass(frozen=True)
class Advantages:
    """What `group_advantage` found.

    Attributes:
        values: the advantages [N], 0 where `used` is False.
        used: bool [N]: scored, and in a group with spread. The others teach nothing and may be dropped.
        zero_spread: the groups without spread, ascending int64 [Z]: all rewards equal, or fewer than two.
        groups: how many groups there were.
        history: the run's statistics with these rewards taken in; None when none were given.
    """

    values: Tensor
    used: Tensor
    zero_spread: Tensor
    groups: int
    history: RunningStats | None

    @property
    def frac_zero_std(self) -> float:
        """The share of groups without spread, in [0, 1]."""
        return len(self.zero_spread) / max(self.groups, 1)


def group_advantage(
    rewards: Tensor,
    group: Tensor,
    *,
    std: Literal["group", "global"] = "group",
    eps: float = 1e-4,
    clip: float | None = None,
    history: RunningStats | None = None,
) -> Advantages:
    """How much better each sample did than its group, (r - mean) / (std + eps), with the population std.

    A group is the samples of one prompt index in one round. `std: global` divides by the std of all scored
    rewards of the round. With `history` the mean (and the std of `group`) are those of all rounds, this one
    included; pass on `Advantages.history` in the next round. A reward that is not finite leaves its group. A
    group whose scored rewards are all equal, or that has fewer than two, gets 0. Computed in float64, so
    that equal float32 rewards give no noise; returned in the dtype of the rewards (GRPO, arXiv:2402.03300;
    Flow-GRPO, arXiv:2505.05470).

    Args:
        rewards: [N], nan marks 'could not be scored'.
        group: int64 [N].
        std: whose std to divide by.
        eps: added to the std.
        clip: advantages are clamped to +-clip.
        history: running statistics per group, or None for this round alone.

    Raises:
        ValueError: when the shapes differ or `std` is unknown.
    """
    if rewards.ndim != 1 or rewards.shape != group.shape:
        raise ValueError(f"rewards and group must both be [N]: {list(rewards.shape)}, {list(group.shape)}")
    if std not in ("group", "global"):
        raise ValueError(f"std must be group or global, not {std!r}")
    r = rewards.detach().double()
    scored = r.isfinite()
    run = None if history is None else history.add(r, group)
    spread_of_all = _population_std(r[scored])
    values, used = torch.zeros_like(r), torch.zeros_like(scored)
    ids = sorted(set(group.tolist()))
    zero_spread = []
    for prompt in ids:
        members = scored & (group == prompt)
        own = r[members]
        if len(own) < 2 or own.max() == own.min():
            zero_spread.append(prompt)
            continue
        mean, spread = (float(own.mean()), _population_std(own)) if run is None else run.of(prompt)
        values[members] = (own - mean) / ((spread_of_all if std == "global" else spread) + eps)
        used |= members
    if clip is not None:
        values = values.clamp(-clip, clip)
    lost = torch.tensor(zero_spread, dtype=torch.int64, device=group.device)
    return Advantages(values.to(rewards.dtype), used, lost, len(ids), run)


def surrogate(logp_new: Tensor, logp_old: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """PPO's clipped loss, unreduced: max(-A ratio, -A clamp(ratio, 1 - clip, 1 + clip)) (arXiv:1707.06347).

    All tensors have one shape, such as [B]; the gradient flows through logp_new, and where ratio is 1 it is
    that of REINFORCE, -A grad logp_new.
    """
    ratio = (logp_new - logp_old).exp()
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip))


class Move(NamedTuple):
    """What a policy says of one step: the tensors that the distances in `KLS` compare.

    v and mean are [B, ...]; std (of the law) and g (`laws.rate`) broadcast against them.
    """

    v: Tensor
    mean: Tensor
    std: Tensor
    g: Tensor


def kl_path(mu: Tensor, mu_ref: Tensor, g: Tensor) -> Tensor:
    """Distance [B] as the Flow-GRPO code has it: mean (mu - mu_ref)^2 / (2 g^2), with g = std / sqrt(-dt)."""
    return _per_sample((mu - mu_ref) ** 2 / (2 * g**2))


def kl_exact(mu: Tensor, mu_ref: Tensor, std: Tensor) -> Tensor:
    """The KL divergence of two Gaussians of one std, per dim: mean (mu - mu_ref)^2 / (2 std^2), [B]."""
    return _per_sample((mu - mu_ref) ** 2 / (2 * std**2))


def kl_velocity(v: Tensor, v_ref: Tensor) -> Tensor:
    """Distance [B] of the velocities themselves: mean (v - v_ref)^2. Weighs all times alike."""
    return _per_sample((v - v_ref) ** 2)


KLS: dict[str, Callable[[Move, Move], Tensor]] = {
    "path": lambda new, ref: kl_path(new.mean, ref.mean, new.g),
    "exact": lambda new, ref: kl_exact(new.mean, ref.mean, new.std),
    "velocity": lambda new, ref: kl_velocity(new.v, ref.v),
}


class ClipStats(NamedTuple):
    """Shares of samples, 0-dim tensors in [0, 1], whose gradient the clip cut off.

    low: ratio below 1 - clip with A < 0; high: ratio above 1 + clip with A > 0 (TRL's clip_ratio/low_mean and
    clip_ratio/high_mean).
    """

    low: Tensor
    high: Tensor


@torch.no_grad()
def clip_stats(logp_new: Tensor, logp_old: Tensor, advantage: Tensor, clip: float) -> ClipStats:
    """Count what `surrogate` clips; same arguments, no gradient."""
    ratio = (logp_new - logp_old).exp()
    low = (ratio < 1 - clip) & (advantage < 0)
    high = (ratio > 1 + clip) & (advantage > 0)
    return ClipStats(low.to(ratio.dtype).mean(), high.to(ratio.dtype).mean())


@torch.no_grad()
def approx_kl(logp_new: Tensor, logp_old: Tensor) -> Tensor:
    """Estimate of the KL divergence between old and new policy: mean (logp_new - logp_old)^2 / 2, 0-dim."""
    return ((logp_new - logp_old) ** 2).mean() / 2


def _population_std(r: Tensor) -> float:
    """Std [N] -> number, dividing by N; 0 of nothing."""
    return float(((r - r.mean()) ** 2).mean().sqrt()) if len(r) else 0.0


def _per_sample(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1).mean(1)
