"""The manager: what it saves and keeps, what it restores when, and what it refuses."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf import announce as announcing
from smp_tf.checkpoint import folder_lock, pending, restore, writing
from smp_tf.checkpoint import manager as checkpointing
from smp_tf.checkpoint import tensors as checkpoint_tensors
from smp_tf.errors import CheckpointError, RankMismatchError
from smp_tf.job import exchange, runtime
from tests.full_only import params

pytestmark = pytest.mark.large

X = np.arange(24, dtype=np.float32).reshape(8, 3) / 10.0


@pytest.fixture(autouse=True)
def _initialised(init: Callable[..., None]) -> None:
    init(microbatches=2)


class Net(smp.DistributedModel):
    def __init__(self, width: int = 4, **dense: Any) -> None:
        super().__init__()
        self.hidden = layers.Dense(width, activation="tanh", **dense)
        self.drop = layers.Dropout(0.3)
        self.head = layers.Dense(2)

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        return self.head(self.drop(self.hidden(x), training=training))


class Training:
    """A model, an optimizer, and what trains and evaluates them."""

    def __init__(self, model: smp.DistributedModel | None = None, eager: bool = False, **objects: Any) -> None:
        self.model = model or Net()
        self.optimizer = tf_keras.optimizers.Adam(0.05)
        self.checkpoint = tf.train.Checkpoint(model=self.model, optimizer=self.optimizer, **objects)

        @smp.step
        def step(x: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.model(x, training=True) - 1.0) ** 2)
            return tape.gradient(loss, self.model.trainable_variables), loss

        @smp.step
        def predict(x: tf.Tensor) -> tf.Tensor:
            return self.model(x, training=False)

        def train(x: tf.Tensor) -> tf.Tensor:
            gradients, loss = step(x)
            sums = [g.accumulate() for g in gradients]
            self.optimizer.apply_gradients(zip(sums, self.model.trainable_variables, strict=True))
            return loss.reduce_mean()

        self.train = train if eager else tf.function(train)
        self.predict = predict

    def losses(self, *offsets: float) -> list[float]:
        return [float(self.train(X + np.float32(offset))) for offset in offsets]


def manager_of(training: Training, folder: Path, **options: Any) -> smp.CheckpointManager:
    return smp.CheckpointManager(training.checkpoint, folder, **options)


def saved(folder: Path, **objects: Any) -> list[float]:
    """Saves a training after two steps; returns the losses of the two after them."""
    training = Training(**objects)
    training.losses(0, 1)
    manager_of(training, folder).save()
    return training.losses(2, 3)


def new_process(seed: int = 5) -> None:
    """Begins anew, as a job that is started again: masks are told apart by which step functions were called before."""
    smp.shutdown()
    smp.init({"partitions": 1, "microbatches": 2, "seed": seed})


def names(paths: list[str]) -> list[str]:
    return [Path(path).name for path in paths]


class TestManager:
    @pytest.mark.parametrize("name", ["a/b", "", "..", "/a"])
    def test_a_name_that_is_a_path_is_refused(self, name: str, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"are called before their number, and no path\. Received: "):
            smp.CheckpointManager(tf.train.Checkpoint(), tmp_path, checkpoint_name=name)

    def test_is_tensorflows(self, tmp_path: Path) -> None:
        training = Training()
        manager = manager_of(training, tmp_path / "a" / "b")
        assert isinstance(manager, tf.train.CheckpointManager)
        assert manager.checkpoint is training.checkpoint
        assert (manager.directory, manager.checkpoint_interval) == (str(tmp_path / "a" / "b"), None)
        assert (manager.checkpoints, manager.latest_checkpoint) == ([], None)
        training.losses(0)
        assert manager.save() == str(tmp_path / "a" / "b" / "ckpt-1")

    def test_numbers_and_keeps_and_finds(self, tmp_path: Path) -> None:
        training = Training()
        training.losses(0)
        manager = manager_of(training, tmp_path, max_to_keep=2, checkpoint_name="net")
        assert names([manager.save(), manager.save(tf.constant(7)), manager.save()]) == ["net-1", "net-7", "net-3"]
        assert names(manager.checkpoints) == ["net-7", "net-3"]
        again = manager_of(training, tmp_path, checkpoint_name="net")
        assert names([*again.checkpoints, again.latest_checkpoint]) == ["net-7", "net-3", "net-3"]
        assert manager_of(training, tmp_path).checkpoints == []
        assert len(list((tmp_path / "mp_rank_0").iterdir())) == 4

    def test_goes_on_numbering_after_a_restore(self, tmp_path: Path) -> None:
        saved(tmp_path)
        training = Training()
        manager = manager_of(training, tmp_path)
        manager.restore()
        training.losses(0)
        assert names([manager.save()]) == ["ckpt-2"]

    def test_saves_at_intervals(self, tmp_path: Path) -> None:
        training, steps = Training(), tf.Variable(0)
        training.losses(0)
        manager = manager_of(training, tmp_path, step_counter=steps, checkpoint_interval=3)
        told = []
        for number in range(6):
            steps.assign(number)
            told.append(manager.save())
        assert [path and Path(path).name for path in told] == ["ckpt-1", None, None, "ckpt-2", None, None]
        assert manager.save(check_interval=False) is not None
        assert manager.save(check_interval=False) is None

    def test_keeps_one_in_so_many_hours_for_good(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [0.0]
        for module in (checkpointing, writing):
            monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: now[0]))
        value = tf.Variable(0)
        checkpoint = tf.train.Checkpoint(value=value)
        manager = smp.CheckpointManager(checkpoint, tmp_path, max_to_keep=1, keep_checkpoint_every_n_hours=1.5)
        for hour in (1, 2, 3, 4, 5):
            now[0] = hour * 3600.0
            value.assign(hour)
            manager.save()
        assert names([*manager.checkpoints, manager.latest_checkpoint]) == ["ckpt-5", "ckpt-5"]
        assert sorted(path.stem for path in tmp_path.glob("*.json")) == ["ckpt-2", "ckpt-4", "ckpt-5"]
        manager.restore("ckpt-2")
        assert value.numpy() == 2
        with pytest.raises(ValueError, match=r"is a number of hours, or None to keep none for good. Received: 0"):
            smp.CheckpointManager(checkpoint, tmp_path, keep_checkpoint_every_n_hours=0)

    def test_initializes_where_there_is_nothing(self, tmp_path: Path) -> None:
        training, called = Training(), []
        manager = manager_of(training, tmp_path, init_fn=lambda: called.append(1))
        assert manager.restore_or_initialize() is None
        assert called == [1]
        training.losses(0)
        manager.save()
        assert names([manager.restore_or_initialize()]) == ["ckpt-1"]
        assert called == [1]

    def test_a_failed_save_is_an_error_and_leaves_what_was_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        training = Training()
        training.losses(0)
        manager = manager_of(training, tmp_path)
        manager.save()

        def full(*args: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(checkpoint_tensors, "sync", full)
            with pytest.raises(CheckpointError) as raised:
                manager.save()
        assert "Checkpoint 'ckpt-2' could not be written:\nrank 0 (host " in str(raised.value)
        assert "OSError: [Errno 28] No space left on device" in str(raised.value)
        assert names(manager.checkpoints) == ["ckpt-1"]
        assert len(list((tmp_path / "mp_rank_0").iterdir())) == 2
        manager.save()
        assert len(list((tmp_path / "mp_rank_0").iterdir())) == 4


class TestRestore:
    @pytest.mark.parametrize("eager", [False, True])
    @pytest.mark.parametrize("seed", [5, 99])
    def test_before_the_first_step(self, eager: bool, seed: int, tmp_path: Path) -> None:
        expected = saved(tmp_path)
        new_process(seed)
        training = Training(eager=eager)
        assert manager_of(training, tmp_path).restore() == str(tmp_path / "ckpt-1")
        assert training.losses(2, 3) == expected

    def test_takes_nothing_so_the_folder_may_be_read_only(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected = saved(tmp_path)
        new_process()
        (tmp_path / ".ckpt.in-use").unlink()
        before = sorted(tmp_path.rglob("*"))

        def refused(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            assert not (flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and str(path).startswith(str(tmp_path)))
            return original(path, flags, *args, **kwargs)

        original = os.open
        monkeypatch.setattr(os, "open", refused)
        training = Training()
        manager_of(training, tmp_path).restore()
        assert training.losses(2, 3) == expected
        assert sorted(tmp_path.rglob("*")) == before

    def test_tells_of_another_job_that_saves_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        manager = smp.CheckpointManager(tf.train.Checkpoint(value=tf.Variable(1)), tmp_path)

        def in_use(directory: str, series: str) -> None:
            raise CheckpointError(f"The folder {directory!r} is in use")

        monkeypatch.setattr(folder_lock, "require_unused", in_use)
        assert manager.restore() is None
        assert (
            f"smp_tf: manager.save() will fail while this is so: The folder '{tmp_path}' is" in capsys.readouterr().err
        )

    def test_with_one_microbatch_runs_as_keras_would(self, tmp_path: Path) -> None:
        smp.shutdown()
        smp.init({"partitions": 1, "seed": 5})
        training = Training()
        training.losses(0)
        manager_of(training, tmp_path).save()
        resumed = Training()
        manager_of(resumed, tmp_path).restore()
        resumed.predict(X)
        for ours, theirs in zip(resumed.model.variables, training.model.variables, strict=True):
            np.testing.assert_array_equal(ours.numpy(), theirs.numpy())

    @pytest.mark.parametrize("prefix", ["ckpt-1", "{}/ckpt-1"])
    def test_by_name_and_by_path(self, prefix: str, tmp_path: Path) -> None:
        value = tf.Variable(1)
        manager = smp.CheckpointManager(tf.train.Checkpoint(value=value), tmp_path)
        manager.save()
        value.assign(2)
        manager.save()
        assert names([manager.restore(restore_prefix=prefix.format(tmp_path))]) == ["ckpt-1"]
        assert value.numpy() == 1
        assert names([manager.restore()]) == ["ckpt-2"]
        assert value.numpy() == 2

    def test_of_nothing_says_so_once(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        announcing._said.clear()
        manager = manager_of(Training(), tmp_path)
        assert [manager.restore(), manager.restore(), manager.restore("ckpt-4")] == [None] * 3
        said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("smp_tf: ")]
        assert said == [
            f"smp_tf: there is no checkpoint in '{tmp_path}'; nothing is restored.",
            f"smp_tf: there is no checkpoint 'ckpt-4' in '{tmp_path}'; nothing is restored.",
        ]

    def test_of_objects_with_state(self, tmp_path: Path) -> None:
        def objects() -> dict[str, Any]:
            table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
            numbers = iter(tf.data.Dataset.range(10))
            return {"table": table, "numbers": numbers, "generator": tf.random.Generator.from_seed(1)}

        old = objects()
        old["table"].insert(["a"], [3])
        next(old["numbers"])
        old["generator"].normal([])
        smp.CheckpointManager(tf.train.Checkpoint(**old), tmp_path).save()
        new = objects()
        smp.CheckpointManager(tf.train.Checkpoint(**new), tmp_path).restore()
        assert new["table"].lookup(tf.constant("a")).numpy() == 3
        assert next(new["numbers"]).numpy() == 1
        assert new["generator"].normal([]).numpy() == old["generator"].normal([]).numpy()

    def test_of_a_model_that_was_built_before_it_was_wrapped(self, tmp_path: Path) -> None:
        def built() -> smp.DistributedModel:
            return smp.DistributedModel(tf_keras.Sequential([layers.Input((3,)), layers.Dense(4), layers.Dense(2)]))

        expected = saved(tmp_path, model=built())
        new_process()
        training = Training(model=built())
        manager_of(training, tmp_path).restore()
        assert training.losses(2, 3) == expected

    def test_evaluation_first_leaves_the_slots_to_the_training_step(self, tmp_path: Path) -> None:
        expected = saved(tmp_path)
        new_process()
        training = Training()
        manager_of(training, tmp_path).restore()
        for _ in range(3):
            training.predict(X)
        assert training.losses(2, 3) == expected

    def test_initializers_do_not_run_for_what_is_restored(self, tmp_path: Path) -> None:
        saved(tmp_path)
        ran = []

        class Noted(tf_keras.initializers.Initializer):
            def __call__(self, shape: Any, dtype: Any = None, **kwargs: Any) -> tf.Tensor:
                ran.append(tf.executing_eagerly())
                return tf.zeros(shape, dtype)

        training = Training(model=Net(kernel_initializer=Noted()))
        manager_of(training, tmp_path).restore()
        training.losses(0)
        # Once in a graph that is thrown away, for its shape.
        assert ran == [False]

    def test_hands_one_survey_on(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        saved(tmp_path)
        made: list[Any] = []

        def counted(root: Any) -> Any:
            made.append(original(root))
            return made[-1]

        original = restore.survey
        monkeypatch.setattr(restore, "survey", counted)
        new_process()
        training = Training()
        manager_of(training, tmp_path).restore()
        assert len(made) == 1
        # The first step makes the model's variables. What comes after it goes by the survey that it has made.
        training.losses(2)
        assert len(made) == 2
        training.losses(3, 4)
        assert len(made) == 2
        assert not bool(pending.current().due)
        # All exists now, so that the call makes the only one.
        manager_of(training, tmp_path).restore()
        training.losses(2, 3)
        assert len(made) == 3

    def test_costs_a_step_one_bool_once_all_is_there(self, tmp_path: Path) -> None:
        saved(tmp_path)
        training = Training()
        manager_of(training, tmp_path).restore()
        training.losses(0, 1)
        restoring = pending.current()
        assert isinstance(restoring, restore.Restore)
        assert not restoring.due
        counted = restoring._steps
        training.losses(0, 1)
        assert restoring._steps == counted == 2


def weights_of(model: smp.DistributedModel) -> list[np.ndarray]:
    return [variable.numpy() for variable in model.variables]


class TestOtherValuesBeforeTheFirstStep:
    """A restore, and weights that are loaded or set: the last call wins."""

    MODELS: dict[str, Callable[[], smp.DistributedModel]] = {  # noqa: RUF012
        "no variables yet": Net,
        "variables": lambda: smp.DistributedModel(
            lambda: tf_keras.Sequential([layers.Input((3,)), layers.Dense(4), layers.Dense(2)])
        ),
        "values": lambda: smp.DistributedModel(
            tf_keras.Sequential([layers.Input((3,)), layers.Dense(4), layers.Dense(2)])
        ),
    }

    @pytest.fixture(params=MODELS)
    def make(self, request: pytest.FixtureRequest) -> Callable[[], smp.DistributedModel]:
        return self.MODELS[request.param]

    @pytest.mark.parametrize(
        ("file", "restore_last"),
        params([("w.h5", False), ("w", True), ("w.h5", True), ("w", False)], [("w.h5", True), ("w", False)]),
    )
    def test_of_a_file(
        self, make: Callable[[], smp.DistributedModel], file: str, restore_last: bool, tmp_path: Path
    ) -> None:
        old = Training(model=make())
        old.losses(0)
        manager_of(old, tmp_path).save()
        saved_then = weights_of(old.model)
        old.losses(1)
        old.model.save_weights(tmp_path / file)
        written_then = weights_of(old.model)
        new_process()
        training = Training(model=make())
        manager = manager_of(training, tmp_path)
        calls = [manager.restore, lambda: training.model.load_weights(tmp_path / file)]
        for call in calls[::-1] if restore_last else calls:
            call()
        training.predict(X)
        expected = saved_then if restore_last else written_then
        for got, value in zip(weights_of(training.model), expected, strict=True):
            np.testing.assert_array_equal(got, value)
        # The slots come from the checkpoint, and nothing is left over.
        training.losses(0, 0)
        manager.save()

    @pytest.mark.parametrize("restore_last", [False, True], ids=["set last", "restore last"])
    @pytest.mark.parametrize("kind", ["variables", "values"])
    def test_of_a_list(self, kind: str, restore_last: bool, tmp_path: Path) -> None:
        old = Training(model=self.MODELS[kind]())
        old.losses(0)
        manager_of(old, tmp_path).save()
        expected = weights_of(old.model) if restore_last else [value + 1.0 for value in weights_of(old.model)]
        given = [value + 1.0 for value in weights_of(old.model)]
        new_process()
        training = Training(model=self.MODELS[kind]())
        calls = [manager_of(training, tmp_path).restore, lambda: training.model.set_weights(given)]
        for call in calls[::-1] if restore_last else calls:
            call()
        training.predict(X)
        for got, value in zip(weights_of(training.model), expected, strict=True):
            np.testing.assert_array_equal(got, value)

    @pytest.mark.parametrize("kind", ["variables", "values"])
    def test_of_a_part(self, kind: str, tmp_path: Path) -> None:
        def named(first: str) -> tf_keras.Sequential:
            return tf_keras.Sequential([layers.Input((3,)), layers.Dense(4, name=first), layers.Dense(2, name="b")])

        make = (lambda: named("a")) if kind == "variables" else named("a")
        old = Training(model=smp.DistributedModel(make))
        old.losses(0)
        manager_of(old, tmp_path).save()
        first = weights_of(old.model)[:2]
        other = named("other")
        other.save_weights(tmp_path / "w.h5")
        new_process()
        training = Training(model=smp.DistributedModel((lambda: named("a")) if kind == "variables" else named("a")))
        manager_of(training, tmp_path).restore()
        training.model.load_weights(tmp_path / "w.h5", by_name=True)
        training.predict(X)
        for got, value in zip(weights_of(training.model), [*first, *other.get_weights()[2:]], strict=True):
            np.testing.assert_array_equal(got, value)

    def test_a_single_variable(self, tmp_path: Path) -> None:
        old = Training(model=self.MODELS["variables"]())
        old.losses(0)
        manager_of(old, tmp_path).save()
        kernel, bias, *_ = weights_of(old.model)
        new_process()
        training = Training(model=self.MODELS["variables"]())
        manager_of(training, tmp_path).restore()
        training.model.variables[0].assign(kernel + 1.0)
        training.predict(X)
        np.testing.assert_array_equal(training.model.variables[0].numpy(), kernel + 1.0)
        np.testing.assert_array_equal(training.model.variables[1].numpy(), bias)


class TestLeftOver:
    def test_is_an_error_in_the_second_step(self, tmp_path: Path) -> None:
        saved(tmp_path, best=tf.Variable(1.0))
        training = Training()
        manager_of(training, tmp_path).restore()
        training.losses(0)
        with pytest.raises(Exception, match=r"holds state that nothing here has taken up: best. Give tf.train"):
            training.losses(0)
        with pytest.raises(CheckpointError, match=r"has taken up: best"):
            manager_of(training, tmp_path).save()
        with pytest.raises(CheckpointError, match=r"has taken up: best"):
            smp.shutdown()

    def test_is_an_error_at_once_when_all_objects_are_there(self, tmp_path: Path) -> None:
        saved(tmp_path, best=tf.Variable(1.0))
        training = Training()
        training.losses(0)
        before = training.model.variables[0].numpy()
        with pytest.raises(CheckpointError, match=r"has taken up: best"):
            manager_of(training, tmp_path).restore()
        np.testing.assert_array_equal(training.model.variables[0].numpy(), before)

    def test_can_be_meant(self, tmp_path: Path) -> None:
        saved(tmp_path, best=tf.Variable(1.0))
        training = Training(other=tf.Variable(3.0))
        manager_of(training, tmp_path).restore(expect_partial=True)
        training.losses(0, 0, 0)
        assert training.checkpoint.other.numpy() == 3.0
        manager_of(training, tmp_path).save()

    def test_waits_for_a_second_model(self, tmp_path: Path) -> None:
        first, second = Training(), Training()
        both = tf.train.Checkpoint(first=first.checkpoint, second=second.checkpoint)
        first.losses(0)
        second.losses(0)
        smp.CheckpointManager(both, tmp_path).save()
        expected = [first.losses(1), second.losses(1)]
        new_process()
        first, second = Training(), Training()
        manager = smp.CheckpointManager(tf.train.Checkpoint(first=first.checkpoint, second=second.checkpoint), tmp_path)
        manager.restore()
        got = [first.losses(1)]
        first.losses(2, 3)
        with pytest.raises(
            CheckpointError, match=r"would lack variables: the model at 'second/model' has not run a step"
        ):
            manager.save()
        assert [*got, second.losses(1)] == expected

    def test_that_a_save_would_lose_is_an_error(self, tmp_path: Path) -> None:
        saved(tmp_path)
        training = Training()
        manager = manager_of(training, tmp_path)
        manager.restore()
        training.predict(X)
        with pytest.raises(CheckpointError, match=r"'ckpt-2' would lose state of checkpoint 'ckpt-1'.*momentums"):
            manager.save()
        training.losses(0)
        manager.save()


class TestMisfit:
    def test_of_shape_at_the_first_step(self, tmp_path: Path) -> None:
        saved(tmp_path)
        training = Training(model=Net(width=5))
        manager_of(training, tmp_path).restore()
        with pytest.raises(CheckpointError) as raised:
            training.losses(0)
        assert "'model/hidden/kernel' is float32[3, 5] here and float32[3, 4] there" in str(raised.value)

    def test_of_dtype_at_once(self, tmp_path: Path) -> None:
        smp.CheckpointManager(tf.train.Checkpoint(value=tf.Variable(1.0)), tmp_path).save()
        manager = smp.CheckpointManager(tf.train.Checkpoint(value=tf.Variable(1)), tmp_path)
        with pytest.raises(CheckpointError, match=r"'value' is int32\[\] here and float32\[\] there. Restore it into"):
            manager.restore()

    def test_what_the_checkpoint_lacks(self, tmp_path: Path) -> None:
        saved(tmp_path)
        manager = manager_of(Training(best=tf.Variable(1.0)), tmp_path)
        with pytest.raises(
            CheckpointError, match=r"lacks best, which tf.train.Checkpoint was given here. To restore what it"
        ):
            manager.restore()

    def test_a_layer_the_checkpoint_lacks_at_the_first_step(self, tmp_path: Path) -> None:
        saved(tmp_path, model=Net(use_bias=False))
        training = Training()
        manager_of(training, tmp_path).restore()
        with pytest.raises(CheckpointError, match=r"lacks model/hidden/bias"):
            training.losses(0)

    def test_an_optimizer_that_was_not_used_before_the_save_begins_anew(self, tmp_path: Path) -> None:
        training = Training()
        training.predict(X)
        manager_of(training, tmp_path).save()
        expected = training.losses(0, 1)
        new_process()
        resumed = Training()
        manager_of(resumed, tmp_path).restore()
        assert resumed.losses(0, 1) == expected


class TestDamage:
    @pytest.mark.parametrize("after", [False, True])
    def test_is_named_and_nothing_is_loaded(self, after: bool, tmp_path: Path) -> None:
        saved(tmp_path)
        [path] = (tmp_path / "mp_rank_0").glob("*.data-*")
        data = bytearray(path.read_bytes())
        data[-20] ^= 1
        path.write_bytes(data)
        training = Training()
        if after:
            training.losses(0)
        before = {v.name: v.numpy() for v in training.model.variables}
        manager = manager_of(training, tmp_path)
        if not after:
            manager.restore()
        damaged = manager.restore if after else lambda: training.losses(0)
        with pytest.raises(CheckpointError, match=f"cannot be read from {path}; the file is damaged"):
            damaged()
        for variable in training.model.variables if after else ():
            np.testing.assert_array_equal(variable.numpy(), before[variable.name])

    def test_of_the_latest_manifest_is_no_silent_step_back(self, tmp_path: Path) -> None:
        value = tf.Variable(1)
        manager = smp.CheckpointManager(tf.train.Checkpoint(value=value), tmp_path)
        manager.save()
        manager.save()
        (tmp_path / "ckpt-2.json").write_text("{")
        with pytest.raises(CheckpointError, match=r"ckpt-2.json is damaged or truncated"):
            manager.restore()
        assert names([manager.restore("ckpt-1")]) == ["ckpt-1"]


class TestRefused:
    def test_what_is_no_checkpoint(self, tmp_path: Path) -> None:
        with pytest.raises(TypeError, match=r"takes a tf.train.Checkpoint, such as .* Received: <.*Net"):
            smp.CheckpointManager(Net(), tmp_path)

    def test_keeping_none(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"max_to_keep"):
            smp.CheckpointManager(tf.train.Checkpoint(), tmp_path, max_to_keep=0)

    def test_a_model_that_has_not_run_a_step(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"the model at 'model' has not run a step yet. Save after the first"):
            manager_of(Training(), tmp_path).save()

    def test_slots_without_their_model(self, tmp_path: Path) -> None:
        training = Training()
        training.losses(0)
        manager = smp.CheckpointManager(tf.train.Checkpoint(optimizer=training.optimizer), tmp_path)
        with pytest.raises(CheckpointError, match=r"'optimizer' has slots of 4 variables that cannot be reached"):
            manager.save()

    def test_options(self, tmp_path: Path) -> None:
        manager = smp.CheckpointManager(tf.train.Checkpoint(), tmp_path)
        with pytest.raises(ValueError, match=r"save takes no options"):
            manager.save(options=tf.train.CheckpointOptions())

    def test_inside_a_function(self, tmp_path: Path) -> None:
        manager = smp.CheckpointManager(tf.train.Checkpoint(value=tf.Variable(1)), tmp_path)
        for method in (manager.save, manager.restore):
            with pytest.raises(CheckpointError, match=r"while a tf.function is traced. Call it outside"):
                tf.function(method)()

    def test_ranks_that_see_different_checkpoints(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        manager = smp.CheckpointManager(tf.train.Checkpoint(value=tf.Variable(1)), tmp_path)
        manager.save()
        other = {"checkpoint": None, "hash of its manifest": None, "problem": ""}
        monkeypatch.setattr(exchange, "allgather_json", lambda value, name: [value, other, other])
        monkeypatch.setattr(type(runtime.current().topology), "describe", lambda self, rank: f"rank {rank}")
        with pytest.raises(RankMismatchError, match=r"checkpoint: rank 0 has 'ckpt-1'; ranks 1 and 2 have None"):
            manager.restore()
