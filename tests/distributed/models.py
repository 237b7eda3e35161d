"""The models whose training must not depend on how it is split, each small and complete.

Nothing here knows smp_tf: the same entry is trained by plain Keras and, split, by smp_tf. An entry
builds its model on a base class that it is given (`tf_keras.Model`, or `smp.DistributedModel` where
it says that it is to be subclassed), makes its batches from the step number alone, and computes its
loss from a model and a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras import layers

SEED = 7
STEPS = 6
# Of an image for `tf_keras.applications`, which halves it five times: the fewest of which two by two are left.
PIXELS = 33

Batch = tuple[np.ndarray, ...]


def called(model: tf_keras.Model, inputs: Sequence[tf.Tensor]) -> Any:
    """What a model makes of its inputs, one tensor or a list of them."""
    return model(inputs[0] if len(inputs) == 1 else list(inputs), training=False)


@dataclass(frozen=True)
class ZooModel:
    """One model with all that it takes to train it.

    Attributes:
        build: makes the model on a base class; entries that are not subclasses ignore it.
        batch: makes the arrays of a step, targets last; a function of the step number.
        loss: the mean loss over the samples of a batch.
        optimizer: makes the optimizer.
        form: how smp_tf is given the model: a subclass, a builder function, or a built model.
        floatx: Keras's float type; float64 is compared to the last digits.
        policy: Keras's mixed precision policy, where it is not the float type.
        weights_compared: False where only losses and predictions say something (Adam in float32
            divides by gradients that are zero but for rounding).
        loose: the tolerance where the arithmetic itself has few digits (bfloat16).
        clip: norm that all gradients together are clipped to, within the step.
        predict: what a model makes of the inputs of a batch, the first half of its arrays.
    """

    name: str
    build: Callable[[type], tf_keras.Model]
    batch: Callable[[int], Batch]
    loss: Callable[[tf_keras.Model, Sequence[tf.Tensor]], tf.Tensor]
    optimizer: Callable[[], tf_keras.optimizers.Optimizer]
    form: Literal["subclass", "builder", "built"] = "builder"
    floatx: str = "float64"
    policy: str | None = None
    weights_compared: bool = True
    loose: float | None = None
    clip: float | None = None
    predict: Callable[[tf_keras.Model, Sequence[tf.Tensor]], Any] = called

    def prepare(self) -> None:
        """Sets Keras's process-wide state for this model: float type, policy, seeds."""
        tf_keras.backend.clear_session()
        tf_keras.backend.set_floatx(self.floatx)
        tf_keras.mixed_precision.set_global_policy(self.policy or self.floatx)
        tf_keras.utils.set_random_seed(SEED)


def forward_backward(entry: ZooModel, model: tf_keras.Model, batch: Sequence[tf.Tensor]) -> tuple[tf.Tensor, list[Any]]:
    """The body of the training step: loss and gradients of one microbatch."""
    with tf.GradientTape() as tape:
        loss = entry.loss(model, batch)
    gradients = tape.gradient(loss, model.trainable_variables)
    if entry.clip is not None:
        gradients, _ = tf.clip_by_global_norm(gradients, entry.clip)
    return loss, gradients


# ---- batches ------------------------------------------------------------------------------------


def _random(step: int) -> np.random.RandomState:
    return np.random.RandomState(1000 + step)


def _features(*shape: int, classes: int, samples: int = 16, floatx: str = "float64") -> Any:
    def batch(step: int) -> Batch:
        random = _random(step)
        x = random.standard_normal((samples, *shape)).astype(floatx)
        return x, random.randint(0, classes, samples).astype(np.int32)

    return batch


def _tokens(length: int, vocabulary: int, samples: int = 16) -> Callable[[int], Batch]:
    def batch(step: int) -> Batch:
        text = _random(step).randint(0, vocabulary, (samples, length + 1)).astype(np.int32)
        return text[:, :-1], text[:, 1:]

    return batch


