"""The product's own policy: padded, packed and tree layouts give one gradient, in any micro-batch split, on either of its two ways."""

from __future__ import annotations

import pytest
import torch
from training_policies import group_of, lora_policy, turn

from sandmill.config.manifest import ImportanceLevel, LossScale, Parameters
from sandmill.models.policy import SharesPrefixes
from sandmill.training.batch import Layout, make_batch
from sandmill.training.learner import Learner, accumulate_gradient


@pytest.fixture(autouse=True)
def _one_thread():
    """Two threads over matrices this small wait for each other, on a busy machine for minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def shared_prompt_groups(count=2, size=6):
    """Replies of two kinds of token, so that siblings share more than the prompt."""
    generator = torch.Generator().manual_seed(2)

    def draw(low, high, length):
        return torch.randint(low, high, (length,), generator=generator).tolist()

    groups = []
    for number in range(count):
        prompt = draw(0, 23, 4 + number)
        members = []
        for index in range(size):
            turns = [turn(prompt, draw(0, 2, 1 + index), [-2.0] * (1 + index))]
            if index % 2:
                turns.append(turn(draw(0, 2, 2), draw(0, 23, 3), [-3.5] * 3))
            members.append((float(index % 3 == 0), turns))
        groups.append(group_of(f"g{number}", members))
    return groups


def gradient(policy, layout, size, loss, importance):
    for parameter in policy.trainable().values():
        parameter.grad = None
    parameters = Parameters(micro_batch_size=size, loss=loss, importance=importance, entropy_bonus=0.01)
    batch = make_batch(shared_prompt_groups(), parameters, policy_version=0)
    tally = accumulate_gradient(policy, batch, parameters, layout, policy_version=0)
    return tally.loss, torch.cat([parameter.grad.flatten() for parameter in policy.trainable().values()])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("loss", "importance"), [(LossScale.TOKEN, ImportanceLevel.TOKEN), (LossScale.SEQUENCE, ImportanceLevel.SEQUENCE)])
def test_every_layout_and_split_gives_the_same_gradient(fused, loss, importance):
    policy = lora_policy(torch.float32, fused=fused)
    whole_loss, whole = gradient(policy, Layout.PADDED, 64, loss, importance)
    assert whole.abs().max() > 1e-4
    for layout in Layout:
        for size in (1, 3, 64):
            other_loss, other = gradient(policy, layout, size, loss, importance)
            assert other_loss == pytest.approx(whole_loss, abs=1e-6)
            torch.testing.assert_close(other, whole, rtol=1e-3, atol=float(whole.abs().max()) * 1e-5)


def test_the_learner_shares_prefixes_where_the_policy_can():
    policy = lora_policy(torch.float32)
    assert isinstance(policy, SharesPrefixes)
    assert Learner(policy, Parameters()).layout is Layout.TREE


def test_a_tree_that_is_none_is_refused():
    policy = lora_policy(torch.float32)
    ids, select = torch.tensor([1, 2, 3]), torch.tensor([[False, False, True]])
    paths = torch.tensor([[0, 1, 2], [1, 0, 2]])
    with pytest.raises(ValueError, match="same position"):
        policy.score_tree(ids, paths, torch.tensor([3, 3]), select.expand(2, -1), 1.0)
    for wrong in ([[True, False, False]], [[False, False, True]]):
        with pytest.raises(ValueError, match="after a row's first token and before its end"):
            policy.score_tree(ids, torch.tensor([[0, 1, 1]]), torch.tensor([2]), torch.tensor(wrong), 1.0)
