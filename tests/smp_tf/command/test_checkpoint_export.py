"""`smp-tf checkpoint export`: files with the bits of a checkpoint, and what it says where it cannot make one.

A checkpoint of several partitions is exported in tests/distributed/test_checkpoints.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import smp_tf as smp
from smp_tf.command import main as command_line
from smp_tf.command.named_function import named_function
from tests.full_only import params

SCRIPT = """
import smp_tf as smp
import tf_keras
from tf_keras import layers

def build(width=4):
    inputs = layers.Input((3,))
    hidden = layers.BatchNormalization(name="normal")(layers.Dense(width, activation="tanh", name="hidden")(inputs))
    return tf_keras.Model(inputs, layers.Dense(2, name="head")(hidden), name="net")

def wrapped():
    return smp.DistributedModel(build)

def compiled():
    model = build()
    model.compile(tf_keras.optimizers.Adam(0.01), loss="mse")
    return model

def with_momentum():
    model = build()
    model.compile(tf_keras.optimizers.SGD(0.01, momentum=0.9), loss="mse")
    return model

def wider():
    model = build(5)
    return tf_keras.Sequential([tf_keras.Input((3,)), *model.layers[1:3], layers.Dense(2), layers.Dense(1)], name="net")

class Net(tf_keras.Model):
    def __init__(self):
        super().__init__(name="own")
        self.hidden, self.head = layers.Dense(4, name="hidden"), layers.Dense(2, name="head")

    def call(self, x):
        return self.head(self.hidden(x))

def with_inputs():
    import numpy as np
    return Net(), np.zeros([8, 3], np.float32)

def large():
    wide = [layers.Dense(2000, use_bias=False, name=f"d{n}") for n in range(6)]
    return tf_keras.Sequential([tf_keras.Input((2000,)), *wide], name="large")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "exported_script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def made(script: Path, init: Callable[..., None]) -> Callable[[str], Any]:
    """What a function of the script makes, while smp_tf runs."""
    init()
    return lambda name: named_function(f"{script}:{name}")()


def save(folder: Path, step: int = 1, **models: Any) -> list[Any]:
    """Saves models with their initial weights, and returns the weights of the first."""
    [first, *_] = [model.get_weights() for model in models.values()]
    smp.CheckpointManager(tf.train.Checkpoint(**models), folder).save(step)
    return list(first)


def export(folder: Path, out: Path, script: Path, name: str, *options: str) -> int:
    """Runs the command as a process of its own would, after the job."""
    smp.shutdown()
    arguments = [str(folder), str(out), "--model", f"{script}:{name}", *options]
    return command_line.main(["checkpoint", "export", *arguments])


