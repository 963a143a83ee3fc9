"""The training forward's own gradients: right, and the same bits every time."""

from __future__ import annotations

import torch
from torch.nn import functional

from sandmill.config.manifest import LoraSection
from sandmill.models import llama_forward
from sandmill.models.llama_forward import Layout
from sandmill.models.lora_policy import LoraPolicy


def test_tokens_that_lie_in_many_rows_get_the_same_gradient_every_time_on_two_threads():
    """Plain indexing adds with two threads in whatever order they come: 14 different sums in 40 tries."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    rows, shared, own = 16, 40, 50
    paths = torch.cat([torch.arange(shared).expand(rows, -1), shared + torch.arange(rows * own).view(rows, own)], 1)
    layout = Layout.tree(shared + rows * own, paths, torch.full((rows,), shared + own))
    x, g = torch.randn(shared + rows * own, 768, requires_grad=True), torch.randn(rows, shared + own, 768)
    [first] = torch.autograd.grad(layout.to_rows(x), x, g)
    torch.testing.assert_close(first[:shared], g[:, :shared].sum(0))
    for _ in range(20):
        assert torch.equal(torch.autograd.grad(layout.to_rows(x), x, g)[0], first)


def test_the_gate_has_its_gradient():
    z = torch.randn(5, 24, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(llama_forward._gated(z), functional.silu(z[:, :12]) * z[:, 12:])
    assert torch.autograd.gradcheck(llama_forward._gated, (z,))


def test_the_norm_has_its_gradient():
    x = torch.randn(5, 24, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(llama_forward._norm(x, 1e-2), functional.rms_norm(x, (24,), eps=1e-2))
    assert torch.autograd.gradcheck(lambda x: llama_forward._norm(x, 1e-2), (x,))


def test_targets_that_share_a_context_share_its_distribution():
    """Twice with a target of their own, once not at all; both outputs and their gradients."""
    logits = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    of, targets = torch.tensor([0, 2, 0, 0, 2]), torch.tensor([1, 6, 1, 3, 0])
    logprobs, entropies = llama_forward._Distribution.apply(logits, of, targets)
    plain = functional.log_softmax(logits, -1)
    torch.testing.assert_close(logprobs, plain[of, targets])
    torch.testing.assert_close(entropies, -(plain.exp() * plain).sum(-1)[of])
    for output in (0, 1):
        assert torch.autograd.gradcheck(lambda z, output=output: llama_forward._Distribution.apply(z, of, targets)[output], (logits,))
    assert torch.autograd.gradcheck(lambda z: llama_forward._Distribution.apply(z, of, targets), (logits,))


def test_chunks_of_the_head_give_what_the_whole_gives(monkeypatch, random_model):
    policy = LoraPolicy(random_model("Llama"), LoraSection(r=4), seed=0)
    ids = torch.randint(4, 90, (3, 9), generator=torch.Generator().manual_seed(1))
    select = torch.rand(3, 9, generator=torch.Generator().manual_seed(2)) < 0.6
    select[:, 0] = False
    lengths = torch.full((3,), 9)

    def result():
        for parameter in policy.trainable().values():
            parameter.grad = None
        scored = policy.score(ids, lengths, select, 0.7)
        (scored.logprobs_K.sum() + scored.entropies_K.square().sum()).backward()
        return [scored.logprobs_K.detach(), scored.entropies_K.detach(), *(parameter.grad for parameter in policy.trainable().values())]

    whole = result()
    monkeypatch.setattr(llama_forward, "_HEAD_CHUNK", 4 * 100)
    for one, other in zip(result(), whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