def _classified_tokens(length: int, vocabulary: int, classes: int) -> Callable[[int], Batch]:
    def batch(step: int) -> Batch:
        random = _random(step)
        tokens = random.randint(0, vocabulary, (16, length)).astype(np.int32)
        return tokens, random.randint(0, classes, 16).astype(np.int32)

    return batch


# ---- losses and optimizers ----------------------------------------------------------------------


def classification(model: tf_keras.Model, batch: Sequence[tf.Tensor]) -> tf.Tensor:
    """Cross-entropy of logits, in the float type of the model's losses."""
    x, target = batch
    logits = tf.cast(model(x, training=True), tf_keras.backend.floatx())
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(target, logits))


def classification_with_model_losses(model: tf_keras.Model, batch: Sequence[tf.Tensor]) -> tf.Tensor:
    """Cross-entropy plus what layers added with `add_loss` and their regularizers."""
    return classification(model, batch) + tf.add_n(model.losses)


def _sgd() -> tf_keras.optimizers.Optimizer:
    return tf_keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True)


def _plain_sgd() -> tf_keras.optimizers.Optimizer:
    return tf_keras.optimizers.SGD(0.05)


def _slow_sgd(rate: float) -> Callable[[], tf_keras.optimizers.Optimizer]:
    # Deep networks with batch normalisation over two samples amplify a difference in the last digit
    # from step to step, the more so the faster they learn: at rate 0.001 and on 32 x 32 pixels, two
    # runs of one process that differ by 1e-15 differ in the first digit after six steps.
    return lambda: tf_keras.optimizers.SGD(rate)


def _adam() -> tf_keras.optimizers.Optimizer:
    return tf_keras.optimizers.Adam(0.003)


# ---- the models ---------------------------------------------------------------------------------


