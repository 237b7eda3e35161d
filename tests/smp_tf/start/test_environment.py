"""What a process must be like for smp_tf, and how each thing that is wrong is told with its fix."""

from __future__ import annotations

import os
import sys
import types
import warnings
from pathlib import Path

import pytest

from smp_tf.config.config import Config
from smp_tf.errors import EnvironmentSetupError
from smp_tf.start import environment


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment without the two variables, and a Horovod that was not started too early."""
    # Set first, so that they are put back even where the code under test sets them.
    for name in ("TF_USE_LEGACY_KERAS", "HOROVOD_DYNAMIC_PROCESS_SETS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(environment, "_horovod_started_without_sets", False)
    return monkeypatch


def fake_module(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: object) -> None:
    module = types.ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)


class TestPrepare:
    def test_it_sets_both_variables(self, clean: pytest.MonkeyPatch) -> None:
        environment.prepare()
        assert os.environ["TF_USE_LEGACY_KERAS"] == "1"
        assert os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] == "1"

    def test_the_user_s_choice_of_keras_stays(self, clean: pytest.MonkeyPatch) -> None:
        clean.setenv("TF_USE_LEGACY_KERAS", "0")
        environment.prepare()
        assert os.environ["TF_USE_LEGACY_KERAS"] == "0"

    @pytest.mark.parametrize(
        ("running", "asked", "refused"), [(True, None, True), (True, "1", False), (False, None, False)]
    )
    def test_a_horovod_that_was_started_without_sets_is_refused_later(
        self, clean: pytest.MonkeyPatch, running: bool, asked: str | None, refused: bool
    ) -> None:
        fake_module(clean, "horovod.tensorflow", is_initialized=lambda: running)
        if asked is not None:
            clean.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", asked)
        environment.prepare()
        if refused:
            with pytest.raises(EnvironmentSetupError, match=r"`import smp_tf as smp` above `hvd\.init\(\)`"):
                environment.require_dynamic_process_sets()
        else:
            environment.require_dynamic_process_sets()


class TestKeras:
    @pytest.mark.parametrize("value", ["1", "true", "True"])
    def test_what_tensorflow_takes_for_true(self, clean: pytest.MonkeyPatch, value: str) -> None:
        clean.setenv("TF_USE_LEGACY_KERAS", value)
        fake_module(clean, "tensorflow", _tf_uses_legacy_keras=True)
        environment.require_tf_keras()

    @pytest.mark.parametrize("value", ["0", "false", "", "yes"])
    def test_a_variable_that_asks_for_keras_3(self, clean: pytest.MonkeyPatch, value: str) -> None:
        clean.setenv("TF_USE_LEGACY_KERAS", value)
        with pytest.raises(EnvironmentSetupError, match=f"TF_USE_LEGACY_KERAS={value} in the environment asks"):
            environment.require_tf_keras()

    def test_a_tensorflow_that_was_imported_with_keras_3(self, clean: pytest.MonkeyPatch) -> None:
        clean.setenv("TF_USE_LEGACY_KERAS", "1")
        fake_module(clean, "tensorflow", _tf_uses_legacy_keras=False)
        with pytest.raises(EnvironmentSetupError, match="`import smp_tf as smp` above `import tensorflow as tf`"):
            environment.require_tf_keras()

    def test_tensorflow_really_notes_which_keras_it_took(self) -> None:
        import tensorflow as tf

        assert tf._tf_uses_legacy_keras is True


class TestInstalled:
    def test_what_is_here_will_do(self) -> None:
        assert environment.require_tensorflow().__name__ == "tensorflow"

    def test_no_tensorflow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "tensorflow", None)
        with pytest.raises(EnvironmentSetupError, match="pip install tensorflow-cpu") as raised:
            environment.require_tensorflow()
        assert sys.executable in str(raised.value)

    def test_no_tf_keras(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake_module(monkeypatch, "tensorflow", __version__="2.19.1", _tf_uses_legacy_keras=True)
        monkeypatch.setitem(sys.modules, "tf_keras", None)
        with pytest.raises(EnvironmentSetupError, match=r"pip install tf_keras~=2\.19\.0"):
            environment.require_tensorflow()

    def test_an_import_that_fails_inside_tensorflow_is_not_hidden(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "tensorflow.py").write_text("import something_that_is_not_there")
        monkeypatch.delitem(sys.modules, "tensorflow")
        monkeypatch.syspath_prepend(str(tmp_path))
        with pytest.raises(ModuleNotFoundError, match="something_that_is_not_there"):
            environment.require_tensorflow()


class TestVersion:
    @pytest.mark.parametrize("version", ["2.16.0", "2.18.1", "2.21.0", "2.21.3-dev"])
    def test_a_tested_one_is_silent(self, version: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            environment.check_tensorflow_version(version)

    @pytest.mark.parametrize("version", ["2.15.1", "1.15.0", "2.9.0"])
    def test_an_older_one_is_refused(self, version: str) -> None:
        with pytest.raises(EnvironmentSetupError) as raised:
            environment.check_tensorflow_version(version)
        assert str(raised.value) == (
            f"smp_tf needs TensorFlow 2.16 to 2.21; this is {version}. Install it with: "
            "pip install 'tensorflow-cpu==2.21.*'"
        )

    @pytest.mark.parametrize("version", ["2.22.0rc0", "3.0.0"])
    def test_a_newer_one_is_said(self, version: str) -> None:
        with pytest.warns(UserWarning, match=f"tested with TensorFlow 2.16 to 2.21; this is {version}"):
            environment.check_tensorflow_version(version)

    def test_what_is_no_version(self) -> None:
        with pytest.raises(EnvironmentSetupError, match=r"reads 'unknown', not major\.minor"):
            environment.check_tensorflow_version("unknown")


@pytest.mark.parametrize(
    ("partitions", "given", "cycle_time"),
    [
        (None, {}, "50"),
        (None, {"HOROVOD_SIZE": "4"}, "50"),
        (1, {}, "50"),
        (4, {"HOROVOD_SIZE": "4"}, "50"),
        (2, {"OMPI_COMM_WORLD_SIZE": "2"}, "50"),
        (2, {"HOROVOD_SIZE": "4"}, None),
        (1, {"PMI_SIZE": "2"}, None),
        (None, {"HOROVOD_CYCLE_TIME": "3.5"}, "3.5"),
    ],
)
def test_horovods_thread_rests_where_there_is_one_replica(
    partitions: int | None, given: dict[str, str], cycle_time: str | None
) -> None:
    variables = dict(given)
    environment.rest_horovod(partitions, variables)
    assert variables.get("HOROVOD_CYCLE_TIME") == cycle_time


class TestHorovodsPatience:
    """It once ended a job in which a rank was stopped for 30 s, or started so late."""

    @pytest.fixture(autouse=True)
    def nothing_of_ours(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(environment, "_patience_is_ours", False)

    @pytest.mark.parametrize(("stall_timeout", "patience"), [(1800.0, "3660"), (0.5, "61"), (1e12, "100000000")])
    def test_it_is_longer_than_stall_timeout(self, stall_timeout: float, patience: str) -> None:
        variables = {"HOROVOD_SIZE": "2"}
        environment.make_horovod_wait(stall_timeout, variables)
        assert variables == {"HOROVOD_SIZE": "2", "HOROVOD_GLOO_TIMEOUT_SECONDS": patience}

    def test_one_that_the_import_has_set_follows_the_configuration(self) -> None:
        variables = {"HOROVOD_SIZE": "2"}
        environment.make_horovod_wait(1800.0, variables)
        environment.make_horovod_wait(40.0, variables)
        assert variables["HOROVOD_GLOO_TIMEOUT_SECONDS"] == "140"

    def test_the_users_own_stays(self) -> None:
        variables = {"HOROVOD_SIZE": "2", "HOROVOD_GLOO_TIMEOUT_SECONDS": "7"}
        environment.make_horovod_wait(1800.0, variables)
        environment.make_horovod_wait(40.0, variables)
        assert variables["HOROVOD_GLOO_TIMEOUT_SECONDS"] == "7"

    def test_one_process_waits_for_nobody(self) -> None:
        variables: dict[str, str] = {}
        environment.make_horovod_wait(1800.0, variables)
        assert variables == {}

    def test_the_import_takes_the_configurations_default(self) -> None:
        assert Config().stall_timeout == environment._USUAL_STALL_TIMEOUT


@pytest.mark.parametrize(
    ("given", "size", "rank"),
    [
        ({}, 1, 0),
        ({"HOROVOD_SIZE": "4", "HOROVOD_RANK": "3"}, 4, 3),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, 2, 1),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, 2, 0),
    ],
)
def test_what_launchers_say_of_the_world(given: dict[str, str], size: int, rank: int) -> None:
    assert (environment.world_size(given), environment.world_rank(given)) == (size, rank)


class TestHorovod:
    def test_without_it_the_message_says_how_to_get_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """`pip install` of the sources alone ended in a ModuleNotFoundError."""
        from smp_tf import collectives
        from smp_tf.collectives import process_sets  # noqa: F401 - it is put back at the end
        from smp_tf.start import parts

        monkeypatch.delitem(sys.modules, "smp_tf.collectives.process_sets")
        monkeypatch.delattr(collectives, "process_sets")
        monkeypatch.setitem(sys.modules, "horovod.tensorflow", None)
        with pytest.raises(EnvironmentSetupError, match=r"needs Horovod, compiled for the TensorFlow .* `make setup`"):
            parts._start_horovod(types.SimpleNamespace())  # type: ignore[arg-type]

    def test_one_without_tensorflow_says_so_too(self) -> None:
        given = ImportError("Extension horovod.tensorflow has not been built: not found\nIf this is not expected, ...")
        assert "Extension horovod.tensorflow has not been built: not found. `make" in str(
            environment.without_horovod(given)
        )

    def test_another_error_stays(self) -> None:
        error = ModuleNotFoundError("No module named 'yaml'", name="yaml")
        assert environment.without_horovod(error) is error
