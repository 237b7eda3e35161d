"""Trains a BERT of the package transformers, split over processes, to tell lines of Python from lines of its manual.

    horovodrun -np 2 python examples/transformer.py     # the model on two processes
    python examples/transformer.py                      # in one process, the same losses

The model is an ordinary TFBertForSequenceClassification, small and with random weights, so that nothing is downloaded.
With `from_pretrained` in place of a configuration, it is fine-tuned in the same way. The code is that of the standard
library's modules, and the manual is that of Python's help().
"""

import argparse
import os
import random
import re
from collections import Counter
from pydoc_data.topics import topics

import smp_tf as smp  # before TensorFlow: it says that tf.keras is to be tf_keras

# isort: split
import numpy as np
import tensorflow as tf

try:
    from transformers import BertConfig, TFBertForSequenceClassification
except ImportError as error:
    raise SystemExit(
        "This example needs the package transformers, below version 5, which has no TensorFlow classes any more: "
        f"pip install 'transformers<5'. Received: {error}"
    ) from error

PADDING, BEGINNING, UNKNOWN = range(3)  # tokens that stand for no word
VOCABULARY = 1000
LENGTH = 24


def build():
    """Returns an ordinary model of transformers."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
        num_labels=2,
        pad_token_id=PADDING,
    )
    return TFBertForSequenceClassification(config)


def lines(count):
    """Returns equally many lines of the manual and of code, and which is which."""
    manual = "\n".join(topics[name] for name in sorted(topics)).splitlines()
    code = "\n".join(source_of(name) for name in ("argparse", "inspect", "typing", "tarfile", "doctest")).splitlines()
    draw = random.Random(1)  # the same on every rank: all see the same data
    kinds = [draw.sample([line for line in kind if len(line.split()) >= 3], count) for kind in (manual, code)]
    return kinds[0] + kinds[1], np.repeat([0, 1], count)


def source_of(module):
    """Returns the text of a module of the standard library."""
    with open(os.path.join(os.path.dirname(os.__file__), f"{module}.py"), encoding="utf-8") as file:
        return file.read()


def encoded(texts):
    """Returns the model's inputs: one token per word or sign, and which tokens are no padding."""
    split = [re.findall(r"\w+|[^\w\s]", text) for text in texts]
    known = Counter(word for words in split for word in words).most_common(VOCABULARY - 3)
    number = {word: UNKNOWN + 1 + place for place, (word, _) in enumerate(known)}
    rows = [[BEGINNING, *(number.get(word, UNKNOWN) for word in words)] for words in split]
    tokens = np.array([(row + [PADDING] * LENGTH)[:LENGTH] for row in rows], "int32")
    return {"input_ids": tokens, "attention_mask": (tokens != PADDING).astype("int32")}


def main():
    """Trains, tests and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lines", type=int, default=1000, help="lines of each kind to train with")
    parser.add_argument("--partitions", type=int, default=2, help="stages the model is cut into")
    parser.add_argument("--microbatches", type=int, default=4, help="parts a batch is cut into")
    parser.add_argument("--save", default=None, help="folder for the trained model, which `from_pretrained` reads")
    args = parser.parse_args()

    smp.init({"partitions": args.partitions, "microbatches": args.microbatches, "seed": 1, "intra_op_threads": 1})
    texts, kinds = lines(args.lines + 200)
    order = np.random.RandomState(0).permutation(len(texts))
    test, train = order[:400], order[400:]
    inputs = encoded(texts)

    def some(rows):
        return {name: values[rows] for name, values in inputs.items()}

    model = smp.DistributedModel(build)
    # No loss is given, so the model computes it from its labels.
    model.compile(optimizer=tf.keras.optimizers.Adam(1e-3), metrics=["accuracy"])
    fitted = model.fit(some(train), kinds[train], batch_size=100, epochs=args.epochs, verbose=2)
    _, accuracy = model.evaluate(some(test), kinds[test], batch_size=100, verbose=0)

    if args.save:  # on every rank: each has its part of the weights
        if smp.rank() == 0:
            model.wrapped.config.save_pretrained(args.save)
        model.save_weights(os.path.join(args.save, "tf_model.h5"))
    if smp.rank() == 0:
        for epoch, loss in enumerate(fitted.history["loss"], start=1):
            print(f"epoch {epoch:2d}: mean loss {loss:.4f}")
        print(f"test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
