"""Every key, where it is read from, and what is refused, in which words."""

import dataclasses
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from smp_tf.config import files
from smp_tf.config.config import ENVIRONMENT_VARIABLE, Config, load_config
from smp_tf.config.files import read_mapping
from smp_tf.config.keys import KEYS
from smp_tf.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)


def test_defaults():
    config = load_config()
    assert config.as_json() == {
        "partitions": None,
        "microbatches": 1,
        "pipeline": "interleaved",
        "optimize": "memory",
        "balance_tolerance": 0.05,
        "placement_strategy": "cluster",
        "auto_partition": True,
        "default_partition": 0,
        "contiguous": True,
        "horovod": None,
        "partition_file": None,
        "load_partition": False,
        "chunks_per_rank": None,
        "memory_limit": None,
        "seed": None,
        "stall_timeout": 1800.0,
        "check_inputs": True,
        "check_replicas": True,
        "check_losses": True,
        "gradient_compression": None,
        "shard_optimizer_state": False,
        "gradient_offload": False,
        "optimizer_offload": False,
        "intra_op_threads": None,
        "inter_op_threads": None,
        "recompute": False,
        "xla": False,
    }


def test_the_table_and_the_fields_have_the_same_defaults():
    fields = {field.name: field.default for field in dataclasses.fields(Config)}
    fields.pop("notes")
    assert fields == {name: key.default for name, key in KEYS.items()}
    for name, key in KEYS.items():
        assert key.check(key.default) == key.default, name


def test_one_replica_has_nobody_to_share_slots_with():
    shared = Config(partitions=2, shard_optimizer_state=True)
    assert shared.for_world(4).shard_optimizer_state
    assert shared.for_world(4).notes == ()
    alone = shared.for_world(2)
    assert not alone.shard_optimizer_state
    assert alone.notes == ("With one replica there is nobody to share slots with: shard_optimizer_state is not used.",)


def test_updates_on_the_host_have_gradients_there_and_shares_of_slots():
    config = Config(partitions=2, optimizer_offload=True)
    shared, alone = config.for_world(4), config.for_world(2)
    assert (shared.gradient_offload, shared.shard_optimizer_state) == (True, True)
    assert (alone.gradient_offload, alone.shard_optimizer_state) == (True, False)
    gradients = "Weights are updated on the host (optimizer_offload), so gradient_offload is used too."
    slots = "Weights are updated on the host (optimizer_offload): shard_optimizer_state is used too."
    assert (shared.notes, alone.notes) == ((gradients, slots), (gradients,))
    said = dataclasses.replace(config, gradient_offload=True, shard_optimizer_state=True)
    assert said.for_world(4).notes == ()
    assert Config(partitions=2, gradient_offload=True).for_world(4).notes == ()


def test_without_microbatches_one_process_has_no_gradients_to_add_up():
    alone = Config(gradient_offload=True).for_world(1)
    assert not alone.gradient_offload
    assert alone.notes == (
        "With one process and one microbatch no gradients are added up: gradient_offload is not used.",
    )
    assert Config(gradient_offload=True, microbatches=2).for_world(1).gradient_offload


@pytest.mark.parametrize("name", ["gradient_offload", "optimizer_offload"])
def test_xla_compiles_for_one_device(name: str):
    with pytest.raises(ConfigError, match=f"xla is true, and so is {name}: XLA compiles a function for one device"):
        load_config({"xla": True, name: True}).for_world(2)


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_config().partitions = 2


def test_mapping_with_an_integer_of_numpy():
    config = load_config({"partitions": np.int64(2), "microbatches": 4})
    assert (config.partitions, config.microbatches) == (2, 4)
    assert json.dumps(config.as_json())


def test_json_file_and_yaml_file(tmp_path):
    (tmp_path / "a.json").write_text('{"partitions": 2, "optimize": "speed"}')
    (tmp_path / "a.yaml").write_text("partitions: 2\noptimize: speed\n")
    assert load_config(tmp_path / "a.json") == load_config(str(tmp_path / "a.yaml"))
    assert load_config(str(tmp_path / "a.json")).optimize == "speed"


def test_an_empty_yaml_file_is_the_defaults(tmp_path):
    (tmp_path / "a.yml").write_text("# nothing\n")
    assert load_config(tmp_path / "a.yml") == Config()


