"""Models of many families whose memory is compared with the forecast, each at two sizes.

The project's own have tables with sparse gradients, convolutions of images and volumes, transposed ones among them, in
float32 and float64, and loops. The others are one model of each family of `tf_keras.applications`. The larger size has
"_large" after its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras import layers

from tests.distributed.models import Batch, ZooModel, classification

#: One model of each family of `tf_keras.applications`, with the side of its small and of its large images.
APPLICATIONS = {
    "convnext": ("ConvNeXtTiny", 64, 96),
    "densenet": ("DenseNet121", 64, 128),
    "efficientnet": ("EfficientNetB0", 96, 160),
    "efficientnet_v2": ("EfficientNetV2B0", 96, 160),
    "inception_resnet_v2": ("InceptionResNetV2", 75, 139),
    "inception_v3": ("InceptionV3", 96, 160),
    "mobilenet": ("MobileNet", 96, 160),
    "mobilenet_v2": ("MobileNetV2", 96, 160),
    "mobilenet_v3": ("MobileNetV3Large", 96, 160),
    "nasnet": ("NASNetMobile", 96, 160),
    "regnet_x": ("RegNetX016", 64, 128),
    "regnet": ("RegNetY016", 64, 128),
    "resnet": ("ResNet50", 96, 160),
    "resnet_rs": ("ResNetRS50", 96, 160),
    "resnet_v2": ("ResNet50V2", 96, 160),
    "vgg": ("VGG16", 64, 96),
    "xception": ("Xception", 96, 160),
}


def _random(step: int) -> np.random.RandomState:
    return np.random.RandomState(1000 + step)


def _application(name: str, side: int) -> Callable[[type], tf_keras.Model]:
    """Returns a function that makes a model as Keras ships it."""

    def build(base: type) -> tf_keras.Model:
        make = getattr(tf_keras.applications, name)
        made: tf_keras.Model = make(weights=None, input_shape=(side, side, 3), classes=10, classifier_activation=None)
        return made

    return build


def _images(side: int, samples: int, floatx: str = "float32") -> Callable[[int], Batch]:
    def batch(step: int) -> Batch:
        random = _random(step)
        images = random.standard_normal((samples, side, side, 3)).astype(floatx)
        return images, random.randint(0, 10, samples).astype(np.int32)

    return batch


def _recommender(rows: int, width: int) -> Callable[[type], tf_keras.Model]:
    """Three tables, whose gradients are sparse, with dense layers behind them."""

    def build(base: type) -> tf_keras.Model:
        given = [layers.Input((4,), dtype="int32") for _ in range(3)]
        found = [layers.Flatten()(layers.Embedding(rows, width)(each)) for each in given]
        x = layers.Dense(512, activation="relu")(layers.Concatenate()(found))
        x = layers.Dense(256, activation="relu")(x)
        return tf_keras.Model(given, layers.Dense(1)(x))

    return build


def _chosen(rows: int, samples: int) -> Callable[[int], Batch]:
    def batch(step: int) -> Batch:
        random = _random(step)
        chosen = [random.randint(0, rows, (samples, 4)).astype(np.int32) for _ in range(3)]
        return *chosen, random.standard_normal((samples, 1)).astype("float32")

    return batch


def _squares(model: tf_keras.Model, batch: Sequence[tf.Tensor]) -> tf.Tensor:
    """Mean squared error of a model with several inputs."""
    *given, target = batch
    return tf.reduce_mean(tf.square(model(given, training=True) - target))


def _unet3d(shape: tuple[int, int, int]) -> Callable[[type], tf_keras.Model]:
    """A U-Net of 3-D convolutions."""

    def convolution(width: int) -> Any:
        return layers.Conv3D(width, 3, padding="same", activation="relu")

    def build(base: type) -> tf_keras.Model:
        given = layers.Input((*shape, 2))
        first = convolution(16)(given)
        second = convolution(32)(layers.MaxPool3D()(first))
        third = convolution(64)(layers.MaxPool3D()(second))
        back = convolution(32)(layers.Concatenate()([layers.UpSampling3D()(third), second]))
        end = convolution(16)(layers.Concatenate()([layers.UpSampling3D()(back), first]))
        return tf_keras.Model(given, layers.Conv3D(4, 1)(end))

    return build


def _transposed(width: int) -> Callable[[type], tf_keras.Model]:
    """A U-Net of images, whose way up is made of transposed convolutions."""

    def convolution(width: int) -> Any:
        return layers.Conv2D(width, 3, padding="same", activation="relu")

    def build(base: type) -> tf_keras.Model:
        x = given = layers.Input((None, None, 3))
        down = []
        for times in (1, 2, 4):
            down.append(convolution(times * width)(x))
            x = layers.Conv2D(times * width, 3, strides=2, padding="same", activation="relu")(down[-1])
        x = convolution(8 * width)(x)
        for times in (4, 2, 1):
            x = layers.Conv2DTranspose(times * width, 3, strides=2, padding="same", activation="relu")(x)
            x = convolution(times * width)(layers.Concatenate()([x, down.pop()]))
        return tf_keras.Model(given, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))

    return build


def _transposed3d(width: int) -> Callable[[type], tf_keras.Model]:
    """Convolutions of volumes and transposed ones."""

    def build(base: type) -> tf_keras.Model:
        x = given = layers.Input((16, None, None, 2))
        for times in (1, 2, 4):
            x = layers.Conv3D(times * width, 3, strides=2, padding="same", activation="relu")(x)
        for times in (2, 1):
            x = layers.Conv3DTranspose(times * width, 3, strides=2, padding="same", activation="relu")(x)
        return tf_keras.Model(given, layers.Conv3DTranspose(4, 4, strides=2, padding="same")(x))

    return build


def _separable(width: int) -> Callable[[type], tf_keras.Model]:
    """Depthwise, separable and grouped convolutions of several kinds."""

    def build(base: type) -> tf_keras.Model:
        given = layers.Input((None, None, 3))
        x = layers.Conv2D(width, 3, padding="same", use_bias=False)(given)
        for times in (1, 2, 4):
            x = layers.SeparableConv2D(2 * times * width, 3, padding="same", activation="relu")(x)
            x = layers.DepthwiseConv2D(5, strides=2, padding="same")(x)
            x = layers.ReLU()(layers.BatchNormalization()(x))
            x = layers.Conv2D(2 * times * width, 3, groups=4, padding="same", activation="relu")(x)
        return tf_keras.Model(given, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))

    return build


def _volumes(shape: tuple[int, int, int], samples: int) -> Callable[[int], Batch]:
    def batch(step: int) -> Batch:
        random = _random(step)
        volumes = random.standard_normal((samples, *shape, 2)).astype("float32")
        return volumes, random.randint(0, 4, (samples, *shape)).astype(np.int32)

    return batch


def _grus(width: int) -> Callable[[type], tf_keras.Model]:
    """Gated recurrent layers behind a table."""

    def build(base: type) -> tf_keras.Model:
        given = layers.Input((96,), dtype="int32")
        x = layers.Embedding(20000, 128)(given)
        for _ in range(3):
            x = layers.GRU(width, return_sequences=True)(x)
        return tf_keras.Model(given, layers.Dense(20)(x))

    return build


def _bilstm(width: int) -> Callable[[type], tf_keras.Model]:
    """Loops in both directions, behind a table."""

    def build(base: type) -> tf_keras.Model:
        given = layers.Input((96,), dtype="int32")
        x = layers.Embedding(20000, 128)(given)
        for _ in range(3):
            x = layers.Bidirectional(layers.LSTM(width, return_sequences=True))(x)
        return tf_keras.Model(given, layers.Dense(20)(x))

    return build


def _words(samples: int) -> Callable[[int], Batch]:
    def batch(step: int) -> Batch:
        random = _random(step)
        words, tags = random.randint(0, 20000, (samples, 96)), random.randint(0, 20, (samples, 96))
        return words.astype(np.int32), tags.astype(np.int32)

    return batch


def _adam() -> Any:
    return tf_keras.optimizers.Adam(1e-4)


def _entry(name: str, build: Any, batch: Any, loss: Any = classification, floatx: str = "float32") -> ZooModel:
    return ZooModel(name, build, batch, loss, _adam, floatx=floatx)


def _all() -> list[ZooModel]:
    small, large = (16, 32, 32), (16, 64, 64)
    found = [
        _entry("recommender", _recommender(50000, 64), _chosen(50000, 256), _squares),
        _entry("recommender_large", _recommender(200000, 48), _chosen(200000, 1024), _squares),
        _entry("unet3d", _unet3d(small), _volumes(small, 8)),
        _entry("unet3d_large", _unet3d(large), _volumes(large, 8)),
        _entry("bilstm", _bilstm(160), _words(64)),
        _entry("bilstm_large", _bilstm(320), _words(256)),
        _entry("grus", _grus(256), _words(128)),
        _entry("grus_large", _grus(512), _words(256)),
        _entry("transposed", _transposed(16), _images(64, 32)),
        _entry("transposed_large", _transposed(32), _images(96, 32)),
        _entry("transposed3d", _transposed3d(32), _volumes(small, 16)),
        _entry("transposed3d_large", _transposed3d(48), _volumes(large, 16)),
        _entry("separable", _separable(32), _images(64, 32)),
        _entry("separable_large", _separable(64), _images(96, 32)),
        _entry("float64", _transposed(16), _images(64, 32, "float64"), floatx="float64"),
        _entry("float64_large", _transposed(32), _images(96, 32, "float64"), floatx="float64"),
    ]
    for name, (model, *sides) in APPLICATIONS.items():
        for end, side in zip(("", "_large"), sides, strict=True):
            found.append(_entry(name + end, _application(model, side), _images(side, 16)))
    return found


#: The models by name.
FAMILIES: dict[str, ZooModel] = {entry.name: entry for entry in _all()}
