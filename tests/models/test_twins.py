"""Rows that hold the same bits are computed once, and rows that do not are never taken for each other."""

from __future__ import annotations

import random

import numpy as np
import torch

from sandmill.models.decoder import Chunk, decoder_for
from sandmill.models.twins import Histories


def _chunk(rows, tokens):
    counts = np.array([len(ids) for ids in tokens])
    ids = np.full((len(rows), int(counts.max())), 77)  # what stands behind a row's tokens is nobody's
    for row, own in enumerate(tokens):
        ids[row, : len(own)] = own
    return Chunk(np.array(rows), ids, counts)


def test_only_rows_with_the_same_chunks_are_twins():
    """Against the chunks themselves, over random extensions, copies of any length and emptied rows."""
    draw = random.Random(3)
    rows, context = 6, 24
    histories, chunks, lengths = Histories(rows, context), [() for _ in range(rows)], np.zeros(rows, np.int64)
    found = 0
    for _ in range(6000):
        row, other = draw.sample(range(rows), 2)
        if draw.random() < 0.1:
            lengths[row], chunks[row] = 0, ()
        elif draw.random() < 0.6 and lengths[other]:
            ends = np.cumsum([len(chunk) for chunk in chunks[other]]).tolist()
            kept = draw.randrange(len(ends)) + 1
            lengths[row], chunks[row] = ends[kept - 1], chunks[other][:kept]
            histories.copy(other, np.array([row]), int(lengths[row]))
        else:
            taken = [each for each in draw.sample(range(rows), 5) if lengths[each] <= context - 2]
            if not taken:
                continue
            tokens = [tuple(draw.randrange(2) for _ in range(draw.choice([1, 1, 2]))) for _ in taken]
            twins = histories.extend(_chunk(taken, tokens), lengths[taken])
            for each, ids in zip(taken, tokens, strict=True):
                chunks[each] += (ids,)
                lengths[each] += len(ids)
            for leader, each in zip(twins.leader_A.tolist(), taken, strict=True):
                assert chunks[taken[twins.leaders[leader]]] == chunks[each]
            found += len(taken) - len(twins.leaders)
    assert found > 100


def test_a_copy_that_ends_inside_a_chunk_is_no_twin_of_the_chunk_at_another_length():
    histories = Histories(3, 8)
    histories.extend(_chunk([0], [(5, 5, 5)]), np.array([0]))
    histories.copy(0, np.array([1]), 2)
    twins = histories.extend(_chunk([0, 1], [(5,), (5,)]), np.array([3, 2]))
    assert twins.leaders.tolist() == [0, 1]


def test_siblings_share_logits_until_they_part_and_keep_caches_of_their_own(random_model):
    model = random_model("Llama").model
    together = decoder_for(model, rows=4, context_length=64)
    together.extend([_chunk([0], [range(9)])])
    together.copy(0, np.array([1, 2, 3]), 9)
    first = together.extend([_chunk([0, 1, 2, 3], [(5,), (5,), (5,), (6,)])])
    assert first.of_A.tolist() == [0, 0, 0, 1]
    second = together.extend([_chunk([3, 2], [(7,), (7,)]), _chunk([0, 1], [(7, 8, 9), (7, 8)])])
    assert second.of_A.tolist() == [0, 1, 2, 3]
    third = together.extend([_chunk([0, 1, 2, 3], [(4,)] * 4)])
    for row, chunks in enumerate([[(5,), (7, 8, 9)], [(5,), (7, 8)], [(5,), (7,)], [(6,), (7,)]]):
        alone = decoder_for(model, rows=1, context_length=64)
        for ids in (range(9), *chunks):
            alone.extend([_chunk([0], [ids])])
        assert torch.equal(alone.extend([_chunk([0], [(4,)])]).distinct_DV[0], third.distinct_DV[third.of_A[row]])
