"""Looks up, for a plan, the times and bytes that `smp-tf profile` has measured of a model on this machine.

    kept: 4 samples, 16 samples        plan: 4 samples  ─▶ as measured
                                             8 samples  ─▶ on the line through both
                                            64 samples  ─▶ beyond them, which is said

A file's name says that it may be of the model (`profile_cache`). It is used only where the model, traced for the same
size, is the one that was measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from smp_tf.errors import OfflinePlanError, StepError
from smp_tf.model.profile_cache import Profile, ProfileCache
from smp_tf.model.profiling import hardware_alike
from smp_tf.offline.plan import OfflineModel
from smp_tf.pipeline.planner.times_by_size import UnitTimes, times_for
from smp_tf.pipeline.planner.unit_peaks import peaks_for
from smp_tf.planning.kept_measurements import MeasuredHardware, Subject, subject_of, this_hardware


class KnownTimes:
    """The measured times of one model, for microbatches of any size.

    Args:
        partitions: partitions of the plan. Their processes may share this machine.
        say: takes sentences about what was found, or what is wrong with it.
        of_all_sizes: whether plans for microbatches of several sizes are compared. Then one measured size alone is of
            no use.
    """

    def __init__(self, partitions: int, say: Callable[[str], None], *, of_all_sizes: bool = False) -> None:
        self._partitions = partitions
        self._say = say
        self._of_all_sizes = of_all_sizes
        self._told: set[str] = set()
        self._subjects: dict[int, Subject | None] = {}

    def __call__(self, model: OfflineModel, samples: int) -> UnitTimes:
        """Looks the times up.

        Args:
            model: the model, the same at every call.
            samples: samples of a microbatch.

        Returns:
            The times; none where nothing was measured. Times for a size that was not measured are estimated from two or
            more others.
        """
        subject = self._subject(model, samples)
        if subject is None:
            return UnitTimes()
        cache = ProfileCache()
        kept = cache.of_form(subject.form)
        self._tell(cache.trouble)
        alike = hardware_alike(this_hardware(), self._partitions)
        alone: list[str] = []
        for hardware in alike:
            here = {profile.subject: profile for profile in kept if profile.hardware == hardware}
            where = _where(hardware)
            if subject in here and not self._of_all_sizes:
                self._tell(f"times as measured on {where}; --static ignores them")
                kept_here = here[subject]
                return UnitTimes(
                    kept_here.times,
                    alone=kept_here.shares_alone,
                    message=kept_here.message_seconds,
                    peaks=kept_here.peaks,
                )
            sizes = {of.samples: profile for of, profile in here.items() if of == self._subject(model, of.samples)}
            if len(sizes) > 1:
                self._tell_sizes(samples, sizes, where)
                nearest = sizes[min(sizes, key=lambda size: (abs(size - samples), size))]
                times = times_for(samples, {size: profile.times for size, profile in sizes.items()})
                peaks = peaks_for(samples, {size: profile.peaks for size, profile in sizes.items()})
                return dataclasses.replace(
                    times, alone=nearest.shares_alone, message=nearest.message_seconds, peaks=peaks
                )
            alone += [f"{size} samples on {where}" for size in sizes]
        if alone:
            self._tell(
                f"only microbatches of {'; of '.join(alone)} were measured, which says nothing of other sizes: all "
                f"times are estimates. Let smp-tf profile measure microbatches of two sizes or more: --microbatches 1,4"
            )
        else:
            self._tell_others(model, samples, kept, alike)
        return UnitTimes()

    def _subject(self, model: OfflineModel, samples: int) -> Subject | None:
        """Returns the model for microbatches of a size; None where it cannot take this size."""
        if samples not in self._subjects:
            try:
                self._subjects[samples] = subject_of(model.trace_of(samples).graph, samples)
            except (OfflinePlanError, StepError):
                self._subjects[samples] = None
        return self._subjects[samples]

    def _tell(self, text: str) -> None:
        if text and text not in self._told:
            self._told.add(text)
            self._say(text)

    def _tell_sizes(self, samples: int, sizes: Iterable[int], where: str) -> None:
        measured = sorted(sizes)
        of = ", ".join(map(str, measured))
        self._tell(f"times by those of microbatches of {of} samples, as measured on {where}; --static ignores them")
        if not measured[0] <= samples <= measured[-1]:
            self._tell(f"microbatches of {samples} samples lie outside of these sizes: their times are less certain")

    def _tell_others(
        self, model: OfflineModel, samples: int, kept: Sequence[Profile], alike: Sequence[MeasuredHardware]
    ) -> None:
        """Says which measurements of the model a plan cannot use."""
        others = [profile for profile in kept if profile.hardware not in alike]
        sizes = {profile.subject.samples for profile in others}
        # Only the nearest size is looked at, since the model is traced for it.
        nearest = min(sizes, key=lambda size: (abs(size - samples), size), default=samples)
        same = [profile.hardware for profile in others if profile.subject == self._subject(model, nearest)]
        if same:
            self._tell(
                f"this model was measured, but not as this plan would run, so all times are estimates: "
                f"{'; or '.join(dict.fromkeys(_instead(hardware, alike) for hardware in same))}"
            )


def _instead(found: MeasuredHardware, wanted: Sequence[MeasuredHardware]) -> str:
    """Returns words for how a machine differs from the most similar of those that were looked for."""

    def differing(other: MeasuredHardware) -> list[str]:
        ours, theirs = dataclasses.asdict(found), dataclasses.asdict(other)
        return [f"{name} {ours[name]!r} instead of {theirs[name]!r}" for name in ours if ours[name] != theirs[name]]

    least: list[str] = min((differing(other) for other in wanted), key=len)
    return ", ".join(least)


def _where(hardware: MeasuredHardware) -> str:
    threads = f"{hardware.threads} threads per operation" if hardware.threads else "all threads"
    together = f", {hardware.processes} processes at once" if hardware.processes > 1 else ""
    return f"{hardware.device}, {threads}{together}"