def test_environment_variable_only_when_nothing_is_passed(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, '{"microbatches": 8}')
    assert load_config().microbatches == 8
    assert load_config({}).microbatches == 1


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ('{"partitions": 2', "a.json", "is not JSON: .* at line 1, column 17"),
        ("[1]", "a.json", "must hold a mapping of keys to values; it holds a list"),
        ('{"partitions": 2, "partitions": 4}', "a.json", "'partitions' is given 2 times"),
        ("partitions: 2\npartitions: 4\n", "a.yaml", "'partitions' is given 2 times"),
        ("{partitions: 2", "a.yaml", "is not YAML: .* at line 1, column 15.$"),
        ("partitions = 2", "a.toml", "must end in .json, .yaml or .yml"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path, content, name, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message) as raised:
        load_config(tmp_path / name)
    assert str(tmp_path / name) in str(raised.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"b\.json does not exist"):
        load_config(tmp_path / "b.json")


def test_the_environment_variable_is_named(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "partitions=2")
    with pytest.raises(ConfigError, match="environment variable SM_HP_MP_PARAMETERS is not JSON"):
        load_config()


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("partition", "partitions"),
        ("micro_batches", "microbatches"),
        ("Pipeline", "pipeline"),
        ("optimise", "optimize"),
        ("placement", "placement_strategy"),
        ("pipeline_parallel", "pipeline_parallel_degree"),
    ],
)
def test_an_unknown_key_names_the_nearest_one(name, near):
    with pytest.raises(ConfigError) as raised:
        load_config({name: 2})
    assert f"{name!r} in smp.init is not a key. Did you mean {near!r}?" in str(raised.value)
    assert "The keys are: auto_partition, balance_tolerance, check_inputs, check_losses, check_replicas," in str(
        raised.value
    )


def test_an_unknown_key_like_no_other():
    with pytest.raises(ConfigError, match=r"'zzz' in smp.init is not a key\. The keys are"):
        load_config({"zzz": 1})


def test_a_key_of_pytorch():
    with pytest.raises(ConfigError, match="data parallelism is the key 'horovod' here"):
        load_config({"ddp": True})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("partitions", 0),
        ("partitions", True),
        ("partitions", 2.0),
        ("partitions", "2"),
        ("microbatches", None),
        ("microbatches", -1),
        ("pipeline", "1f1b"),
        ("pipeline", ["simple"]),
        ("optimize", 1),
        ("balance_tolerance", -0.01),
        ("balance_tolerance", 1.01),
        ("balance_tolerance", float("nan")),
        ("balance_tolerance", True),
        ("balance_tolerance", "5%"),
        ("placement_strategy", "DP"),
        ("placement_strategy", "dpt"),
        ("auto_partition", 1),
        ("default_partition", -1),
        ("contiguous", "true"),
        ("horovod", 0),
        ("partition_file", 3),
        ("partition_file", ""),
        ("load_partition", None),
        ("chunks_per_rank", 0),
        ("memory_limit", 0),
        ("memory_limit", True),
        ("memory_limit", 1.5),
        ("memory_limit", "8G"),
        ("memory_limit", "eight GiB"),
        ("memory_limit", "-8GiB"),
        ("memory_limit", "0.5B"),
        ("seed", -1),
        ("seed", 2**32),
        ("stall_timeout", 0),
        ("stall_timeout", float("nan")),
        ("stall_timeout", float("inf")),
        ("stall_timeout", True),
        ("check_inputs", "no"),
        ("check_replicas", 1),
        ("check_losses", "no"),
        ("gradient_compression", "int8"),
        ("intra_op_threads", 0),
        ("inter_op_threads", 0),
        ("xla", "auto"),
    ],
)
def test_a_value_that_is_not_allowed(name, value):
    with pytest.raises(ConfigError) as raised:
        load_config({name: value})
    message = str(raised.value)
    assert message.startswith(f"{name!r} in smp.init must be {KEYS[name].allowed}; this is ")
    assert repr(value) in message


@pytest.mark.parametrize("strategy", ["cluster", "spread", "DPT", "PDT", "TPD", "PTD"])
def test_placement_strategies(strategy):
    assert load_config({"placement_strategy": strategy}).placement_strategy == strategy


@pytest.mark.parametrize(
    ("given", "count"),
    [
        (17_179_869_184, 17_179_869_184),
        ("17179869184", 17_179_869_184),
        ("16GiB", 17_179_869_184),
        (" 16 gib ", 17_179_869_184),
        ("16GB", 16_000_000_000),
        ("1.5 KiB", 1536),
        ("0.1 TB", 100_000_000_000),
        ("300 MB", 300_000_000),
        ("2TiB", 2_199_023_255_552),
        ("7B", 7),
    ],
)
def test_bytes_as_a_number_or_in_words(given, count):
    assert load_config({"memory_limit": given}).memory_limit == count


