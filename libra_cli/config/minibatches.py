"""Which groups of a batch are in which of its updates: the trainer and the controller agree on it.

The controller gives gradient workers trajectories of the first update only, since the later ones
need weights that no worker has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def minibatches(
    groups: Sequence[int], *, parts: int, passes: int, seed: Sequence[int]
) -> Iterator[list[int]]:
    """Yield the samples of each update on a batch: indices into ``groups``, their groups' numbers.

    Each of the passes deals all groups, whole ones, to ``parts`` minibatches, in an order that
    depends on nothing but ``seed`` and its number, so that all ranks, the controller and a run that
    goes on have the same. No two minibatches of a pass differ by more than a group, none is empty.
    """
    # Here, not above: most commands train nothing.
    import numpy as np

    names = np.unique(np.asarray(groups, dtype=np.int64))
    for number in range(passes):
        order = np.random.default_rng((*seed, number)).permutation(names)
        for part in np.array_split(order, min(parts, len(order))):
            wanted = set(part.tolist())
            yield [index for index, group in enumerate(groups) if group in wanted]


def first_minibatch(groups: Sequence[int], *, parts: int, seed: Sequence[int]) -> list[int]:
    """Return the samples of the first update, as ``minibatches`` deals them; all, if it is the only
    one of its pass."""
    if parts == 1 or not groups:
        return [*range(len(groups))]
    return next(minibatches(groups, parts=parts, passes=1, seed=seed))
