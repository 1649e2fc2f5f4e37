import numpy as np
import pytest
import torch
from sampling_support import CPU, VOCAB, random_logits, rows_of, sample

from negamax.scheduler.step import GrammarBitmask, NewRow, StepPlan
from negamax.worker.grammar_bitmask import PendingBitmask, RowBitmasks
from negamax.worker.request_state import RequestState
from negamax.worker.sampler import BROKEN
from negamax.worker.separate_rows import _single_row

KINDS: tuple[dict[str, object], ...] = (
    {},
    {"top_k": 40, "top_p": 0.95},
    {"top_p": 0.9},
    {"temperature": 0.0},
    {"top_k": 5, "logprobs": 2},
    {"temperature": 0.0, "logprobs": 1},
    {"temperature": 0.0, "logit_bias": {3: 100.0}},
    {"temperature": 0.0, "frequency_penalty": 2.0, "repetition_penalty": 1.5},
    {"temperature": 0.0, "min_tokens": 4, "stop_token_ids": (300,)},
)
ALLOWED = (40, 41, 299, 300, 499)
EVERY = list(range(len(KINDS)))


def packed(*token_ids: int) -> bytes:
    bits = np.zeros(VOCAB, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def masks_for(members: list[int], *token_ids: int) -> RowBitmasks:
    one = torch.frombuffer(bytearray(packed(*token_ids)), dtype=torch.uint8)
    return RowBitmasks(members, one.repeat(len(members), 1))


both_ways = pytest.mark.parametrize("on_shards", [False, True])


@both_ways
@pytest.mark.parametrize("seed", range(5))
def test_every_kind_of_row_obeys_mask_and_allowed_tokens(on_shards: bool, seed: int) -> None:
    logits, masks = random_logits(len(KINDS), seed), masks_for(EVERY, *ALLOWED)
    drawn = sample(logits, rows_of(KINDS), masks, on_shards=on_shards)
    assert set(drawn.token_ids.tolist()) <= set(ALLOWED)
    allowing = rows_of(tuple(kind | {"allowed_token_ids": ALLOWED} for kind in KINDS))
    drawn = sample(logits, allowing, on_shards=on_shards)
    assert set(drawn.token_ids.tolist()) <= set(ALLOWED)
    assert drawn.token_ids[8] != 300  # Token 41 is the only allowed token, and very unlikely.
    logits[:, 41] = -500.0  # It is the only allowed token, and very unlikely.
    drawn = sample(logits, rows_of(KINDS), masks_for(EVERY, 41), on_shards=on_shards)
    assert drawn.token_ids.tolist() == [41] * len(KINDS)


@both_ways
def test_rows_without_a_mask_and_log_probabilities_ignore_masks(on_shards: bool) -> None:
    rows, logits, masked = rows_of(KINDS), random_logits(len(KINDS), 7), [0, 2, 5]
    plain, mixed = (
        sample(logits, rows, masks, on_shards=on_shards).token_ids
        for masks in (None, masks_for(masked, *ALLOWED))
    )
    assert all(mixed[row] == plain[row] for row in EVERY if row not in masked)
    assert set(mixed[masked].tolist()) <= set(ALLOWED)
    rows, logits = rows_of(KINDS), random_logits(len(KINDS), 8)
    drawn = sample(logits, rows, masks_for([4, 5], *ALLOWED), on_shards=on_shards)
    assert drawn.logprobs is not None and drawn.logprob_rows == [4, 5]
    expected = torch.log_softmax(logits, dim=-1)
    for row, entry in zip([4, 5], drawn.logprobs.read(), strict=True):
        assert entry.token_id in ALLOWED
        assert abs(entry.logprob - expected[row, entry.token_id].item()) < 1e-5
        assert entry.top_ids[0] == int(expected[row].argmax())


@both_ways
def test_a_mask_overrides_min_tokens_bias_and_broken_logits(on_shards: bool) -> None:
    rows, logits = rows_of(KINDS), random_logits(len(KINDS), 9)
    # min_tokens still forbids token 300, and the bias forces token 3.
    drawn = sample(logits, rows, masks_for([6, 8], 300), on_shards=on_shards)
    assert drawn.token_ids[[6, 8]].tolist() == [300, 300]
    rows = rows_of(({"min_tokens": 4, "stop_token_ids": (300,), "allowed_token_ids": (300, 1)},))
    assert sample(random_logits(1, 14), rows, on_shards=on_shards).token_ids.item() in (1, 300)
    rows, logits = rows_of(KINDS[:2]), random_logits(2, 11)
    logits[:, list(ALLOWED)] = float("nan")
    drawn = sample(logits, rows, masks_for([0, 1], *ALLOWED), on_shards=on_shards)
    assert drawn.token_ids.tolist() == [BROKEN] * 2


@both_ways
def test_allowed_tokens_are_drawn_as_from_logits_without_the_others(on_shards: bool) -> None:
    plain = tuple(kind for kind in KINDS if "logit_bias" not in kind and "min_tokens" not in kind)
    allowing = tuple(kind | {"allowed_token_ids": ALLOWED} for kind in plain)
    logits = random_logits(len(plain), 13)
    alone = torch.full_like(logits, -100.0)
    alone[:, list(ALLOWED)] = logits[:, list(ALLOWED)]
    expected = sample(alone, rows_of(plain), on_shards=on_shards)
    drawn = sample(logits, rows_of(allowing), on_shards=on_shards)
    assert drawn.token_ids.tolist() == expected.token_ids.tolist()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_each_rank_masks_its_own_shard_of_the_vocabulary(ranks: int) -> None:
    logits = random_logits(40, 12)
    members = [0, 3, 4, 39, *range(10, 38)]  # candidates in more than one tile
    masks = masks_for(members, *ALLOWED)
    whole = logits.clone()
    masks.apply(whole, first_id=0)
    for share in torch.arange(VOCAB).tensor_split(ranks):
        part = logits[:, share].clone()
        masks.apply(part, first_id=int(share[0]))
        assert torch.equal(part, whole[:, share])
    for row in range(40):
        finite = torch.nonzero(whole[row].isfinite()).flatten().tolist()
        assert finite == (list(ALLOWED) if row in members else list(range(VOCAB)))


def test_masks_are_waited_for_once_and_only_where_a_plan_has_masked_rows() -> None:
    waits = []

    def wait() -> GrammarBitmask:
        waits.append(1)
        return GrammarBitmask(5, [2, 0], [0, 1], [packed(7), packed(8)], [1])

    plan = StepPlan(5, [], [], [], [4, 5, 6], [1, 1, 1], [0, 0, 0], [True, False, True], [0, 2])
    rows = rows_of(KINDS)
    late = PendingBitmask.of_plan(plan, wait, vocab_size=VOCAB, requests=rows)
    assert waits == []
    masks = late.select([0, 2], device=CPU)  # These rows of the plan are sampled.
    assert masks is not None and masks.members == [0, 1]
    logits = random_logits(2, 1)
    masks.apply(logits, first_id=0)
    assert [row.argmax().item() for row in logits] == [8, 7]
    single = late.single(2).select([0], device=CPU)
    assert single is not None and single.packed.numpy().tobytes() == packed(7)
    assert late.single(1).select([0], device=CPU) is None
    assert late.postponed == [1]
    assert len(waits) == 1
    unmasked = StepPlan(6, [], [], [], [4], [1], [0], [True])
    none = PendingBitmask.of_plan(unmasked, wait, vocab_size=VOCAB, requests=rows)
    assert none.select([0], device=CPU) is None
    assert len(waits) == 1


def test_a_mask_of_another_vocabulary_fails_its_row_alone() -> None:
    plan = StepPlan(5, [], [], [], [0, 1], [1, 1], [0, 0], [True, True], [0, 1])
    rows = rows_of(KINDS[:2])
    frame = GrammarBitmask(5, [0, 1], [0, 1], [packed(7)[:-1], packed(8)])
    late = PendingBitmask.of_plan(plan, lambda: frame, vocab_size=VOCAB, requests=rows)
    masks = late.select([0, 1], device=CPU)
    assert masks is not None and masks.members == [1]
    assert list(rows.failures_of(plan.slots)) == [0]


def test_a_row_has_a_mask_for_each_of_its_samples_that_count() -> None:
    """Row 0 has three of four masks, the masks of row 1 are late, and row 2 has no grammar."""
    columns = [4, 3, 2], [3, 2, 1], [True] * 3, [0, 1, 2], 3
    plan = StepPlan(5, [], [], [], [4, 5, 6], *columns)
    frame = GrammarBitmask(5, [0, 0, 0], [1, -1, 0], [packed(7), packed(8)], [1])
    rows = rows_of(KINDS)
    late = PendingBitmask.of_plan(plan, lambda: frame, vocab_size=VOCAB, requests=rows)
    masks = late.select([0, 0, 0, 0, 1, 1, 1, 2, 2], device=CPU)
    assert masks is not None and masks.members == [0, 2]
    assert [mask.tobytes() for mask in masks.packed.numpy()] == [packed(8), packed(7)]
    drafts = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    assert late.drop_drafts(drafts, plan)
    assert drafts.tolist() == [[1, 2, -1], [-1, -1, -1], [7, 8, 9]]
    alone = late.single(0)
    drafts = torch.tensor([[1, 2, 3]])
    assert alone.drop_drafts(drafts, _single_row(plan, 0)) and drafts.tolist() == [[1, 2, -1]]
    frame = GrammarBitmask(5, [0] * 4, [0] * 4, [packed(7)])
    whole = PendingBitmask.of_plan(plan, lambda: frame, vocab_size=VOCAB, requests=rows)
    assert not whole.drop_drafts(drafts, plan)


# --- shards of the vocabulary ---------------------------------------------------------------------


ON_SHARDS = (
    {"top_k": 40, "top_p": 0.95},
    {"top_k": 3},
    {"top_p": 0.9},
    {"min_p": 0.2},
    {"temperature": 0.0},
    {"top_k": 5, "logprobs": 2},
    {"temperature": 0.0, "logit_bias": {3: 100.0}},
    {"temperature": 0.0, "frequency_penalty": 2.0, "repetition_penalty": 1.5},
    {"temperature": 0.0, "allowed_token_ids": tuple(range(100, 200))},
    {"top_k": 5, "logprobs": 2, "allowed_token_ids": (3, 250, 499)},
)


@pytest.mark.parametrize(
    "kinds",
    [ON_SHARDS, *((kind,) for kind in ON_SHARDS)],
    ids=["all", *map(str, range(len(ON_SHARDS)))],
)
def test_rows_with_parameters_get_token_of_all_logits(kinds: tuple[dict[str, object], ...]) -> None:
    rows, logits = rows_of(kinds), random_logits(len(kinds), 1)
    whole, sharded = (sample(logits, rows, on_shards=way) for way in (False, True))
    assert sharded.token_ids.tolist() == whole.token_ids.tolist()
    assert sharded.logprob_rows == whole.logprob_rows
    if whole.logprobs is not None and sharded.logprobs is not None:
        assert sharded.logprobs.read() == whole.logprobs.read()


def test_plain_rows_are_sampled_the_same_beside_others_and_broken_ones() -> None:
    logits = random_logits(2, 2)
    others = ({}, {"top_k": 40}, {"logprobs": 1}, {"logit_bias": {3: 1.0}})
    drawn = [sample(logits, rows_of(({}, other)), on_shards=True).token_ids for other in others]
    assert len({token_ids[0].item() for token_ids in drawn}) == 1
    rows = rows_of(({}, {"top_k": 40}, {"logprobs": 1, "top_k": 4}, {}))
    logits = random_logits(4, 3)
    logits[:3, 5] = float("nan")
    token_ids = sample(logits, rows, on_shards=True).token_ids
    assert token_ids[:3].tolist() == [BROKEN] * 3 and token_ids[3] != BROKEN


@both_ways
def test_a_row_that_cannot_be_edited_fails_alone(on_shards: bool) -> None:
    rows, logits = rows_of(({}, {"logit_bias": {VOCAB: 1.0}}, {"logprobs": 1})), random_logits(3, 4)
    sampled = sample(logits, rows, on_shards=on_shards)
    wanted = sample(logits, rows_of(({}, {}, {"logprobs": 1})), on_shards=on_shards)
    assert rows.failures_of([0, 1, 2]) == {1: "IndexError while this request was computed"}
    assert sampled.token_ids[[0, 2]].tolist() == wanted.token_ids[[0, 2]].tolist()


def test_row_that_was_not_filled_is_sampled_as_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_rows: RequestState, _row: NewRow) -> None:
        raise RuntimeError("not filled")

    monkeypatch.setattr(RequestState, "_fill", fail)
    rows = rows_of(({"top_k": 5, "top_p": 0.5, "min_p": 0.25},))
    assert rows.failures_of([0])
    assert rows.sampling[0].tolist() == [1.0, 5.0, 0.5, 0.25]
