"""How near the logits of one reading are to those of another: what the bench and the yardstick measure with."""

from __future__ import annotations

import torch


def agreement(full: torch.Tensor, other: torch.Tensor) -> dict[str, float]:
    """How near the logits ``other`` are to ``full``, both [tokens, vocab]: KL(full || other) and equal best tokens."""
    p, q = (torch.log_softmax(logits.double(), dim=-1) for logits in (full, other))
    divergence = (p.exp() * (p - q)).sum(dim=-1)  # [tokens]
    same = (full.argmax(dim=-1) == other.argmax(dim=-1)).double()  # [tokens]
    return {
        "kl": float(divergence.mean()),
        "first_kl": float(divergence[0]),
        "top1": float(same.mean()),
        "all_top1": float(same.min()),
    }


def harm(full: torch.Tensor, other: torch.Tensor, *, margin: float = 0.5) -> dict[str, float]:
    """What the other best tokens cost, both [tokens, vocab]: regret, and decisive flips.

    Regret is the log-probability of the full reading's best token less that of the other's best, under the full
    reading, as a mean. A flip is decisive where the full reading's best token leads by more than ``margin`` nats.
    """
    p = torch.log_softmax(full.double(), dim=-1)
    best, second = p.topk(2, dim=-1).values.unbind(-1)  # [tokens] each
    chosen = other.argmax(dim=-1)
    regret = best - p.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
    clear = best - second > margin
    flips = clear & (chosen != full.argmax(dim=-1))
    return {
        "regret": float(regret.mean()),
        "decisive": int(clear.sum()),
        "decisive_flips": int(flips.sum()),
        "decisive_share": float(flips.double().mean()),
    }