class TestPlanFiles:
    def test_a_path_to_write_to_and_one_to_read_from(self, tmp_path):
        assert load_config({"partition_file": tmp_path / "plan.json"}).partition_file == str(tmp_path / "plan.json")
        assert load_config({"partition_file": "plan.json", "load_partition": True}).load_partition is True

    def test_a_plan_to_load_needs_a_file(self):
        with pytest.raises(ConfigError, match=r"load_partition in smp\.init is true, but there is no partition_file"):
            load_config({"load_partition": True})

    def test_a_plan_that_is_loaded_leaves_nothing_to_the_script(self):
        with pytest.raises(ConfigError, match=r"from a file, and auto_partition = false .* Leave one of the two out"):
            load_config({"load_partition": True, "partition_file": "plan.json", "auto_partition": False})

    @pytest.mark.parametrize("load", [False, True])
    def test_with_one_partition_it_is_said_that_the_file_is_left_alone(self, load):
        given = Config(partitions=2, partition_file="plan.json", load_partition=load)
        assert given.for_world(1, launched=False).notes[-1] == (
            "With one partition there is nothing to place: the file plan.json is neither read nor written."
        )
        assert given.for_world(2).notes == ()


def test_not_a_mapping():
    with pytest.raises(ConfigError, match=r"takes a mapping, the path .* this is an int: 2"):
        load_config(2)


def test_alias():
    assert load_config({"pipeline_parallel_degree": 4}).partitions == 4
    assert load_config({"pipeline_parallel_degree": 4, "partitions": 4}).partitions == 4
    with pytest.raises(ConfigError, match=r"'partitions' and 'pipeline_parallel_degree' .* 2 and 4"):
        load_config({"partitions": 2, "pipeline_parallel_degree": 4})


def test_an_ignored_key_is_said():
    config = load_config({"fork": True})
    assert config.notes == ("The key 'fork' in smp.init is ignored: smp_tf never forks.",)
    assert config == Config()


def test_chunks_per_rank_are_those_that_the_schedule_takes() -> None:
    assert load_config({"pipeline": "zb_v"}).for_world(2).chunks_per_rank is None
    assert load_config({"pipeline": "interleaved_1f1b", "chunks_per_rank": 3}).for_world(2).chunks_per_rank == 3
    with pytest.raises(ConfigError, match=r"do not go together\. .*'zb_v' has 2 chunks on each rank"):
        load_config({"pipeline": "zb_v", "chunks_per_rank": 1}).for_world(2)
    with pytest.raises(ConfigError, match=r"do not go together\. .*'interleaved' has 1 chunk on each rank"):
        load_config({"chunks_per_rank": 2}).for_world(2)
    alone = load_config({"pipeline": "zb_v"}).for_world(1, launched=False)
    assert (alone.pipeline, alone.chunks_per_rank) == ("interleaved", None)
    assert alone.notes[-1] == "With one partition there is nothing to schedule: pipeline 'zb_v' is not used."


