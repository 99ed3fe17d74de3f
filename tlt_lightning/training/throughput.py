"""Measure how much of its devices an update uses."""

import warnings
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from torch import Tensor, nn

from tlt_lightning.engine.architectures import head_size
from tlt_lightning.metrics import IterationLog
from tlt_lightning.policy import causal_lm
from tlt_lightning.rollout import RolloutBatch

DENSE_FLOPS = {"NVIDIA H200": 989e12, "NVIDIA H200 NVL": 835e12, "NVIDIA H100 NVL": 835e12, "NVIDIA B200": 2250e12}
"""Peaks in bfloat16, from NVIDIA's data sheets, of devices that Lightning lacks or gives with sparsity."""


def train_flops(model: nn.Module, lengths: Tensor, num_predicted: Tensor) -> Tensor:
    """Count the floating-point operations of a model's forward and backward pass.

    A weight of a matrix takes 6 a token: 2 forward, 2 for the gradient of its input, and 2 for its own, which frozen
    weights under LoRA have not. Attention takes 12 * layers * heads * head size * S in a sequence of S tokens, with the
    masked half and without regard to windows (PaLM, arXiv 2204.02311, appendix B). The output head meets predicted
    tokens alone, an expert the tokens that are routed to it. Nothing is counted for embeddings and what is recomputed.

    Args:
        model: The policy, or a critic's trunk with its unused head.
        lengths: Tokens of each sequence. (B,), int64
        num_predicted: Tokens that the output head meets.
    """
    network = causal_lm(model)
    config = network.config.get_text_config()
    head, embedding = network.get_output_embeddings().weight, network.get_input_embeddings().weight
    routed = getattr(config, "num_experts_per_tok", 0) / (
        getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
    )
    per_token = sum(
        _per_use(weight) * (routed if ".experts." in name else 1.0)
        for name, weight in network.named_parameters()
        if weight.dim() > 1 and weight is not head and weight is not embedding
    )
    attention = 12.0 * config.num_hidden_layers * config.num_attention_heads * head_size(config)
    squares = lengths.double().square().sum()
    return per_token * lengths.sum() + _per_use(head) * num_predicted + attention * squares


def _per_use(weight: Tensor) -> float:
    return (6.0 if weight.requires_grad else 4.0) * weight.numel()


def log_work(log: IterationLog, models: Sequence[nn.Module], batch: Sequence[RolloutBatch]) -> None:
    """Log the passes, tokens and operations of an optimizer step on this rank.

    Args:
        log: Takes them.
        models: What the step trains: the policy, which alone predicts tokens, and a critic's own trunk.
        batch: The step's micro-batches.
    """
    lengths = torch.cat([part.lengths for part in batch])
    num_predicted = torch.stack([part.response_mask.count_nonzero() for part in batch]).sum()
    flops = [train_flops(model, lengths, num_predicted * (model is models[0])) for model in models]
    log.mean("train/passes", len(batch))
    log.sum("train/tokens", lengths.sum())
    log.sum("train/tflop", torch.stack(flops).sum() / 1e12)


def utilisation(metrics: Mapping[str, float], num_devices: int, peak: float | None) -> dict[str, float]:
    """Return an iteration's tokens a second in the update, and its MFU, from its metrics.

    Args:
        metrics: The iteration's metrics, over all ranks.
        num_devices: Ranks.
        peak: Operations a second that a device can do; None if nobody knows.
    """
    seconds = metrics.get("time/update", 0.0) * num_devices
    if not seconds or "train/tokens" not in metrics:
        return {}
    results = {"train/tokens_per_s": metrics["train/tokens"] / seconds}
    if peak is not None:
        results["train/mfu"] = 1e12 * metrics["train/tflop"] / (seconds * peak)
    return results


@cache
def peak_flops(device: torch.device) -> float | None:
    """Return the dense operations a second of a GPU in bfloat16; None for other devices and unknown ones."""
    if device.type != "cuda":
        return None
    if known := DENSE_FLOPS.get(torch.cuda.get_device_name(device)):
        return known
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a device that it does not know
        return get_available_flops(device, torch.bfloat16)
