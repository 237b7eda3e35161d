"""Every public name says what it is, takes, gives and raises; and its example runs."""

from __future__ import annotations

import ast
import contextlib
import doctest
import enum
import inspect
import io
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import smp_tf as smp

SECTIONS = ("Args", "Returns", "Yields", "Raises", "Example")


def public() -> Iterator[tuple[str, Any]]:
    """Every public function and class, and the public methods and properties that the classes define."""
    for name in smp.__all__:
        value = getattr(smp, name)
        if isinstance(value, enum.Enum):
            continue  # a member of a class that is here itself
        yield name, value
        if inspect.isclass(value):
            for member, defined in vars(value).items():
                if not member.startswith("_") and (inspect.isfunction(defined) or isinstance(defined, property)):
                    yield f"{name}.{member}", defined


NAMES = dict(public())
CALLABLE = [name for name, value in NAMES.items() if inspect.isfunction(value)]
CLASSES = [name for name, value in NAMES.items() if inspect.isclass(value)]


def sections(name: str) -> dict[str, str]:
    """The parts of a docstring by their headings; what comes before the first under ""."""
    found, heading = {"": ""}, ""
    for line in (inspect.getdoc(NAMES[name]) or "").splitlines():
        if line.removesuffix(":") in SECTIONS and line.endswith(":"):
            heading = line.removesuffix(":")
            found[heading] = ""
        else:
            found[heading] += f"{line}\n"
    return found


def listed(text: str) -> list[str]:
    """The names at the beginning of the entries of a section."""
    return re.findall(r"^ {4}\**([\w.]+)(?:, \w+)*: ", text, re.MULTILINE)


def parameters(value: Any) -> list[str]:
    return [p for p in inspect.signature(inspect.unwrap(value)).parameters if p != "self"]


def raised(value: Any) -> set[str]:
    """The errors that a function raises itself."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(value))))
    found = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc is not None]
    return {ast.unparse(error.func if isinstance(error, ast.Call) else error) for error in found}


@pytest.mark.parametrize("name", NAMES)
def test_it_begins_with_one_sentence(name: str) -> None:
    first, *rest = sections(name)[""].splitlines()
    assert re.fullmatch(r"[A-Z`][^.]*(\.[^ .][^.]*)*\.", first), first
    assert not rest or rest[0] == ""


def is_kerass(name: str) -> bool:
    """Whether a method is one of Keras's or TensorFlow's, whose arguments are told there."""
    owner, _, method = name.partition(".")
    return bool(method) and any(hasattr(base, method) for base in NAMES[owner].__mro__[1:])


@pytest.mark.parametrize("name", CALLABLE)
def test_arguments_results_and_errors_are_told(name: str) -> None:
    value, told = NAMES[name], sections(name)
    if "Args" in told or not is_kerass(name):
        assert listed(told.get("Args", "")) == parameters(value)
    gives = inspect.signature(inspect.unwrap(value)).return_annotation
    if not is_kerass(name):
        assert ("Returns" in told or "Yields" in told) == (gives not in ("None", None))
    assert raised(value) <= set(listed(told.get("Raises", "")))


@pytest.mark.parametrize("name", [n for n in CLASSES if not issubclass(NAMES[n], enum.Enum)])
def test_arguments_of_classes_are_told(name: str) -> None:
    own = vars(NAMES[name]).get("__init__")
    assert listed(sections(name).get("Args", "")) == (parameters(own) if own else ["model"])


class Classifier(smp.DistributedModel):
    """What the examples call `model`."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = tf_keras.layers.Dense(4, activation="relu")
        self.head = tf_keras.layers.Dense(3)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.head(self.hidden(x))


@pytest.fixture(scope="module")
def names() -> Iterator[dict[str, Any]]:
    """What the examples take as given: a training of two microbatches that has begun."""
    tf_keras.utils.disable_interactive_logging()  # of progress bars
    smp.init({"microbatches": 2, "seed": 1})
    model, optimizer = Classifier(), tf_keras.optimizers.Adam()
    model.compile("adam", "mse")
    images, labels = np.ones((8, 5), np.float32), np.zeros(8, np.int64)

    @smp.step
    def forward_backward(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x)))
        return tape.gradient(loss, model.trainable_variables), loss

    @smp.step
    def predict(x: tf.Tensor, y: tf.Tensor) -> Any:
        classes = tf.argmax(model(x), axis=-1)
        return {"classes": classes, "correct": tf.reduce_sum(tf.cast(classes == y, tf.int32))}

    @tf.function
    def train(x: tf.Tensor, y: tf.Tensor) -> None:
        gradients, _ = forward_backward(x, y)
        averages = [gradient.accumulate() for gradient in gradients]
        optimizer.apply_gradients(zip(averages, model.trainable_variables, strict=True))

    train(images, labels)
    yield {
        "smp": smp, "tf": tf, "tf_keras": tf_keras, "model": model, "optimizer": optimizer, "images": images,
        "labels": labels, "inputs": images, "targets": np.zeros((8, 3), np.float32), "x": images, "train": train,
        "forward_backward": forward_backward, "predict": predict,
    }  # fmt: skip
    smp.shutdown()
    tf_keras.utils.enable_interactive_logging()
    tf_keras.backend.clear_session()


def run(name: str, names: dict[str, Any], where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the example of a public name in a folder of its own.

    By hand, since AutoGraph needs the source of a function in a file, where doctest has none.
    """
    monkeypatch.chdir(where)
    monkeypatch.setattr(sys, "displayhook", sys.__displayhook__)
    here, checker = dict(names), doctest.OutputChecker()
    examples = doctest.DocTestParser().get_examples(sections(name)["Example"])
    assert examples
    for number, example in enumerate(examples):
        path = where / f"example_{number}.py"
        path.write_text(example.source)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(example.source, str(path), "single"), here)
        told = printed.getvalue()
        assert checker.check_output(example.want, told, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE), told


EXAMPLES = [name for name in (*CALLABLE, *CLASSES) if "Example" in sections(name) or not is_kerass(name)]
#: Their examples begin or end smp_tf.
OF_THE_WHOLE = ["init", "shutdown"]


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in OF_THE_WHOLE])
def test_the_example_runs(name: str, names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(name, names, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", OF_THE_WHOLE)
def test_the_example_begins_or_ends_smp_tf(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smp.shutdown()
    run(name, {"smp": smp}, tmp_path, monkeypatch)
    smp.shutdown()
