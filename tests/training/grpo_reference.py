"""An independent float64 reference of one training step on a bigram table: loss and gradient by hand, in numpy, without autograd.

Written from the papers: GRPO arXiv:2402.03300, Dr. GRPO arXiv:2503.20783, RLOO arXiv:2402.14740, DAPO arXiv:2503.14476,
GSPO arXiv:2507.18071.
"""

from __future__ import annotations

import numpy as np

STD_FLOOR = 1e-4


def reference_advantages(rewards, scale, min_size):
    """One entry per reward; None outside baseline and gradient."""
    known = np.array([r for r in rewards if r is not None], dtype=np.float64)
    n = len(known)
    if n < min_size:
        return [None] * len(rewards)
    out = []
    for r in rewards:
        if r is None:
            out.append(None)
        elif len(set(known.tolist())) == 1:
            out.append(0.0)
        elif scale == "leave-one-out":
            out.append(float(n / (n - 1) * (r - known.mean())))
        elif scale == "mean":
            out.append(float(r - known.mean()))
        else:
            out.append(float((r - known.mean()) / max(known.std(), STD_FLOOR)))
    return out


def _steps(episode):
    """(previous token, token, sampling log-probability) of every sampled token."""
    history, steps = [], []
    for t in episode.trajectory.turns:
        history.extend(t.context_ids)
        for token, logprob in zip(t.token_ids, t.logprobs, strict=True):
            steps.append((history[-1], token, logprob))
            history.append(token)
    return steps


def reference_step(table, groups, p):
    """Loss and its gradient with respect to `table`, for Parameters `p`."""
    kept = []
    for g in groups:
        advantages = reference_advantages([e.reward for e in g.episodes], p.advantage.value, p.min_group_size)
        constant = len({e.reward for e in g.episodes if e.reward is not None}) < 2
        kept += [(_steps(e), a, constant) for e, a in zip(g.episodes, advantages, strict=True) if a is not None]
    all_tokens = sum(len(s) for s, _, _ in kept)
    loss, gradient = 0.0, np.zeros_like(table)
    for steps, advantage, constant in kept:
        if not steps or constant:
            continue
        divisor = {
            "token": all_tokens,
            "sequence": len(kept) * len(steps),
            "constant": len(kept) * p.max_completion_length * p.max_turns,
        }[p.loss.value]
        row_loss, row_gradient = _row(table, steps, advantage, p)
        loss += row_loss / divisor
        gradient += row_gradient / divisor
    return loss, gradient


def _row(table, steps, advantage, p):
    temperature = p.sampling.temperature
    new, probabilities, entropies = [], [], []
    for previous, token, _ in steps:
        z = table[previous] / temperature
        z = z - z.max()
        q = np.exp(z) / np.exp(z).sum()
        probabilities.append(q)
        new.append(np.log(q[token]))
        entropies.append(-(q * np.log(q)).sum())
    differences = np.array(new) - np.array([old for _, _, old in steps])
    sequence = p.importance.value == "sequence"
    ratios = np.full(len(steps), np.exp(differences.mean())) if sequence else np.exp(differences)
    plain = ratios * advantage
    bounded = np.clip(ratios, 1 - p.clip_low, 1 + p.clip_high) * advantage
    loss = -np.minimum(plain, bounded).sum() - p.entropy_bonus * np.sum(entropies)
    # d(objective)/d(new log-probability of token k): the ratio is its own derivative where min takes the unclipped branch
    slope = np.where(plain <= bounded, plain, 0.0)
    if sequence:
        slope = np.full(len(steps), slope.sum() / len(steps))
    gradient = np.zeros_like(table)
    for (previous, token, _), q, s, h in zip(steps, probabilities, slope, entropies, strict=True):
        onehot = np.zeros(table.shape[1])
        onehot[token] = 1.0
        gradient[previous] -= s * (onehot - q) / temperature
        gradient[previous] -= p.entropy_bonus * (-q * (np.log(q) + h)) / temperature
    return loss, gradient
