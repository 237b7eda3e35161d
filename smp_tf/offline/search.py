"""Tries partitions, microbatches and schedules for a number of ranks, and recommends the fastest that fits.

    ranks 8     partitions    1    2    4    8      replicas are what ranks are left for: 8 / partitions
                microbatches  1    2    4 ... of a batch of one replica
                schedule      simple, interleaved, zb_h1 ...

Settings are compared by samples per second over all replicas, each with batches of the same size. Where nothing fits,
all settings are tried again with activations that backward makes again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from smp_tf.config.config import Config
from smp_tf.errors import MemoryLimitError, OfflinePlanError, PlacementError, StepError
from smp_tf.offline.cluster import Cluster, one_host
from smp_tf.offline.numbers import counted
from smp_tf.offline.plan import OfflineModel, OfflinePlan
from smp_tf.pipeline.errors import ScheduleError
from smp_tf.pipeline.schedules.schedule import IN_ORDER, LEAN, SCHEDULES

#: Settings this close to the fastest count as equally fast. The one with the fewest partitions and microbatches is
#: taken.
_AS_FAST = 0.02
#: The most microbatches for each partition. More leave little to gain.
_MOST_MICROBATCHES = 16
#: The largest number of partitions that is tried with idle ranks, where nothing else fits.
_MOST_COUNTS = 16


@dataclass(frozen=True)
class Candidate:
    """Settings that were tried.

    Args:
        config: partitions, microbatches and schedule.
        replicas: number of replicas.
        speed: samples per second; 0 where there is no plan.
        bubble: share of the step in which a rank has nothing to do; None where there is no plan.
        needed: bytes of the fullest rank; None where no plan says.
        refused: why there is no plan, in a few words; "" where there is one.
        why: the full reason, where it is not memory.
        excess: the most bytes by which a rank exceeds its limit, where memory is the reason.
    """

    config: Config
    replicas: int
    speed: float
    bubble: float | None
    needed: int | None
    refused: str = ""
    why: str = ""
    excess: float = 0.0

    @property
    def fits(self) -> bool:
        """Returns whether there is a plan."""
        return not self.refused

    @property
    def size(self) -> tuple[int, int, int]:
        """Returns partitions, microbatches, and how unusual the schedule is."""
        return (self.config.partitions or 1, self.config.microbatches, IN_ORDER.index(self.config.pipeline))


@dataclass(frozen=True)
class Search:
    """What was tried.

    Args:
        candidates: all settings that were tried, in the order of partitions, microbatches and schedules.
        best: the settings to take.
        made: the plan of `best`.
    """

    candidates: tuple[Candidate, ...]
    best: Candidate
    made: OfflinePlan


@dataclass(frozen=True)
class Choices:
    """What is tried.

    Args:
        partitions: numbers of partitions; none for all that divide the ranks.
        microbatches: numbers of microbatches; none for powers of two.
        pipelines: schedules; none for all.
    """

    partitions: Sequence[int] = ()
    microbatches: Sequence[int] = ()
    pipelines: Sequence[str] = ()


def search(
    model: OfflineModel,
    config: Config,
    ranks: int,
    choices: Choices = Choices(),
    *,
    cluster: Cluster | None = None,
    progress: Callable[[int, int, str], None] = lambda done, of, what: None,
    proof_seconds: float = 0.0,
) -> Search:
    """Plans a model for all settings that a number of ranks allows.

    Args:
        model: the model.
        config: the configuration; `optimize` and `memory_limit` count.
        ranks: number of ranks. All are used.
        choices: the partitions, microbatches and schedules to try.
        cluster: the cluster of the ranks; None for processes like this one, on one host.
        progress: takes how many settings are done, of how many, and what is tried next.
        proof_seconds: how many seconds to search for a better placement for the settings that are taken.

    Returns:
        The settings that were tried, and the best.

    Raises:
        PlacementError: nothing fits. The message says what comes nearest.
        OfflinePlanError: the model cannot be traced.
        ConfigError: the cluster has too few ranks.
    """
    described, cluster = cluster, cluster or one_host(ranks)
    trials = _Trials(model, config, ranks, cluster, choices, progress)
    trials.try_all()
    found = trials.found
    if trials.fits:
        best = _best(found)
        made = model.plan(
            best.config, replicas=best.replicas, cluster=cluster, proof_seconds=proof_seconds, advise=False
        )
    else:
        best = _nearest(found)
        try:
            # A longer search may find a placement that fits.
            made = model.plan(
                best.config,
                replicas=best.replicas,
                cluster=described,
                proof_seconds=proof_seconds,
                processes=ranks,
            )
        except MemoryLimitError as error:
            said = f"None of {len(found)} settings fits. Nearest comes {_in_words(best.config)}. {error}"
            raise MemoryLimitError(said) from error
    found[found.index(best)] = best = _planned(best.config, best.replicas, made)
    return Search(tuple(found), best, made)


class _Trials:
    """Tries settings one after the other, and remembers the result of each.

    Args:
        model: the model.
        config: what all settings share.
        ranks: number of ranks.
        cluster: the cluster of the ranks.
        choices: the partitions, microbatches and schedules to try.
        progress: takes how many settings are done, of how many, and what is tried next.
    """

    def __init__(
        self,
        model: OfflineModel,
        config: Config,
        ranks: int,
        cluster: Cluster,
        choices: Choices,
        progress: Callable[[int, int, str], None],
    ) -> None:
        self._model = model
        self._config = config
        self._ranks = ranks
        self._cluster = cluster
        self._choices = choices
        self._progress = progress
        self.found: list[Candidate] = []

    @property
    def fits(self) -> bool:
        """Returns whether any of the settings has a plan."""
        return any(candidate.fits for candidate in self.found)

    def try_all(self) -> None:
        """Tries the choices and, where none fits, numbers of partitions that leave ranks idle."""
        ranks, given = self._ranks, self._choices.partitions
        counts = list(given) or [count for count in range(1, ranks + 1) if ranks % count == 0]
        self._try_counts(counts, ranks)
        if not given and not self.fits and any(candidate.replicas > 1 for candidate in self.found):
            # Averaging gradients takes memory, too. Some ranks would be idle.
            others = {*range(1, _MOST_COUNTS + 1), *counts}
            self._try_counts(sorted(count for count in others if count <= ranks), 1)

    def _try_counts(self, counts: Sequence[int], most_replicas: int) -> None:
        """Tries numbers of partitions and, where nothing fits yet, all of them again with recompute."""
        settings = self._settings_of(counts)
        self._try(settings, most_replicas)
        if not self._config.recompute and not self.fits:
            sized = [c.config for c in self.found[-len(settings) :] if c.needed is not None]
            self._try([dataclasses.replace(settings, recompute=True) for settings in sized], most_replicas)

    def _settings_of(self, counts: Sequence[int]) -> list[Config]:
        config, choices = self._config, self._choices
        return [
            # One partition has one chunk and no choice of schedules.
            dataclasses.replace(
                config,
                partitions=count,
                microbatches=parts,
                pipeline=pipeline,
                chunks_per_rank=config.chunks_per_rank if count > 1 else None,
            )
            for count in counts
            for parts in _parts(count, self._model.batch_size, choices.microbatches)
            for pipeline in (
                choices.pipelines or (_worth_trying(config, self._cluster) if count > 1 else ("interleaved",))
            )
        ]

    def _try(self, settings: Sequence[Config], most_replicas: int) -> None:
        many = len(self.found) + len(settings)
        for one in settings:
            stages = one.partitions or 1
            again = ", recompute" if one.recompute else ""
            what = f"{stages} partitions, {one.microbatches} microbatches, {one.pipeline}{again}"
            self._progress(len(self.found), many, what)
            replicas = min(self._ranks // stages, most_replicas)
            self.found.append(_candidate(self._model, one, replicas, self._cluster))


def _worth_trying(config: Config, cluster: Cluster) -> list[str]:
    limited = config.memory_limit is not None or any(host.memory is not None for host in cluster.hosts)
    return [kind for kind in IN_ORDER if (limited or kind not in LEAN) and _takes(kind, config.chunks_per_rank)]


def _takes(kind: str, chunks_per_rank: int | None) -> bool:
    try:
        SCHEDULES[kind].chunks_for(chunks_per_rank)
    except ScheduleError:
        return False
    return True


def _parts(partitions: int, batch_size: int, given: Sequence[int]) -> list[int]:
    if given:
        return list(given)
    most = min(batch_size, _MOST_MICROBATCHES * partitions) if partitions > 1 else batch_size
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _candidate(model: OfflineModel, settings: Config, replicas: int, cluster: Cluster) -> Candidate:
    try:
        made = model.plan(settings, replicas=replicas, cluster=cluster, proof_seconds=0.0, advise=False)
    except MemoryLimitError as error:
        return Candidate(settings, replicas, 0.0, None, error.needed, "does not fit", excess=error.excess)
    except (PlacementError, ScheduleError) as error:
        return Candidate(settings, replicas, 0.0, None, None, "cannot be placed", str(error))
    except (OfflinePlanError, StepError) as error:
        # A model may cut its batch itself, and so not take microbatches of any size.
        return Candidate(settings, replicas, 0.0, None, None, "cannot be traced", str(error))
    return _planned(settings, replicas, made)


def _planned(settings: Config, replicas: int, made: OfflinePlan) -> Candidate:
    needed = max(row.device_bytes for row in made.plan.forecast)
    return Candidate(settings, replicas, made.samples_per_second, made.timeline.bubble_ratio, needed)


def _nearest(found: Sequence[Candidate]) -> Candidate:
    """Returns the settings that exceed the memory by the fewest bytes, where none fits."""
    sizes = [candidate for candidate in found if candidate.needed is not None]
    if all(candidate.refused == "cannot be traced" for candidate in found):
        raise OfflinePlanError(found[0].why)
    if not sizes:
        raise PlacementError(f"None of {len(found)} settings can be placed. The last: {found[-1].why}")
    return min(sizes, key=lambda candidate: (candidate.excess, candidate.size))


def _in_words(config: Config) -> str:
    partitions, parts = counted(config.partitions or 1, "partition"), counted(config.microbatches, "microbatch", "es")
    return f"{config.pipeline} with {partitions} and {parts}{' and recompute' if config.recompute else ''}"


def _best(found: Sequence[Candidate]) -> Candidate:
    possible = [candidate for candidate in found if candidate.fits]
    fastest = max(candidate.speed for candidate in possible)
    return min(
        (candidate for candidate in possible if candidate.speed >= fastest * (1 - _AS_FAST)),
        key=lambda candidate: candidate.size,
    )