def mlp(base: type) -> tf_keras.Model:
    """Dense layers, one after the other."""

    class MLP(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [layers.Dense(width, activation="tanh") for width in (24, 20, 16, 12)]
            self.head = layers.Dense(5)

        def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
            for layer in self.hidden:
                x = layer(x)
            return self.head(x)

    return MLP()


def cnn(base: type) -> tf_keras.Model:
    """Convolutions with batch normalisation, whose moving averages are written in the step."""

    class CNN(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.convolutions = [layers.Conv2D(width, 3, padding="same") for width in (6, 8, 8)]
            self.norms = [layers.BatchNormalization(momentum=0.8) for _ in self.convolutions]
            self.pool = layers.MaxPool2D()
            self.flatten = layers.GlobalAveragePooling2D()
            self.head = layers.Dense(5)

        def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
            for convolution, norm in zip(self.convolutions, self.norms, strict=True):
                x = tf.nn.relu(norm(convolution(x), training=training))
            return self.head(self.flatten(self.pool(x)))

    return CNN()


def unet(base: type) -> tf_keras.Model:
    """A U: the way down feeds the way up over skips that cross the stages between."""
    image = layers.Input((8, 8, 2))
    down = [layers.Conv2D(6, 3, padding="same", activation="relu", name="down_0")(image)]
    for depth in (1, 2):
        pooled = layers.MaxPool2D(name=f"pool_{depth}")(down[-1])
        convolution = layers.Conv2D(6 + 2 * depth, 3, padding="same", name=f"down_{depth}")
        down.append(layers.ReLU(name=f"relu_{depth}")(convolution(pooled)))
    x = down[-1]
    for depth in (1, 0):
        x = layers.UpSampling2D(name=f"larger_{depth}")(x)
        x = layers.Concatenate(name=f"skip_{depth}")([x, down[depth]])
        x = layers.Conv2D(6, 3, padding="same", activation="relu", name=f"up_{depth}")(x)
    residual = layers.Add(name="residual")([x, down[0]])
    pooled = layers.GlobalAveragePooling2D(name="pool")(residual)
    return tf_keras.Model(image, layers.Dense(5, name="head")(pooled), name="unet")


def _recurrent(make: Callable[..., layers.Layer]) -> Callable[[type], tf_keras.Model]:
    def build(base: type) -> tf_keras.Model:
        # A subclass: Keras would trace the loops of a Sequential once more to build it, and they take long.
        class Recurrent(base):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.recurrent = [make(8, return_sequences=True), make(6)]
                self.hidden = layers.Dense(6, activation="tanh")
                self.head = layers.Dense(5)

            def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
                for layer in self.recurrent:
                    x = layer(x)
                return self.head(self.hidden(x))

        return Recurrent()

    return build


class Block(layers.Layer):
    """A causal transformer block, normalised before each half."""

    def __init__(self, width: int, heads: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.norm_1 = layers.LayerNormalization()
        self.attention = layers.MultiHeadAttention(heads, width // heads)
        self.norm_2 = layers.LayerNormalization()
        self.wide = layers.Dense(2 * width, activation="gelu")
        self.narrow = layers.Dense(width)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        y = self.norm_1(x)
        x += self.attention(y, y, use_causal_mask=True)
        return x + self.narrow(self.wide(self.norm_2(x)))


def gpt(base: type, blocks: int = 1) -> tf_keras.Model:
    """A language model whose output layer is its token embedding."""

    class GPT(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.tokens = layers.Embedding(19, 16)
            self.positions = layers.Embedding(8, 16)
            self.blocks = [Block(16, 2) for _ in range(blocks)]
            self.norm = layers.LayerNormalization()

        def call(self, tokens: tf.Tensor, training: bool = False) -> tf.Tensor:
            x = self.tokens(tokens) + self.positions(tf.range(tf.shape(tokens)[1]))
            for block in self.blocks:
                x = block(x)
            x = self.norm(x)
            return tf.matmul(x, tf.cast(self.tokens.embeddings, x.dtype), transpose_b=True)

    return GPT()


def layer_called_twice(base: type) -> tf_keras.Model:
    """One layer near the input and again near the output."""

    class Twice(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.shared = layers.Dense(12, activation="tanh")
            self.between = [layers.Dense(12, activation="tanh") for _ in range(3)]
            self.head = layers.Dense(5)

        def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
            x = self.shared(x)
            for layer in self.between:
                x = layer(x)
            return self.head(self.shared(x))

    return Twice()


def two_branches(base: type) -> tf_keras.Model:
    """Two inputs, two branches that meet, two outputs."""
    left, right = layers.Input((6,), name="left"), layers.Input((4,), name="right")
    a = layers.Dense(10, activation="tanh", name="left_1")(left)
    a = layers.Dense(10, activation="tanh", name="left_2")(a)
    b = layers.Dense(8, activation="tanh", name="right_1")(right)
    b = layers.Dense(10, activation="tanh", name="right_2")(b)
    both = layers.Dense(9, activation="tanh", name="both")(layers.Concatenate()([a, b]))
    classes = layers.Dense(5, name="classes")(both)
    value = layers.Dense(1, name="value")(layers.Add()([a, b]))
    return tf_keras.Model([left, right], [classes, value], name="two_branches")


def side_by_side(base: type) -> tf_keras.Model:
    """Four branches, small and large in turns: best placed as no cut of their order places them."""
    x = layers.Input((8,))
    ends = [layers.Dense(width, activation="tanh")(x) for width in (32000, 16000, 32000, 16000)]
    return tf_keras.Model(x, layers.Add()([layers.Dense(5)(end) for end in ends]))


def _two_branches_batch(step: int) -> Batch:
    random = _random(step)
    return (
        random.standard_normal((16, 6)),
        random.standard_normal((16, 4)),
        random.randint(0, 5, 16).astype(np.int32),
        random.standard_normal((16, 1)),
    )


def _two_branches_loss(model: tf_keras.Model, batch: Sequence[tf.Tensor]) -> tf.Tensor:
    left, right, classes, value = batch
    logits, guess = model([left, right], training=True)
    entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(classes, logits)
    return tf.reduce_mean(entropy) + tf.reduce_mean(tf.square(guess - value))


def resnet50(base: type) -> tf_keras.Model:
    """ResNet50 as Keras ships it."""
    return tf_keras.applications.ResNet50(
        weights=None, input_shape=(PIXELS, PIXELS, 3), classes=5, classifier_activation=None
    )


def mobilenet_v2(base: type) -> tf_keras.Model:
    """MobileNetV2 as Keras ships it, a third as wide."""
    return tf_keras.applications.MobileNetV2(
        weights=None, input_shape=(PIXELS, PIXELS, 3), alpha=0.35, classes=5, classifier_activation=None
    )


def efficientnet_b0(base: type) -> tf_keras.Model:
    """EfficientNetB0 as Keras ships it, which rescales its inputs, squeezes and excites; its random layers are off."""
    model = tf_keras.applications.EfficientNetB0(
        weights=None, input_shape=(PIXELS, PIXELS, 3), classes=5, classifier_activation=None
    )
    for layer in model.layers:
        if isinstance(layer, layers.Dropout):
            layer.rate = 0.0
    return model


def conditional(base: type) -> tf_keras.Model:
    """A `tf.cond` and a `tf.while_loop` in `call`, both with weights inside."""

    class Conditional(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.before = [layers.Dense(10, activation="tanh") for _ in range(2)]
            self.yes = layers.Dense(10, activation="tanh")
            self.no = layers.Dense(10)
            self.again = layers.Dense(10, activation="tanh")
            self.head = layers.Dense(5)

        def build(self, shape: Any) -> None:
            for layer in (self.yes, self.no, self.again):
                layer.build((None, 10))

        def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
            for layer in self.before:
                x = layer(x)
            x = tf.cond(tf.reduce_sum(x) > 0, lambda: self.yes(x), lambda: self.no(x))
            _, x = tf.while_loop(lambda count, _: count < 3, lambda count, y: (count + 1, self.again(y)), (0, x))
            return self.head(x)

    return Conditional()


def sparse_embedding(base: type) -> tf_keras.Model:
    """An embedding whose gradient is IndexedSlices."""
    return tf_keras.Sequential(
        [
            layers.Input((6,), dtype="int32"),
            layers.Embedding(50, 8),
            layers.Dense(10, activation="tanh"),
            layers.Flatten(),
            layers.Dense(10, activation="tanh"),
            layers.Dense(5),
        ]
    )


class ActivityPenalty(layers.Layer):
    """Adds the mean square of what passes through it to the model's loss."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        self.add_loss(0.1 * tf.reduce_mean(tf.square(x)))
        return x


def added_loss(base: type) -> tf_keras.Model:
    """A layer with `add_loss`, and a regularizer, which reads a weight outside the model's call."""
    regularizer = tf_keras.regularizers.L2(0.01)
    return tf_keras.Sequential(
        [
            layers.Input((8,)),
            layers.Dense(12, activation="tanh", kernel_regularizer=regularizer),
            ActivityPenalty(),
            layers.Dense(12, activation="tanh"),
            ActivityPenalty(),
            layers.Dense(10, activation="tanh", kernel_regularizer=regularizer),
            layers.Dense(5),
        ]
    )


def frozen_layers(base: type) -> tf_keras.Model:
    """Layers that are not trained, between layers that are."""
    return tf_keras.Sequential(
        [
            layers.Input((8,)),
            layers.Dense(12, activation="tanh"),
            layers.Dense(12, activation="tanh", trainable=False),
            layers.BatchNormalization(trainable=False),
            layers.Dense(12, activation="tanh"),
            layers.Dense(5, trainable=True),
        ]
    )


@tf.custom_gradient
def _clipped(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Passes values through, and gradients no larger than 0.01."""
    return tf.identity(x), lambda gradient: tf.clip_by_value(gradient, -0.01, 0.01)


def custom_gradient(base: type) -> tf_keras.Model:
    """A function with a gradient of its own between layers."""

    class Clipped(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [layers.Dense(12, activation="tanh") for _ in range(4)]
            self.head = layers.Dense(5)

        def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
            for layer in self.hidden:
                x = _clipped(layer(x))
            return self.head(x)

    return Clipped()


def dropout(base: type) -> tf_keras.Model:
    """Dropout between dense layers."""
    return tf_keras.Sequential(
        [
            layers.Input((8,)),
            layers.Dense(16, activation="tanh"),
            layers.Dropout(0.3),
            layers.Dense(16, activation="tanh"),
            layers.Dropout(0.3),
            layers.Dense(16, activation="tanh"),
            layers.Dense(5),
        ]
    )


def _entry(name: str, build: Any, batch: Any, **rest: Any) -> ZooModel:
    return ZooModel(name, build, batch, **{"loss": classification, "optimizer": _sgd, **rest})


IMAGES = _features(PIXELS, PIXELS, 3, classes=5)
MODELS: dict[str, ZooModel] = {
    entry.name: entry
    for entry in (
        _entry("mlp", mlp, _features(8, classes=5), form="subclass"),
        _entry("gpt", gpt, _tokens(8, 19), form="subclass", optimizer=_adam),
        _entry("cnn", cnn, _features(8, 8, 2, classes=5), form="subclass"),
        _entry(
            "cnn_float32",
            cnn,
            _features(8, 8, 2, classes=5, floatx="float32"),
            form="subclass",
            floatx="float32",
            optimizer=_plain_sgd,
        ),
        _entry("unet", unet, _features(8, 8, 2, classes=5), optimizer=_adam),
        _entry("lstm", _recurrent(layers.LSTM), _features(6, 5, classes=5), form="subclass"),
        _entry("gru", _recurrent(layers.GRU), _features(6, 5, classes=5), form="subclass", optimizer=_adam),
        _entry("layer_called_twice", layer_called_twice, _features(12, classes=5), form="subclass"),
        _entry(
            "two_branches",
            two_branches,
            _two_branches_batch,
            loss=_two_branches_loss,
            form="built",
        ),
        _entry("resnet50", resnet50, IMAGES, optimizer=_slow_sgd(1e-6)),
        _entry("mobilenet_v2", mobilenet_v2, IMAGES, optimizer=_slow_sgd(1e-5)),
        _entry(
            "efficientnet_b0",
            efficientnet_b0,
            IMAGES,
            form="built",
            optimizer=_slow_sgd(1e-6),
        ),
        _entry(
            "mixed_bfloat16",
            gpt,
            _tokens(8, 19),
            form="subclass",
            floatx="float32",
            policy="mixed_bfloat16",
            optimizer=_plain_sgd,
            loose=3e-3,
        ),
        _entry(
            "mlp_adam_float32",
            mlp,
            _features(8, classes=5, floatx="float32"),
            form="subclass",
            floatx="float32",
            optimizer=_adam,
            weights_compared=False,
        ),
        _entry("conditional", conditional, _features(8, classes=5), form="subclass"),
        _entry("sparse_embedding", sparse_embedding, _classified_tokens(6, 50, 5), optimizer=_adam),
        _entry(
            "added_loss",
            added_loss,
            _features(8, classes=5),
            loss=classification_with_model_losses,
        ),
        _entry("frozen_layers", frozen_layers, _features(8, classes=5), optimizer=_adam),
        _entry("custom_gradient", custom_gradient, _features(8, classes=5), form="subclass"),
        _entry("ragged_batch", mlp, _features(8, classes=5, samples=10), form="subclass"),
        _entry("clipped_gradients", mlp, _features(8, classes=5), form="subclass", clip=0.2),
        _entry("side_by_side", side_by_side, _features(8, classes=5)),
        _entry("dropout", dropout, _features(8, classes=5)),
    )
}
