"""Models of the package transformers, small and with random weights, as entries of the zoo, and how `fit` trains some.

Like `models.py`, this knows nothing of smp_tf. Dropout is off, but for the entry named after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
import transformers
from tf_keras import layers

from tests.distributed.models import Batch, ZooModel

VOCABULARY, LENGTH, WIDTH, CLASSES = 40, 7, 16, 3
SAMPLES = 8
IGNORED = -100


# ---- configurations -----------------------------------------------------------------------------


def _bert_like(kind: type = transformers.BertConfig, dropout: float = 0.0, **more: Any) -> Any:
    return kind(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=16,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=CLASSES,
        **more,
    )


def _distilbert(dropout: float) -> tf_keras.Model:
    config = transformers.DistilBertConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=16,
        n_layers=2,
        n_heads=2,
        dim=WIDTH,
        hidden_dim=2 * WIDTH,
        dropout=dropout,
        attention_dropout=dropout,
        seq_classif_dropout=dropout,
        num_labels=CLASSES,
    )
    return transformers.TFDistilBertForSequenceClassification(config)


def _gpt2() -> tf_keras.Model:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": WIDTH, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return transformers.TFGPT2LMHeadModel(config)


def _t5() -> tf_keras.Model:
    sizes = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 2 * WIDTH, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    return transformers.TFT5ForConditionalGeneration(config)


def _vit_config() -> Any:
    return transformers.ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=2 * WIDTH,
        image_size=16,
        patch_size=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,
    )


def _segformer() -> tf_keras.Model:
    config = transformers.SegformerConfig(
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 16, 16, 16],
        num_attention_heads=[1, 2, 2, 2],
        decoder_hidden_size=WIDTH,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
    )
    return transformers.TFSegformerForSemanticSegmentation(config)


# ---- models in a model of the user's own --------------------------------------------------------


def roberta(base: type) -> tf_keras.Model:
    """A whole model of transformers as the only layer, whose outputs are given on."""

    class Reader(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.reader = transformers.TFRobertaForMaskedLM(_bert_like(transformers.RobertaConfig))

        def call(self, inputs: Any, training: bool = False) -> Any:
            return self.reader(inputs, training=training)

    return Reader()


def bert(base: type) -> tf_keras.Model:
    """A body of transformers under a head of the user's own."""

    class Classifier(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.body = transformers.TFBertModel(_bert_like())
            self.head = layers.Dense(CLASSES)

        def call(self, inputs: Any, training: bool = False) -> tf.Tensor:
            return self.head(self.body(inputs, training=training).pooler_output)

    return Classifier()


def vit(base: type) -> tf_keras.Model:
    """A classifier of images, of which the logits are taken."""

    class Logits(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.vit = transformers.TFViTForImageClassification(_vit_config())

        def call(self, pixels: tf.Tensor, training: bool = False) -> tf.Tensor:
            return self.vit(pixels, training=training).logits

    return Logits()


# ---- batches, losses, predictions ---------------------------------------------------------------


def _random(step: int) -> np.random.RandomState:
    return np.random.RandomState(2000 + step)


def _words(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Words, and which of them are no padding."""
    random = _random(step)
    words = random.randint(2, VOCABULARY, (SAMPLES, LENGTH)).astype(np.int32)
    lengths = random.randint(3, LENGTH + 1, (SAMPLES, 1))
    return words, (np.arange(LENGTH) < lengths).astype(np.int32)


def _masked_words(step: int) -> Batch:
    words, mask = _words(step)
    return words, mask, np.where(mask == 1, words, IGNORED).astype(np.int32)


def _classified_words(step: int) -> Batch:
    words, mask = _words(step)
    return words, mask, words[:, 0] % CLASSES


def _images(step: int) -> Batch:
    random = _random(step)
    return random.standard_normal((SAMPLES, 3, 16, 16)).astype(np.float32), random.randint(0, CLASSES, SAMPLES)


def _segmented(step: int) -> Batch:
    random = _random(step)
    pixels = random.standard_normal((SAMPLES, 3, 32, 32)).astype(np.float32)
    return pixels, random.randint(0, CLASSES, (SAMPLES, 32, 32)).astype(np.int32)


def _named(batch: Sequence[Any]) -> dict[str, Any]:
    """The arguments that the models take, by name."""
    first, *others = batch
    name = "input_ids" if first.dtype in (np.int32, tf.int32) else "pixel_values"
    return {name: first, **dict(zip(("attention_mask", "labels")[-len(others) :], others, strict=True))}


def _loss_of_the_model(model: tf_keras.Model, batch: Sequence[tf.Tensor]) -> tf.Tensor:
    """What the model computes of the labels it is given."""
    return tf.reduce_mean(model(_named(batch), training=True).loss)


def _by_name(model: tf_keras.Model, batch: Sequence[tf.Tensor]) -> tf.Tensor:
    """The same, with every argument given by its name."""
    return tf.reduce_mean(model(**_named(batch), training=True)["loss"])


def _loss_outside(model: tf_keras.Model, batch: Sequence[tf.Tensor]) -> tf.Tensor:
    """Cross-entropy of what the model makes of inputs without labels."""
    arguments = _named(batch)
    labels = arguments.pop("labels")
    made = model(arguments if len(arguments) > 1 else batch[0], training=True)
    logits = getattr(made, "logits", made)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def _logits(model: tf_keras.Model, inputs: Sequence[tf.Tensor]) -> Any:
    """What a model makes of its first input; keys and values that it keeps have their samples on another axis."""
    made = model(inputs[0], training=False)
    return getattr(made, "logits", made)


def _translated(model: tf_keras.Model, inputs: Sequence[tf.Tensor]) -> Any:
    [words] = inputs
    return model({"input_ids": words, "decoder_input_ids": words}, training=False).logits


def _sgd() -> tf_keras.optimizers.Optimizer:
    return tf_keras.optimizers.SGD(0.05)


def _entry(name: str, build: Any, batch: Any, loss: Any = _loss_of_the_model, **rest: Any) -> ZooModel:
    defaults = {"loss": loss, "optimizer": _sgd, "floatx": "float32", "predict": _logits}
    return ZooModel(name, build, batch, **{**defaults, **rest})


MODELS: dict[str, ZooModel] = {
    entry.name: entry
    for entry in (
        _entry("bert_masked", lambda _: transformers.TFBertForMaskedLM(_bert_like()), _masked_words),
        _entry("bert_in_model", bert, _classified_words, _loss_outside, form="subclass"),
        _entry("gpt2", lambda _: _gpt2(), _masked_words, _by_name),
        _entry("distilbert", lambda _: _distilbert(0.0), _classified_words, _loss_outside),
        _entry("roberta_in_model", roberta, _masked_words, form="subclass"),
        _entry(
            "electra",
            lambda _: transformers.TFElectraForMaskedLM(_bert_like(transformers.ElectraConfig, embedding_size=12)),
            _masked_words,
            form="built",
        ),
        _entry("t5", lambda _: _t5(), _masked_words, _by_name, predict=_translated),
        _entry("vit_in_model", vit, _images, _loss_outside, form="subclass"),
        _entry("segformer", lambda _: _segformer(), _segmented),
        _entry("distilbert_dropout", lambda _: _distilbert(0.2), _classified_words),
    )
}


# ---- fit ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """How `compile` and `fit` train a model.

    Attributes:
        entry: the model.
        options: for `compile`, besides the optimizer; without a loss the model's own is used.
        data: what `fit` is given: inputs, or inputs and targets, by the number of samples.
    """

    entry: ZooModel
    options: Callable[[], dict[str, Any]]
    data: Callable[[], tuple[Any, ...]]


def _all(batch: Callable[[int], Batch]) -> dict[str, np.ndarray]:
    """Two batches in one, without padding: whole batches then weigh words as their parts do."""
    named = [_named(batch(step)) for step in range(2)]
    together = {name: np.concatenate([part[name] for part in named]) for name in named[0]}
    together.pop("attention_mask", None)
    if together["labels"].shape == together.get("input_ids", np.zeros(0)).shape:
        together["labels"] = together["input_ids"]
    return together


def _inside(batch: Callable[[int], Batch]) -> tuple[Any, ...]:
    return (_all(batch),)


def _apart(batch: Callable[[int], Batch]) -> tuple[Any, ...]:
    together = _all(batch)
    labels = together.pop("labels")
    return (together if len(together) > 1 else next(iter(together.values()))), labels


def _from_logits() -> dict[str, Any]:
    return {"loss": tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True), "metrics": ["accuracy"]}


FITS: dict[str, Fit] = {
    "gpt2": Fit(MODELS["gpt2"], dict, lambda: _inside(_masked_words)),
    "t5": Fit(MODELS["t5"], dict, lambda: _inside(_masked_words)),
    "distilbert": Fit(MODELS["distilbert"], _from_logits, lambda: _apart(_classified_words)),
    "vit_in_model": Fit(MODELS["vit_in_model"], _from_logits, lambda: _apart(_images)),
}


def fitted(name: str, make: Callable[[ZooModel], tf_keras.Model]) -> dict[str, np.ndarray]:
    """Train a model with `fit`.

    Args:
        name: of the entry in `FITS`.
        make: gives the model of an entry of the zoo.

    Returns:
        The history by name, and what `evaluate` says afterwards.
    """
    fit = FITS[name]
    fit.entry.prepare()
    model = make(fit.entry)
    model.compile(optimizer=fit.entry.optimizer(), **fit.options())
    data = fit.data()
    validation = tf.data.Dataset.from_tensor_slices(data if len(data) > 1 else data[0]).batch(SAMPLES)
    options = {"batch_size": SAMPLES, "verbose": 0}
    history = model.fit(*data, epochs=2, shuffle=False, validation_data=validation, **options)
    found = {key: np.array(values) for key, values in history.history.items()}
    return {**found, "evaluated": np.atleast_1d(model.evaluate(*data, **options))}
