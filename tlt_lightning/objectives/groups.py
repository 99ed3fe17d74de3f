"""Statistics of the responses that answer the same prompt."""

import torch
from torch import Tensor

from tlt_lightning.objectives.numerics import upcast


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
    names, index = torch.unique(groups, return_inverse=True)
    members = index == torch.arange(len(names), device=groups.device)[:, None]  # (G, B)
    size = members.sum(-1)
    lowest = torch.where(members, rewards, torch.inf).amin(-1)
    shifted = rewards - lowest[index]
    mean = torch.where(members, shifted, 0.0).sum(-1) / size
    centred = shifted - mean[index]
    variance = torch.where(members, centred.square(), 0.0).sum(-1) / (size - 1).clamp(min=1)
    return centred, variance.sqrt()[index], size[index]
