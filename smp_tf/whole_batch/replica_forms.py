"""What the replicas have told each other of the forms in which a step of a script's own is called.

    call                     form        replica 0    replica 1
    1   (8, 6) (8, 3)        a           8 samples    8 samples     they come to the form together, and tell each other
    2   (8, 6) (8, 3)        a           8            5             known: nothing is told
    3   (8, 6) None          b           8            8             they come to this form together

Calls of one form differ in nothing but the number of samples. Within a `tf.function`, a replica comes to a new size
alone. So nothing may be told there, and what is written into the graph takes any sizes.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from smp_tf.errors import StepError
from smp_tf.job import exchange, runtime
from smp_tf.partition.mesh import CommGroup
from smp_tf.whole_batch.own_samples import OwnSamples


class ReplicaForms:
    """The forms of the calls of a step.

    Args:
        step: words for the step.
    """

    def __init__(self, step: str) -> None:
        self._step = step
        self._sizes: dict[Hashable, tuple[int, ...]] = {}
        self._keys: dict[Hashable, Any] = {}

    @property
    def has_several(self) -> bool:
        """Returns whether there are several replicas."""
        return runtime.current().topology.replicas > 1

    def samples(self, form: tuple[Any, ...], count: int) -> OwnSamples:
        """Returns the samples of a batch. For others than this replica they are those of the first batch of its form.

        Args:
            form: the form.
            count: samples of this replica's batch.

        Raises:
            StepError: replicas have come to different forms.
        """
        running = runtime.current()
        if not self.has_several:
            return OwnSamples((count,), 0, running.config.microbatches)
        if form not in self._sizes:
            kinds = [str(spec) for spec in form[1:]]
            said = self._tell([count, kinds], "the types of its arguments")
            if any(theirs != said[0][1] for _, theirs in said):
                raise StepError(
                    f"{self._step} has whole_batch=True, and replicas have called it with arguments of other types or "
                    f"shapes, so their batches cannot be joined: {_differing([theirs for _, theirs in said])}. Pad "
                    f"the batches of all replicas to one length, and call the step alike on all of them."
                )
            self._sizes[form] = tuple(size for size, _ in said)
        sizes, replica = list(self._sizes[form]), running.topology.replica
        sizes[replica] = count
        return OwnSamples(tuple(sizes), replica, running.config.microbatches)

    def require(self, form: Hashable, what: str, key: Any) -> None:
        """Raises where the graphs of replicas differ in something that they join.

        Args:
            form: the form.
            what: words for what is joined.
            key: what has to be the same on all replicas, and for all sizes of their batches, as JSON holds it.

        Raises:
            StepError: it is not.
        """
        if not self.has_several:
            return
        others = [self._keys[form, what]] if (form, what) in self._keys else self._tell(key, what)
        self._keys[form, what] = others[0]
        if any(_as_json(other) != _as_json(key) for other in others):
            raise StepError(
                f"{self._step} has whole_batch=True, and its graph depends on the number of samples, so {what} cannot "
                f"be joined for replicas whose batches differ in size. Use batches of one size (drop_remainder=True)."
            )

    def _tell(self, value: Any, what: str) -> list[Any]:
        """Tells the other replicas something, and returns what all of them tell."""
        return exchange.allgather_json(value, CommGroup.RDP_GROUP, name=f"{what} of {self._step}")


def _as_json(value: Any) -> Any:
    """Returns a value as it comes back from another replica."""
    return [_as_json(part) for part in value] if isinstance(value, (list, tuple)) else value


def _differing(kinds: list[list[str]]) -> str:
    """Returns words for the first argument that is of another type on another replica."""
    for other in kinds[1:]:
        for one, two in zip(kinds[0], other, strict=False):
            if one != two:
                return f"{one} and {two}"
    return " and ".join(f"{len(each)} arguments" for each in kinds)
