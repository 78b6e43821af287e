"""Weights that differ in every element."""

from __future__ import annotations

import torch


def disturb(model: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Change every element of every parameter by at least 1e-2; return name → parameter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.05
            parameter.add_(noise + torch.sign(noise) * 1e-2)
    return dict(model.named_parameters())
