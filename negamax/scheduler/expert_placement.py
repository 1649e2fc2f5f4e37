"""Where the experts of a layer lie: how many copies each has, on which ranks, and the moves that
lead from one placement to another. Plain integers; every result depends on the arguments alone.

A placement is a list with the expert in each slot. Slots are dealt out to the ranks in order, the
same number to each. The copies of an expert are chosen by its tokens alike, so each counts as
having an equal share of them.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

Slots = Sequence[int]  # the expert in each slot


def rank_loads(loads: Sequence[int], slots: Slots, num_ranks: int) -> list[float]:
    """What each rank has to do, of `loads`, by expert."""
    copies, per_rank = Counter(slots), len(slots) // num_ranks
    shares = [loads[expert] / copies[expert] for expert in slots]
    return [sum(shares[at : at + per_rank]) for at in range(0, len(slots), per_rank)]


def best_placement(loads: Sequence[int], current: Slots, num_ranks: int) -> list[int]:
    """The placement whose busiest rank has the least to do: the packed one, the `current` one, or
    the one in order, the first of those that are equal being `current`. Of the packed one as much
    as can be lies where it lies now.
    """
    num_slots = len(current)
    packed = pack(loads, copies_of(loads, num_slots, num_ranks), num_ranks)
    in_order = [slot % len(loads) for slot in range(num_slots)]
    possible = [list(current), keep_in_place(packed, current, num_ranks), in_order]
    return min(possible, key=lambda slots: max(rank_loads(loads, slots, num_ranks)))


def copies_of(loads: Sequence[int], num_slots: int, num_ranks: int) -> list[int]:
    """How many slots each expert gets: one, and each further one goes to the expert that has the
    most to do in each of its own. None has more than one on each rank.
    """
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
    """The experts of each rank, as many on each: the heaviest first, each to the rank with the
    least to do that has room for it and does not have it yet.
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
            # Those with room have this expert already: one of them takes another one instead.
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
    """The placement with a pack on each rank that has most of it already, as far as each can have
    its own; on a rank what stays keeps its slot.
    """
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
    """The experts `wanted` on a rank, in its slots: those that it has stay where they are."""
    missing = Counter(wanted)
    slots: list[int | None] = []
    for expert in held:
        stays = missing[expert] > 0
        missing[expert] -= stays
        slots.append(expert if stays else None)
    others = iter(sorted(missing.elements()))
    return [next(others) if expert is None else expert for expert in slots]


def next_moves(current: Slots, target: Slots, num_ranks: int) -> list[tuple[int, int]]:
    """Moves (from slot, to slot), to be made all at once, towards `target`, which has every expert:
    a rank sends one expert and receives one at most, and every expert is somewhere before and
    after. None once each rank has what it has in `target`; each time fewer slots are wrong.
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
    left = Counter(current)  # slots of each expert that are not written over
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
        # the only copy: it changes places with one that is wrong where it is
        others = [
            at for at in sources if goal[at] != current[at] and at // per_rank not in receivers
        ]
        if others and rank not in senders:
            other = min(others, key=lambda at: (goal[at] != expert, at))
            moves += [(other, slot), (slot, other)]
            senders |= {rank, other // per_rank}
            receivers |= {rank, other // per_rank}
    return moves
