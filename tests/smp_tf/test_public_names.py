"""`import smp_tf` is cheap, sets what must be set, and offers exactly its public names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import quick_import

pytestmark = pytest.mark.large

ROOT = Path(__file__).resolve().parents[2]


def run(code, **environment):
    """Runs Python code in a fresh process and returns what it printed, or its error's last line."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("TF_USE_LEGACY_KERAS", "HOROVOD_DYNAMIC_PROCESS_SETS")
    }
    done = subprocess.run(
        [sys.executable, "-c", quick_import.CODE + code],
        env={**clean, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def test_import_loads_neither_tensorflow_nor_horovod():
    code = """
import sys, smp_tf, smp_tf.pipeline.schedules.schedule, smp_tf.job.topology, smp_tf.config.config
print([name for name in ("tensorflow", "tf_keras", "horovod", "numpy") if name in sys.modules])
"""
    assert run(code) == "[]"


def test_import_sets_the_environment():
    code = """
import os, smp_tf
print(os.environ["TF_USE_LEGACY_KERAS"], os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"])
"""
    assert run(code) == "1 1"
    assert run(code, TF_USE_LEGACY_KERAS="0") == "0 1"


def test_every_public_name_resolves_and_no_other():
    code = """
import smp_tf
assert len(smp_tf.__all__) == 49
assert set(smp_tf.__all__) <= set(dir(smp_tf))
for name in smp_tf.__all__:
    getattr(smp_tf, name)
print(hasattr(smp_tf, "no_such_name"))
"""
    assert run(code) == "False"


def test_type_checkers_see_the_public_names():
    """They carry out the statements that `import smp_tf` only reads."""
    code = """
import smp_tf, smp_tf.public_names as seen
for name in smp_tf.__all__:
    assert getattr(seen, name) is getattr(smp_tf, name), name
print(sorted(name for name in vars(seen) if name[0] != "_" and name != "annotations") == smp_tf.__all__)
"""
    assert run(code) == "True"


@pytest.mark.parametrize(
    ("code", "environment", "expected"),
    [
        pytest.param(
            *("import tensorflow, smp_tf; smp_tf.init()", {}, "above `import tensorflow as tf`"), marks=pytest.mark.full
        ),
        ("import smp_tf; smp_tf.init()", {"TF_USE_LEGACY_KERAS": "0"}, "TF_USE_LEGACY_KERAS=0"),
        ("import smp_tf; smp_tf.rank()", {}, "Call smp.init() first"),
        (
            "import horovod.tensorflow as hvd; hvd.init(); import smp_tf; smp_tf.init()",
            {"TF_USE_LEGACY_KERAS": "1"},
            "Put `import smp_tf as smp` above `hvd.init()`",
        ),
        pytest.param(
            *("import smp_tf; smp_tf.init()", {"PMI_SIZE": "2"}, "but Horovod sees only this one"),
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_wrong_start_is_told_with_its_fix(code, environment, expected):
    assert expected in run(code, **environment)


def test_a_horovod_that_the_script_starts_below_the_import_is_taken_as_it_is():
    code = """
import smp_tf, horovod.tensorflow as hvd
hvd.init()
smp_tf.init()
hvd.init()
print(smp_tf.size(), hvd.size())
"""
    assert run(code) == "1 1"


def test_tensorflow_first_is_fine_with_the_variable_set():
    code = "import tensorflow, smp_tf; smp_tf.init(); print(smp_tf.size(), smp_tf.mp_size())"
    assert run(code, TF_USE_LEGACY_KERAS="1") == "1 1"


def test_a_function_named_like_a_submodule_stays_a_function():
    """`smp.average_gradients` was the module of that name once something had imported it."""
    code = """
import importlib, pathlib, smp_tf
modules = {path.stem for folder in smp_tf.__path__ for path in pathlib.Path(folder).iterdir()}
alike = sorted(modules & set(smp_tf.__all__))
for name in alike:
    importlib.import_module(f"smp_tf.{name}")
print([(name, callable(getattr(smp_tf, name))) for name in alike if name != "callbacks"])
"""
    assert run(code) == "[('partition', True)]"
