"""Compute placements of a layer's experts on ranks, and moves between placements.

A placement lists the expert in each slot; a slot stores the weights of one expert. Every rank has
the same number of consecutive slots. An expert's tokens are split evenly over its copies.
"""

import heapq
from collections import Counter
from collections.abc import Sequence

Slots = Sequence[int]  # index of the expert in each slot


def rank_loads(loads: Sequence[int], slots: Slots, num_ranks: int) -> list[float]:
    """Return how many tokens each rank computes. `loads`: number of tokens of each expert."""
    copies, per_rank = Counter(slots), len(slots) // num_ranks
    shares = [loads[expert] / copies[expert] for expert in slots]
    return [sum(shares[at : at + per_rank]) for at in range(0, len(slots), per_rank)]


def best_placement(loads: Sequence[int], current: Slots, num_ranks: int) -> list[int]:
    """Return the placement whose busiest rank has the least load. The candidates are `current`, a
    packed placement near `current`, and the experts in index order. In a tie, `current` wins.
    """
    num_slots = len(current)
    packed = pack(loads, copies_of(loads, num_slots, num_ranks), num_ranks)
    in_order = [slot % len(loads) for slot in range(num_slots)]
    possible = [list(current), keep_in_place(packed, current, num_ranks), in_order]
    return min(possible, key=lambda slots: max(rank_loads(loads, slots, num_ranks)))


def copies_of(loads: Sequence[int], num_slots: int, num_ranks: int) -> list[int]:
    """Return the number of copies of each expert, 1 to `num_ranks`, by the load of the expert."""
    copies = [1] * len(loads)
    heaviest = [(-float(load), expert) for expert, load in enumerate(loads)]
    heapq.heapify(heaviest)
    for _ in range(num_slots - len(loads)):
        _, expert = heapq.heappop(heaviest)
        copies[expert] += 1
        if copies[expert] < num_ranks:
            heapq.heappush(heaviest, (-loads[expert] / copies[expert], expert))
    return copies


def pack(loads: Sequence[int], copies: Sequence[int], num_ranks: int) -> list[set[int]]:
    """Return a pack (set of experts) for each rank. Each expert copy, highest load first, goes to
    the least loaded rank with a free slot.
    """
    items = [
        (loads[expert] / count, expert) for expert, count in enumerate(copies) for _ in range(count)
    ]
    items.sort(key=lambda item: (-item[0], item[1]))
    per_rank = len(items) // num_ranks
    ranks: list[set[int]] = [set() for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    for load, expert in items:
        lacking = [rank for rank in range(num_ranks) if expert not in ranks[rank]]
        to = min(lacking, key=lambda rank: (len(ranks[rank]) == per_rank, totals[rank], rank))
        if len(ranks[to]) == per_rank:
            # All ranks with free slots already have this expert. A full rank gets the expert
            # instead. Another expert of the full rank moves to a rank with a free slot.
            roomy = next(rank for rank in range(num_ranks) if len(ranks[rank]) < per_rank)
            given = min(
                ranks[to] - ranks[roomy],
                key=lambda other: (abs(loads[other] / copies[other] - load), other),
            )
            ranks[to].remove(given)
            ranks[roomy].add(given)
            moved = loads[given] / copies[given]
            totals[to], totals[roomy] = totals[to] - moved, totals[roomy] + moved
        ranks[to].add(expert)
        totals[to] += load
    return ranks


def keep_in_place(packs: Sequence[set[int]], current: Slots, num_ranks: int) -> list[int]:
    """Assign packs to ranks so that many experts stay on their rank and in their slot."""
    per_rank = len(current) // num_ranks
    held = [current[rank * per_rank : (rank + 1) * per_rank] for rank in range(num_ranks)]
    pairs = [
        (-len(pack & set(held[rank])), rank, number)
        for number, pack in enumerate(packs)
        for rank in range(num_ranks)
    ]
    pack_of: dict[int, int] = {}
    for _, rank, number in sorted(pairs):
        if rank not in pack_of and number not in pack_of.values():
            pack_of[rank] = number
    slots: list[int] = []
    for rank in range(num_ranks):
        slots += settle(sorted(packs[pack_of[rank]]), held[rank])
    return slots


def settle(wanted: Sequence[int], held: Slots) -> list[int]:
    """Assign a rank's `wanted` experts to slots. Experts in the current slots `held` stay there."""
    missing = Counter(wanted)
    slots: list[int | None] = []
    for expert in held:
        stays = missing[expert] > 0
        missing[expert] -= stays
        slots.append(expert if stays else None)
    others = iter(sorted(missing.elements()))
    return [next(others) if expert is None else expert for expert in slots]


def next_moves(current: Slots, target: Slots, num_ranks: int) -> list[tuple[int, int]]:
    """Return simultaneous moves (from slot, to slot) towards `target`, or [] if no move is needed.
    Each rank sends at most one expert and receives at most one. Every expert keeps a copy.
    """
    per_rank = len(current) // num_ranks
    goal: list[int] = []
    for first in range(0, len(current), per_rank):
        own = slice(first, first + per_rank)
        goal += settle(target[own], current[own])
    wrong = [slot for slot, expert in enumerate(current) if goal[slot] != expert]
    where: dict[int, list[int]] = {}
    for slot, expert in enumerate(current):
        where.setdefault(expert, []).append(slot)
    left = Counter(current)  # for each expert, number of its slots that no move overwrites
    senders: set[int] = set()
    receivers: set[int] = set()
    moves: list[tuple[int, int]] = []
    for slot in wrong:
        rank, expert = slot // per_rank, current[slot]
        if rank in receivers:
            continue
        sources = [at for at in where[goal[slot]] if at // per_rank not in senders]
        if left[expert] > 1:
            if sources:
                left[expert] -= 1
                moves.append((sources[0], slot))
                senders.add(sources[0] // per_rank)
                receivers.add(rank)
            continue
        # `expert` has no other copy: swap it with a misplaced expert
        others = [
            at for at in sources if goal[at] != current[at] and at // per_rank not in receivers
        ]
        if others and rank not in senders:
            other = min(others, key=lambda at: (goal[at] != expert, at))
            moves += [(other, slot), (slot, other)]
            senders |= {rank, other // per_rank}
            receivers |= {rank, other // per_rank}
    return moves
