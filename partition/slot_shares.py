"""Which replica keeps the optimizer's slots of which variable: shares of about equal bytes, of whole variables.

    a stage's variables, largest first      replica 0          replica 1
    embedding 40   kernel_1 16              embedding 40
    kernel_2  16   bias      1                                 kernel_1 16   kernel_2 16   bias 1

Each variable goes to the replica that has least so far, the largest first. Optimizers may look at a variable as a whole
(Adafactor its rows and columns, LAMB its norm), so none is cut; one that is larger than a share makes the shares
unequal.

Source: Graham, "Bounds on Multiprocessing Timing Anomalies", SIAM J. Appl. Math. 17(2), 1969: the largest share is at
most 4/3 of that of the best division.
"""

from __future__ import annotations

from collections.abc import Sequence


def share_out(sizes: Sequence[float], loads: Sequence[float]) -> tuple[int, ...]:
    """Say which replica keeps the slots of each variable.

    Args:
        sizes: bytes of the variables.
        loads: bytes that each replica keeps already.

    Returns:
        The replica of each variable. Of equal variables the first comes first, of equal replicas the first is chosen.

    Example:
        >>> share_out([1, 16, 40, 16], [0, 0])
        (1, 1, 0, 1)
    """
    left = list(loads)
    found = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        found[index] = replica = left.index(min(left))
        left[replica] += sizes[index]
    return tuple(found)


def largest_share(sizes: Sequence[float], replicas: int) -> float:
    """What the replica that keeps most has.

    Args:
        sizes: bytes of the variables.
        replicas: their number.

    Returns:
        Bytes.

    Example:
        >>> largest_share([1, 16, 40, 16], 2)
        40.0
    """
    shares = [0.0] * replicas
    for size, replica in zip(sizes, share_out(sizes, shares), strict=True):
        shares[replica] += size
    return max(shares)
