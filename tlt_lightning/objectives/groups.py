"""Statistics of the responses that answer the same prompt."""

import torch
from torch import Tensor

from tlt_lightning.objectives.numerics import upcast


def _membership(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return each sequence's group counted from 0 (B,) and the table of members (G, B), bool."""
    names, index = torch.unique(groups, return_inverse=True)
    return index, index == torch.arange(len(names), device=groups.device)[:, None]


def _extremes(rewards: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lowest and the highest reward of each group, (G,) each."""
    lowest = torch.where(members, rewards, torch.inf).amin(-1)
    return lowest, torch.where(members, rewards, -torch.inf).amax(-1)


def group_statistics(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compare each reward with its group: what every critic-free baseline is made of.

    Sums go through a table and not through `index_add`, which is not deterministic on CUDA; rewards are taken
    relative to the lowest of the group, so that a group of equal rewards is centred to exactly zero.

    Args:
        rewards: One value per sequence. (B,)
        groups: Sequences with equal numbers answer the same prompt. (B,), int64

    Returns:
        For each sequence its reward minus the group's mean, the group's standard deviation (Bessel's correction; 0
        for a group of one), and the group's size. (B,) each
    """
    rewards = upcast(rewards)
    index, members = _membership(groups)
    size = members.sum(-1)
    lowest, _ = _extremes(rewards, members)
    shifted = rewards - lowest[index]
    mean = torch.where(members, shifted, 0.0).sum(-1) / size
    centred = shifted - mean[index]
    variance = torch.where(members, centred.square(), 0.0).sum(-1) / (size - 1).clamp(min=1)
    return centred, variance.sqrt()[index], size[index]


def groups_with_spread(rewards: Tensor, groups: Tensor) -> Tensor:
    """Tell which sequences carry a learning signal, for dynamic sampling (DAPO, arXiv 2503.14476, Eq. 11).

    Args:
        rewards: One value per sequence, before any overlong punishment. (B,)
        groups: Sequences with equal numbers answer the same prompt. (B,), int64

    Returns:
        True for the sequences whose group does not have one and the same reward throughout. (B,), bool

    Example:
        >>> groups_with_spread(torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([7, 7, 8, 8]))
        tensor([False, False,  True,  True])
    """
    index, members = _membership(groups)
    lowest, highest = _extremes(upcast(rewards), members)
    return (lowest < highest)[index]