@pytest.mark.parametrize("name", ["build", pytest.param("wrapped", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "out", params(["o.keras", "folder", "o.h5", "o.weights.h5"], ["folder", "o.h5", "o.weights.h5"])
)
def test_a_file_has_the_bits_of_the_checkpoint(
    name: str, out: str, made: Callable[[str], Any], script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = save(tmp_path / "c", model=smp.DistributedModel(made("build")))
    smp.CheckpointManager(tf.train.Checkpoint(number=tf.Variable(1)), tmp_path / "c", checkpoint_name="other").save()
    assert export(tmp_path / "c", tmp_path / out, script, name) == 0
    assert f"wrote {tmp_path / out}: 8 weights of ckpt-1\n" in capsys.readouterr().err
    if out == "o.weights.h5":
        plain = named_function(f"{script}:build")()
        plain.load_weights(tmp_path / out)
    else:
        plain = tf_keras.models.load_model(tmp_path / out)
    assert all(map(np.array_equal, plain.get_weights(), wanted))
    assert plain(np.ones([2, 3], np.float32)).shape == (2, 2)


@pytest.mark.parametrize("out", params(["o.keras", "o.h5"], ["o.h5"]))
def test_the_optimizer_s_state_is_written_on_request(
    out: str, made: Callable[[str], Any], script: Path, tmp_path: Path
) -> None:
    model = smp.DistributedModel(made("compiled"))
    x = np.random.default_rng(1).standard_normal((8, 3)).astype(np.float32)
    model.fit(x, x[:, :2], batch_size=4, epochs=1, verbose=0)
    # The callback's checkpoint has the optimizer below the model.
    smp.CheckpointManager(tf.train.Checkpoint(model=model), tmp_path / "c").save()
    kept = [variable.numpy() for variable in model.optimizer.variables]
    expected = model.fit(x, x[:, :2], batch_size=8, epochs=1, verbose=0).history["loss"]
    assert export(tmp_path / "c", tmp_path / out, script, "compiled", "--optimizer") == 0
    plain = tf_keras.models.load_model(tmp_path / out)
    assert len(kept) == 2 * 6 + 1
    assert all(map(np.array_equal, [variable.numpy() for variable in plain.optimizer.variables], kept))
    went_on = plain.fit(x, x[:, :2], batch_size=8, epochs=1, verbose=0).history["loss"]
    np.testing.assert_allclose(went_on, expected, rtol=1e-6)


def test_a_model_that_does_not_fit_is_told_with_both_sides_weights(
    made: Callable[[str], Any], script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "c", model=smp.DistributedModel(made("build")))
    assert export(tmp_path / "c", tmp_path / "o.keras", script, "wider") == 1
    said = capsys.readouterr().err
    assert f"smp-tf: ckpt-1 holds another model at 'model/wrapped' than {script}:wider makes.\n" in said
    assert "\n  only in the model: layer_with_weights-3/bias, layer_with_weights-3/kernel\n" in said
    assert "layer_with_weights-0/bias is float32[5] in the model and float32[4] there" in said
    assert not (tmp_path / "o.keras").exists()
    # What the checkpoint has and the model has not.
    save(tmp_path / "more", model=smp.DistributedModel(made_again(script, "wider")))
    assert export(tmp_path / "more", tmp_path / "o.keras", script, "build") == 1
    said = capsys.readouterr().err
    assert "\n  only in the checkpoint: layer_with_weights-3/bias, layer_with_weights-3/kernel\n" in said


def made_again(script: Path, name: str) -> Any:
    smp.init({"partitions": 1, "seed": 5})
    return named_function(f"{script}:{name}")()


def test_damage_and_what_is_not_there_are_told(
    made: Callable[[str], Any], script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "c", 3, model=smp.DistributedModel(made("build")))
    [path] = (tmp_path / "c" / "mp_rank_0").glob("*.data-*")
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    out = tmp_path / "o.keras"
    assert export(tmp_path / "c", out, script, "build") == 1
    assert f" of checkpoint ckpt-3 cannot be read from {path}; the file is damaged" in capsys.readouterr().err
    path.write_bytes(data[:-1])
    assert export(tmp_path / "c", out, script, "build") == 1
    assert f"smp-tf: The file {path} of checkpoint ckpt-3 has " in capsys.readouterr().err
    assert export(tmp_path / "c", out, script, "build", "--step", "4") == 1
    assert "There is no checkpoint ckpt-4 in" in capsys.readouterr().err
    assert export(tmp_path / "c", out, script, "build", "--name", "best") == 1
    assert "There is no checkpoint of the name 'best'" in capsys.readouterr().err
    (tmp_path / "c" / "ckpt-3.json").write_text("{")
    assert export(tmp_path / "c", out, script, "build") == 1
    assert "ckpt-3.json is damaged or truncated" in capsys.readouterr().err
    assert export(tmp_path / "none", out, script, "build") == 2
    assert export(tmp_path / "c", tmp_path / "o.weights.h5", script, "compiled", "--optimizer") == 2
    assert export(tmp_path / "c", tmp_path / "none" / "o.keras", script, "build") == 2
    assert not out.exists()


@pytest.mark.full
def test_an_optimizer_that_is_not_there_is_told(
    made: Callable[[str], Any], script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = smp.DistributedModel(made("build"))
    save(tmp_path / "c", model=model)
    assert export(tmp_path / "c", tmp_path / "o.keras", script, "compiled", "--optimizer") == 1
    assert "ckpt-1 holds no optimizer's slots for this model. Leave out --optimizer." in capsys.readouterr().err
    smp.init({"partitions": 1, "seed": 5})
    trained = smp.DistributedModel(named_function(f"{script}:compiled")())
    trained.fit(np.ones([4, 3], np.float32), np.ones([4, 2], np.float32), verbose=0)
    checkpoint = tf.train.Checkpoint(model=trained, optimizer=trained.optimizer)
    smp.CheckpointManager(checkpoint, tmp_path / "trained").save()
    assert export(tmp_path / "trained", tmp_path / "o.keras", script, "build", "--optimizer") == 1
    assert f"{script}:build makes a model without an optimizer" in capsys.readouterr().err
    assert export(tmp_path / "trained", tmp_path / "o.keras", script, "with_momentum", "--optimizer") == 1
    said = capsys.readouterr().err
    assert f"ckpt-1 holds slots of another optimizer than {script}:with_momentum compiles with." in said
    assert "only in the checkpoint: model/wrapped/layer_with_weights-0/bias/.OPTIMIZER_SLOT/optimizer/velo" in said


@pytest.mark.full
def test_of_several_models_one_is_named(
    made: Callable[[str], Any], script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (smp.DistributedModel(made("build")) for _ in range(2))
    wanted = save(tmp_path / "c", second=second, first=first)
    out = tmp_path / "o.keras"
    assert export(tmp_path / "c", out, script, "build") == 1
    said = capsys.readouterr().err
    assert "ckpt-1 holds several such models: first/wrapped, second/wrapped. Name one with --at." in said
    assert export(tmp_path / "c", out, script, "build", "--at", "second") == 0
    assert all(map(np.array_equal, tf_keras.models.load_model(out).get_weights(), wanted))


@pytest.mark.full
def test_a_model_that_does_not_know_its_inputs_is_called_once(
    made: Callable[[str], Any], script: Path, tmp_path: Path
) -> None:
    model, inputs = made("with_inputs")
    model = smp.DistributedModel(model)
    model.build((None, 3))
    wanted = save(tmp_path / "c", **{"a.b": model})
    assert export(tmp_path / "c", tmp_path / "folder", script, "with_inputs") == 0
    loaded = tf_keras.models.load_model(tmp_path / "folder")
    assert all(map(np.array_equal, loaded.get_weights(), wanted))
    served = tf.saved_model.load(str(tmp_path / "folder")).signatures["serving_default"]
    np.testing.assert_allclose(served(tf.constant(inputs))["output_0"], loaded(inputs))


MEASURED = """
import sys
from pathlib import Path
import tensorflow as tf
import smp_tf as smp
from smp_tf.command.main import main
from smp_tf.command.named_function import named_function

folder, script, *outs = sys.argv[1:]

def status(name):
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":")]
    return int(line.split()[1]) * 1024

if not outs:
    smp.init({"partitions": 1, "seed": 1})
    model = smp.DistributedModel(named_function(f"{script}:large"))
    model.get_weights()
    smp.CheckpointManager(tf.train.Checkpoint(model=model), folder).save()
    sys.exit()
import smp_tf.offline.export
smp.init({"partitions": 1, "seed": 1})
smp.shutdown()
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
assert main(["checkpoint", "export", folder, outs[0], "--model", f"{script}:large"]) == 0
print("@@", status("VmHWM") - before)
"""


@pytest.mark.full
@pytest.mark.parametrize("out", ["o.keras", "o.h5", "o.weights.h5", "folder"])
def test_no_more_than_the_model_and_one_weight_is_in_memory(out: str, script: Path, tmp_path: Path) -> None:
    """Six weights of 16 MB each."""
    code = tmp_path / "measured.py"
    code.write_text(MEASURED)
    for outs in ([], [str(tmp_path / out)]):
        ended = subprocess.run(
            [sys.executable, str(code), str(tmp_path / "c"), str(script), *outs],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert ended.returncode == 0, ended.stderr
    [line] = [line for line in ended.stdout.splitlines() if line.startswith("@@")]
    peak, weight = int(line.split()[1]), 2000 * 2000 * 4
    # The model, the largest weight, and what Keras and TensorFlow need to write a small model.
    assert peak < 6 * weight + weight + 48e6, f"{peak / 1e6:.0f} MB"
