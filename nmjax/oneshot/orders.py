"""The order of the inputs of a weight, where it is free: the one in which n:m keeps most."""

from typing import NamedTuple

import numpy as np

SAMPLE = 64  # outputs that a round looks at
GROUPS = 512  # groups among which inputs are dealt at once
ROUNDS = 8  # at most


class FreeInputs(NamedTuple):
    """Inputs of a layer that may change places, if the outputs that become them do so too: the function stays the same.

    A module lists its own by a method ``free_inputs()``.

    Attributes:
      layer: The name of the layer.
      made_by: The names of the layers whose outputs become its inputs.
      parts: The number of equal parts of these outputs. Places change within a part only, such as a head of values.
      uses: How many inputs one output becomes. The inputs lie as [parts, uses, outputs of a part].

    >>> FreeInputs("down", ("gate", "up"))  # the hidden features of a perceptron
    FreeInputs(layer='down', made_by=('gate', 'up'), parts=1, uses=1)
    """

    layer: str
    made_by: tuple[str, ...]
    parts: int = 1
    uses: int = 1

    def orders(self, scores: np.ndarray, n: int, m: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the new order of the layer's inputs, and that of the outputs that become them.

        Args:
          scores: As in `order`.
          n, m: The pattern.

        >>> FreeInputs("out", ("value",), parts=2, uses=2).orders(np.eye(8)[[0, 2, 4, 6, 1, 3, 5, 7]], 1, 2)[1].tolist()
        [0, 1, 2, 3]
        """
        inputs, outputs = scores.shape
        cut = scores.reshape(self.parts, self.uses, -1, outputs)
        size = cut.shape[2]
        own = [order(np.concatenate(list(part), axis=1), n, m) for part in cut]
        starts = np.arange(inputs).reshape(self.parts, self.uses, size)[:, :, :1]
        of_inputs = np.concatenate([(start + one).ravel() for start, one in zip(starts, own, strict=True)])
        return of_inputs, np.concatenate([i * size + one for i, one in enumerate(own)])


def order(scores: np.ndarray, n: int, m: int, seed: int = 0) -> np.ndarray:
    """Return an order of inputs in which the n largest scores of every m, over all outputs, add up to much.

    In each round one input of every group is taken out, and all that were taken out are dealt to the groups anew, so
    that the sum is greatest: a linear assignment, as in Zhang et al., "Plug-and-Play: An Efficient Post-training
    Pruning Method for Large Language Models" (ICLR 2024). With many outputs a round looks at 64 of
    them, and deals among 512 groups.

    Args:
      scores: The score of each weight, [inputs, outputs], not negative.
      n, m: The pattern.
      seed: Chooses the inputs of a round.

    Returns:
      The places of the inputs in their new order. The sum is never less than that of the old order.

    Raises:
      ValueError: m does not divide the inputs.

    >>> scores = np.array([[9.0], [8.0], [7.0], [6.0], [1.0], [1.0], [1.0], [1.0]])  # four large ones in a group of 2:4
    >>> found = order(scores, 2, 4)
    >>> kept(scores, 2, 4), kept(scores[found], 2, 4)
    (19.0, 30.0)
    """
    from scipy.optimize import linear_sum_assignment  # here because it is slow to import

    inputs, outputs = scores.shape
    if inputs % m:
        raise ValueError(f"m={m} does not divide the {inputs} inputs.")
    rng, groups, scores = np.random.default_rng(seed), np.arange(inputs).reshape(-1, m), np.asarray(scores, np.float32)
    if n >= m or len(groups) < 2:
        return groups.ravel()
    best, most = groups, kept(scores, n, m)
    for _ in range(ROUNDS):
        some = scores if outputs <= SAMPLE else scores[:, rng.choice(outputs, SAMPLE, replace=False)]
        for _ in range(m):
            groups = rng.permuted(rng.permutation(groups), axis=1)
            for part in (groups[i : i + GROUPS] for i in range(0, len(groups), GROUPS)):
                least = np.sort(some[part[:, 1:]], axis=1)[:, -n]  # of those that the others of a group would keep
                out = some[part[:, 0]]
                gain = np.stack([np.maximum(out - one, 0).sum(1) for one in least])  # [group, input]
                part[:, 0] = part[linear_sum_assignment(gain, maximize=True)[1], 0]
        now = kept(scores[groups.ravel()], n, m)
        if now > most:
            best, most = groups.copy(), now
    return np.sort(best, axis=1).ravel()


def kept(scores: np.ndarray, n: int, m: int) -> float:
    """Return the sum of the n largest scores of every m inputs, over all outputs."""
    return float(np.sort(scores.reshape(-1, m, scores.shape[1]), axis=1)[:, -n:].sum(dtype=np.float64))
