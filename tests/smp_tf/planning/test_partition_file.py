"""`partition_file`: written at once, read by rank 0 for all, and looked up at the first step of a model."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import smp_tf as smp
from smp_tf.config.config import Config
from smp_tf.errors import ConfigError, PlacementError
from smp_tf.job import runtime
from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.plan.plan import Plan
from smp_tf.partition.plan.plan_file import PlanFile, StoredPlan, to_store
from smp_tf.pipeline.planner.proposal import propose
from smp_tf.pipeline.planner.request import Aim, Course, PlacementRequest, Storage
from smp_tf.planning import partition_file
from tests.partition.op_graph_builder import chain_of_dense

TWO = PlacementRequest(Course("simple", 2, 2), Storage(slots=0.0), Aim("memory"))


def planned(layers: int = 2) -> tuple[Plan, OpGraph]:
    graph = chain_of_dense(layers)
    return propose(graph, TWO, {}), graph


def text(partitions: int = 2) -> str:
    plan = dataclasses.replace(to_store("train", *planned()), placement=tuple(range(partitions)))
    return PlanFile(partitions, (plan,)).to_json()


def load(path: Path, rank: int = 0, partitions: int = 2, heard: bytes = b"") -> PlanFile | None:
    """What a rank has when rank 0 has said `heard`; on rank 0, what it says itself."""
    config = Config(partitions=partitions, partition_file=str(path), load_partition=True)
    return partition_file.load(config, rank, lambda mine, name, most: [mine or heard, b""])


@pytest.fixture
def running(init: Callable[..., None], two_partitions: Callable[[], None]) -> Callable[..., runtime.Runtime]:
    """Makes this process rank 0 of two partitions with a partition_file, and perhaps a plan that was loaded."""

    def start(path: Path, loaded: PlanFile | None = None) -> runtime.Runtime:
        init(partition_file=path)
        alone = runtime.current()
        two_partitions()
        config = dataclasses.replace(alone.config, partitions=2, load_partition=loaded is not None)
        runtime.install(dataclasses.replace(runtime.current(), config=config, plan_file=loaded))
        return alone

    return start


class TestLoad:
    def test_rank_0_reads_and_the_others_hear_it(self, tmp_path: Path) -> None:
        file = tmp_path / "plan.json"
        file.write_text(text())
        said: list[bytes] = []
        config = Config(partitions=2, partition_file=str(file), load_partition=True)

        def exchange(mine: bytes, name: str, most: int) -> list[bytes]:
            said.append(mine)
            return [said[0]]

        first = partition_file.load(config, 0, exchange)
        file.unlink()
        assert first == partition_file.load(config, 1, exchange) == PlanFile.from_json(text())
        assert said[1] == b""

    def test_nothing_is_read_unless_asked_for(self, tmp_path: Path) -> None:
        wanted = Config(partitions=2, partition_file=str(tmp_path / "none"))
        assert partition_file.load(wanted, 0, lambda *_: pytest.fail("nothing is to be said")) is None
        assert load(tmp_path / "none", partitions=1) is None

    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_file_that_is_not_there_is_the_same_error_on_every_rank(self, tmp_path: Path, rank: int) -> None:
        heard: list[bytes] = []
        config = Config(partitions=2, partition_file=str(tmp_path / "none.json"), load_partition=True)

        def exchange(mine: bytes, name: str, most: int) -> list[bytes]:
            heard.append(mine)
            return [heard[0], b""]

        for number in range(rank + 1):
            with pytest.raises(ConfigError, match=r"none\.json does not exist on the host of rank 0 .*write"):
                partition_file.load(config, number, exchange)

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (
                text()[:100].encode(),
                r"cannot be used\. It is not JSON, or not all .*without load_partition",
            ),
            (b"\xff\xfe", "is not UTF-8 text"),
            (text(3).encode(), r"is for 3 partitions, and this job has 2\. Set partitions to 3"),
            (b" " * (partition_file.MAX_BYTES + 1), "is larger than 16777216 bytes"),
            (text().encode("utf-16"), "is not UTF-8 text"),
            (
                text().replace('"pipeline"', '"pipeline": "zb_v", "pipeline"').encode(),
                r"cannot be used\. Entry 1 of 'plans' of the plan file has 'pipeline' 2 times",
            ),
            (
                text().replace('"microbatches": 2', '"microbatches": NaN').encode(),
                "cannot be used.* NaN, which is no num",
            ),
        ],
    )
    def test_a_file_that_cannot_be_used_is_named(self, tmp_path: Path, content: bytes, said: str) -> None:
        (tmp_path / "plan.json").write_bytes(content)
        with pytest.raises(ConfigError, match=rf"partition_file .*plan\.json {said}"):
            load(tmp_path / "plan.json")

    def test_a_folder_is_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
            load(tmp_path)

    def test_what_has_no_end_is_no_file(self, tmp_path: Path) -> None:
        """Bug: a pipe was waited for, and a device read for ever."""
        os.mkfifo(tmp_path / "pipe")
        for path in (tmp_path / "pipe", Path("/dev/zero")):
            with pytest.raises(
                ConfigError, match=r"cannot be read: it is no file, but a device, a pipe or a socket\.$"
            ):
                load(path)

    def test_what_cannot_be_looked_for_is_told_to_all(self, tmp_path: Path) -> None:
        """Bug: rank 0 ended where the others waited for what it says."""
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match="does not exist on the host of rank 0"):
            load(tmp_path / "file" / "plan.json")
        with pytest.raises(ConfigError, match="cannot be read: File name too long"):
            load(tmp_path / ("x" * 300))
        with pytest.raises(ConfigError, match="is the name of no file: embedded null byte"):
            load(tmp_path / "plan\0.json")

    def test_the_largest_file_is_heard_whole(self, tmp_path: Path) -> None:
        """Bug: in other characters than ASCII a file of the largest size was longer than a rank may say."""
        (tmp_path / "plan.json").write_text("ä" * (partition_file.MAX_BYTES // 2))
        config = Config(partitions=2, partition_file=str(tmp_path / "plan.json"), load_partition=True)

        def exchange(mine: bytes, name: str, most: int) -> list[bytes]:
            assert len(mine) <= most
            return [mine, b""]

        with pytest.raises(ConfigError, match="It is not JSON"):
            partition_file.load(config, 0, exchange)


class TestKeep:
    def test_plans_follow_each_other_in_the_order_of_the_steps(
        self, running: Callable[..., None], tmp_path: Path
    ) -> None:
        file = tmp_path / "new" / "plan.json"
        running(file)
        partition_file.keep("judge", *planned(2))
        assert [plan.step for plan in PlanFile.from_json(file.read_text()).plans] == ["judge"]
        partition_file.keep("maker", *planned(3))
        read = PlanFile.from_json(file.read_text())
        assert [(plan.step, len(plan.units)) for plan in read.plans] == [("judge", 2), ("maker", 3)]
        assert read.partitions == 2
        assert os.listdir(file.parent) == ["plan.json"]

    def test_the_next_init_begins_anew(self, running: Callable[..., runtime.Runtime], tmp_path: Path) -> None:
        file = tmp_path / "plan.json"
        alone = running(file)
        two = runtime.current()
        partition_file.keep("first", *planned())
        runtime.install(alone)
        smp.shutdown()
        runtime.install(two)
        partition_file.keep("second", *planned())
        runtime.install(None)
        assert [plan.step for plan in PlanFile.from_json(file.read_text()).plans] == ["second"]

    def test_a_model_that_is_made_again_has_one_plan(self, running: Callable[..., None], tmp_path: Path) -> None:
        """Of two plans for one step the second was never used; a file with two is refused."""
        file = tmp_path / "plan.json"
        running(file)
        plan, graph = planned(3)
        partition_file.keep("train", plan, graph)
        before = file.read_text()
        partition_file.keep("train", dataclasses.replace(plan, microbatches=4), graph)
        assert file.read_text() == before
        partition_file.keep("evaluate", plan, graph)
        partition_file.keep("train", dataclasses.replace(plan, fingerprint="of other batches"), graph)
        assert [plan.step for plan in PlanFile.from_json(file.read_text()).plans] == ["train", "evaluate", "train"]

    @pytest.mark.parametrize("moment", ["fsync", "replace"])
    def test_a_write_that_is_cut_short_leaves_the_file_before(
        self, running: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
    ) -> None:
        file = tmp_path / "plan.json"
        running(file)
        partition_file.keep("judge", *planned(2))
        before = file.read_text()

        def fails(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, moment, fails)
        with pytest.raises(ConfigError, match=r"plan\.json cannot be written: No space left on device"):
            partition_file.keep("maker", *planned(3))
        assert file.read_text() == before

    def test_a_loaded_plan_and_one_partition_write_nothing(self, running: Callable[..., None], tmp_path: Path) -> None:
        file = tmp_path / "plan.json"
        running(file, PlanFile.from_json(text()))
        partition_file.keep("train", *planned())
        running_as = dataclasses.replace(runtime.current().config, load_partition=False)
        runtime.install(dataclasses.replace(runtime.current(), config=running_as))
        plan, graph = planned()
        partition_file.keep("train", dataclasses.replace(plan, stages=1), graph)
        assert not file.exists()
        partition_file.keep("train", plan, graph)
        assert file.exists()


class TestGiven:
    def test_without_a_loaded_plan_there_is_none(self, running: Callable[..., None], tmp_path: Path) -> None:
        running(tmp_path / "plan.json")
        assert partition_file.given_for("train", planned()[1]) is None

    def test_the_plan_of_the_step_is_found_silently_and_that_of_other_batches_is_said(
        self, running: Callable[..., None], tmp_path: Path
    ) -> None:
        loaded = PlanFile.from_json(text())
        running(tmp_path / "plan.json", loaded)

        def said(graph: OpGraph) -> str:
            given = partition_file.given_for("train", graph)
            assert given is loaded.plans[0]
            return propose(graph, TWO.changed(given=given), {}).reasons[-1]

        assert said(planned()[1]) == "the placement is that of the plan that was loaded"
        assert said(chain_of_dense(2, batch=64)) == (
            "the placement is that of the plan that was loaded, which was made for step 'train' with other batches, "
            "constants or operations"
        )

    def test_a_fingerprint_that_was_changed_is_that_of_other_batches(
        self, running: Callable[..., None], tmp_path: Path
    ) -> None:
        """Bug: `smp-tf plan`, which reads the same reasons, said nothing of it."""
        fields = json.loads(text())
        fields["plans"][0]["fingerprint"] = "0" * 64
        running(tmp_path / "plan.json", PlanFile.from_json(json.dumps(fields)))
        plan, graph = planned()
        given = partition_file.given_for("train", graph)
        again = propose(graph, TWO.changed(given=given), {})
        assert again.fingerprint == plan.fingerprint
        assert again.reasons[-1].endswith("was made for step 'train' with other batches, constants or operations")

    def test_what_was_moved_by_hand_is_said_also_of_chunks(self, running: Callable[..., None], tmp_path: Path) -> None:
        """Bug: where chunks had been put on other partitions nothing was said."""
        fields = json.loads(text())
        fields["plans"][0]["placement"] = [1, 0]
        running(tmp_path / "plan.json", PlanFile.from_json(json.dumps(fields)))
        graph = planned()[1]
        given = partition_file.given_for("train", graph)
        assert given is not None
        plan = propose(graph, TWO.changed(given=given, placement=given.placement), {})
        assert plan.placement == (1, 0)
        assert plan.reasons[-1] == (
            "the placement is that of the plan that was loaded; moved by hand: chunk 0 from partition 0 to 1, chunk 1 "
            "from partition 1 to 0"
        )

    def test_a_shared_variable_stays_where_an_earlier_step_put_it(
        self, running: Callable[..., None], tmp_path: Path
    ) -> None:
        """Bug: what the plan of a later step said of it was left aside without a word."""
        graph = chain_of_dense(4, tied=(0, 3))
        loaded = PlanFile(2, (to_store("train", propose(graph, TWO, {}), graph),))
        running(tmp_path / "plan.json", loaded)
        request = TWO.changed(given=partition_file.given_for("train", graph))
        assert propose(graph, request, {0: 0}).owners["net/dense_0/kernel"] == 0
        with pytest.raises(
            PlacementError, match=r"to partition 0\. An earlier step put it on partition 1, where it stays"
        ):
            propose(graph, request, {0: 1})

    def test_a_later_step_with_more_layers_than_the_file_knows_goes_by_the_earlier_ones(
        self, running: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        running(tmp_path / "plan.json", PlanFile.from_json(text()))
        assert partition_file.given_for("predict", chain_of_dense(3), is_first=False) is None
        assert (
            "has no plan for step 'predict', which uses layers that no earlier step has used" in capsys.readouterr().err
        )

    def test_a_plan_of_another_model_names_the_file(self, running: Callable[..., None], tmp_path: Path) -> None:
        running(tmp_path / "plan.json", PlanFile.from_json(text()))
        with pytest.raises(PlacementError) as raised:
            partition_file.given_for("train", chain_of_dense(3))
        assert str(raised.value) == (
            f"partition_file {tmp_path / 'plan.json'} cannot be used. It was made for another model: it does not know "
            "the layer 'net/dense_2' (the plan of step 'train' was looked at for step 'train'). Make it anew: run once "
            "without load_partition."
        )


class TestSchedule:
    """Chunks and schedule belong together; once the schedule of a loaded plan was ignored without a word."""

    def of(self, pipeline: str, placement: tuple[int, ...]) -> StoredPlan:
        return dataclasses.replace(to_store("train", *planned()), pipeline=pipeline, placement=placement)

    def test_auto_takes_that_of_the_plan(self, running: Callable[..., None], tmp_path: Path) -> None:
        running(tmp_path / "plan.json")
        assert partition_file.schedule_for(self.of("zb_v", (0, 1, 1, 0)), "auto", None) == "zb_v"

    @pytest.mark.parametrize(
        ("pipeline", "placement", "said"),
        [
            (
                "gpipe",
                (0, 1),
                r"for 'train' in .* names a pipeline that cannot be had\. A schedule is one of .*'gpipe'",
            ),
            ("zb_v", (0, 1), r"on which 'zb_v' does not run\. Change its 'placement' back, or make the plan anew"),
        ],
    )
    def test_auto_takes_none_that_does_not_run(
        self, running: Callable[..., None], tmp_path: Path, pipeline: str, placement: tuple[int, ...], said: str
    ) -> None:
        running(tmp_path / "plan.json")
        with pytest.raises(PlacementError, match=said):
            partition_file.schedule_for(self.of(pipeline, placement), "auto", None)

    def test_one_that_there_is_not_is_refused(self, running: Callable[..., None], tmp_path: Path) -> None:
        """Bug: with another in the configuration the plan was said to be made for it."""
        running(tmp_path / "plan.json")
        with pytest.raises(
            PlacementError, match=r"names a pipeline that cannot be had\. A schedule is one of .*'gpipe'"
        ):
            partition_file.schedule_for(self.of("gpipe", (0, 1)), "interleaved", None)

    def test_another_that_runs_on_its_chunks_is_said(
        self, running: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        running(tmp_path / "plan.json")
        capsys.readouterr()
        assert partition_file.schedule_for(self.of("interleaved", (0, 1)), "interleaved", (0, 1)) == "interleaved"
        assert capsys.readouterr().err == ""
        assert partition_file.schedule_for(self.of("zb_v", (0, 1, 1, 0)), "interleaved", None) == "interleaved"
        assert "was made for pipeline 'zb_v'; its layers stay where they are" in capsys.readouterr().err

    def test_one_that_does_not_is_refused(self, running: Callable[..., None], tmp_path: Path) -> None:
        running(tmp_path / "plan.json")
        with pytest.raises(PlacementError, match=r"on which 'zb_v' does not run. Set pipeline to 'interleaved'"):
            partition_file.schedule_for(self.of("interleaved", (0, 1)), "zb_v", None)

    def test_chunks_of_an_earlier_step_stay(self, running: Callable[..., None], tmp_path: Path) -> None:
        running(tmp_path / "plan.json")
        with pytest.raises(PlacementError, match=r"has chunks on partitions \[0, 1\], and what an earlier step placed"):
            partition_file.schedule_for(self.of("interleaved", (0, 1)), "interleaved", (1, 0))