def test_a_schedule_of_ones_own_says_itself_where_chunks_are(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("0F0 2F0 2B0 0B0\n1F0 1B0\n")
    assert load_config({"pipeline": str(file)}).for_world(2).pipeline == "0F0 2F0 2B0 0B0\n1F0 1B0"
    with pytest.raises(ConfigError, match=r"says itself which chunks each rank has.*Leave chunks_per_rank out"):
        load_config({"pipeline": str(file), "chunks_per_rank": 2}).for_world(2)


class TestOneBit:
    def test_with_one_replica_it_is_said_that_nothing_is_sent(self):
        config = load_config({"gradient_compression": "1bit"}).for_world(2)
        assert config.gradient_compression is None
        assert config.notes[-1] == (
            'With one replica nothing is sent to others: "gradient_compression": "1bit" is not used.'
        )
        over_replicas = load_config({"gradient_compression": "1bit", "partitions": 1}).for_world(2)
        assert (over_replicas.gradient_compression, over_replicas.notes) == ("1bit", ())

    @pytest.mark.parametrize("name", ["shard_optimizer_state", "gradient_offload", "optimizer_offload"])
    def test_what_averages_otherwise_is_refused(self, name):
        given = {"gradient_compression": "1bit", "partitions": 1, name: True}
        with pytest.raises(ConfigError, match=f'gradient_compression is "1bit", and {name} is true: .* Leave out one'):
            load_config(given).for_world(2)
        # With one replica there is nothing that they could disagree on.
        assert load_config(given).for_world(1).gradient_compression is None


class TestForWorld:
    def test_partitions_are_all_processes_by_default(self):
        config = Config().for_world(4)
        assert (config.partitions, config.horovod) == (4, False)

    def test_replicas_turn_data_parallelism_on(self):
        config = Config(partitions=2).for_world(8)
        assert (config.partitions, config.horovod) == (2, True)

    def test_one_process_without_launcher_is_said(self):
        config = Config(partitions=4, microbatches=8).for_world(1, launched=False)
        assert (config.partitions, config.microbatches) == (1, 8)
        assert len(config.notes) == 1
        assert "partitions is 1 instead of 4" in config.notes[0]
        assert "horovodrun -np 4" in config.notes[0]

    def test_one_process_that_asked_for_one_partition_says_nothing(self):
        assert Config(partitions=1).for_world(1, launched=False).notes == ()
        assert Config().for_world(1, launched=False).notes == ()

    def test_one_launched_process_keeps_its_word(self):
        with pytest.raises(ConfigError, match="2 does not divide 1"):
            Config(partitions=2).for_world(1, launched=True)

    def test_partitions_that_do_not_divide(self):
        with pytest.raises(ConfigError) as raised:
            Config(partitions=4).for_world(6)
        assert "4 does not divide 6. With 6 processes it can be 1, 2, 3, 6" in str(raised.value)

    def test_replicas_without_data_parallelism(self):
        with pytest.raises(ConfigError, match="8 processes and 2 partitions make 4 replicas"):
            Config(partitions=2, horovod=False).for_world(8)
        assert Config(partitions=2, horovod=False).for_world(2).horovod is False

    def test_one_process_has_no_other_default_partition(self):
        config = Config(partitions=2, auto_partition=False, default_partition=1).for_world(1, launched=False)
        assert (config.partitions, config.default_partition) == (1, 0)

    def test_default_partition_must_exist(self):
        with pytest.raises(ConfigError, match=r"default_partition is 2, .* below 2"):
            Config(partitions=2, default_partition=2).for_world(2)


def test_a_schedule_of_ones_own_is_its_tasks(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("# mine\n0F0 0F1 0B0 0B1\n\n1F0 1I0 1F1 1I1 1W0 1W1 # gradients of weights at last\n")
    config = load_config({"pipeline": str(file), "microbatches": 2})
    assert config.pipeline == "0F0 0F1 0B0 0B1\n1F0 1I0 1F1 1I1 1W0 1W1"
    assert config.for_world(2).pipeline == config.pipeline
    alone = config.for_world(1, launched=False)
    assert alone.pipeline == "interleaved"
    assert alone.notes[-1].startswith("With one partition there is nothing to schedule")
    with pytest.raises(ConfigError, match=r"is not for 3 partitions and 2 microbatches\. .*one line per rank"):
        config.for_world(3)
    with pytest.raises(ConfigError, match=r"is not for 2 partitions and 4 microbatches\. .*Received: one of 2"):
        load_config({"pipeline": str(file), "microbatches": 4}).for_world(2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, r"mine\.txt: A schedule is a text file that can be read\. .*No such file"),
        ("", r"mine\.txt: A schedule lists the tasks of a rank on a line"),
        ("0F0 0X0", r"mine\.txt, line 1: A task is written as"),
        ("0F0 0B0\n1B0 1F0", r"mine\.txt, line 2: A task comes after what it depends on"),
    ],
)
def test_a_schedule_that_cannot_be_run_is_told(tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "mine.txt"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=f"The schedule of pipeline cannot be run. .*{words}"):
        load_config({"pipeline": str(file)})


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "hosts: [{count: 2, ranks: 1, count: 3}]", "'count' is given 2 times in the file "),
        ("a.yaml", "one: &x {a: 1}\ntwo: *x\nthree: {b: [{c: 1, c: 2}]}", "'c' is given 2 times in the file "),
        ("a.json", '{"hosts": [{"count": 2, "count": 3}]}', "'count' is given 2 times in the file "),
        ("a.json", '{"partitions": 1' + "0" * 5000 + "}", "holds a whole number of thousands of digits, which no"),
        ("a.yaml", "partitions: 1" + "0" * 5000, "holds a whole number of thousands of digits, which no value is."),
        ("a.yaml", "#" * (2**20 + 1), "is larger than 1048576 bytes, which no such file is."),
    ],
)
def test_keys_given_twice_at_any_depth_and_files_without_end_are_refused(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=re.escape(words)):
        read_mapping(tmp_path / name)


def test_many_keys_are_counted_once():
    counted = []

    class Noted(list):
        def count(self, name):
            counted.append(name)
            return super().count(name)

    files._refuse_twins(Noted(map(str, range(10))), "the file a.json")
    assert counted == []


def test_a_pipe_and_a_device_are_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.yaml")
    for path in (tmp_path / "a.yaml", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="cannot be read: it is no file, but a device, a pipe or a socket"):
            read_mapping(path)
