"""Fine-tunes a pre-trained model: first a new head on frozen layers, then also the upper layers at a lower rate.

    horovodrun -np 2 python examples/finetune.py     # the model on two processes
    python examples/finetune.py                      # in one process, the same losses

The data are scikit-learn's handwritten digits. A convolutional network has learned to tell 0 to 4 apart. Now it is to
read 5 to 9, from only some images. It was trained by plain Keras and is in a file. What to know about frozen layers is
marked with (1) to (3).
"""

import argparse
from pathlib import Path

import smp_tf as smp  # before TensorFlow: it says that tf.keras is to be tf_keras

# isort: split
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tensorflow.keras import layers

LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def digits(first, test_size):
    """Returns images of 8 x 8 of five digits from `first` on, with labels 0 to 4; a part of them is for testing."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).reshape(-1, 8, 8, 1).astype("float32")
    wanted = (labels >= first) & (labels < first + 5)
    images, labels = images[wanted], (labels[wanted] - first).astype("int32")
    return train_test_split(images, labels, test_size=test_size, random_state=0, stratify=labels)


def pretrain(file):
    """Trains a model on the digits 0 to 4 and writes it to a file. There is nothing of smp_tf in it."""
    images, test_images, labels, test_labels = digits(0, test_size=0.2)
    model = tf.keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu", name="lower_1"),
            layers.Conv2D(32, 3, padding="same", activation="relu", name="lower_2"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same", activation="relu", name="upper_1"),
            layers.Flatten(),
            layers.Dense(128, activation="relu", name="upper_2"),
            layers.Dense(5, name="head"),
        ],
        name="zero_to_four",
    )
    model.compile(optimizer="adam", loss=LOSS, metrics=["accuracy"])
    model.fit(images, labels, batch_size=64, epochs=4, verbose=0)
    _, accuracy = model.evaluate(test_images, test_labels, verbose=0)
    model.save(file)
    print(f"pre-trained on 0 to 4: test accuracy {accuracy:.4f}, saved in {file}")


def build(file):
    """Returns the pre-trained model, all of it frozen, with a new head."""
    pretrained = tf.keras.models.load_model(file, compile=False)
    for layer in pretrained.layers:
        layer.trainable = False  # (1) as in any Keras: before compile, or before the first call of a step
    features = pretrained.get_layer("upper_2").output
    return tf.keras.Model(pretrained.input, layers.Dense(5, name="new_head")(features), name="five_to_nine")


def slots(optimizer):
    """Returns the layers whose weights have slots in this rank's optimizer. It looks at the first weight of each."""
    return sorted({v.name.split("/")[-2] for v in optimizer.variables if v.name.startswith("Adam/m/")})


def values(model):
    """Returns the weights of this rank by name."""
    return {variable.name: variable.numpy() for variable in model.local_variables}


def main():
    """Trains the model unless that was done before, then a new head, then also the upper layers, and tests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, nargs=2, default=[8, 6], help="of the first and the second phase")
    parser.add_argument("--partitions", type=int, default=2, help="stages the model is cut into")
    parser.add_argument("--microbatches", type=int, default=4, help="parts a batch is cut into")
    parser.add_argument("--pretrained", type=Path, default=Path("digits_0_to_4.keras"), help="file of the first model")
    args = parser.parse_args()

    smp.init({"partitions": args.partitions, "microbatches": args.microbatches, "seed": 1, "intra_op_threads": 1})
    if smp.rank() == 0 and not args.pretrained.exists():
        pretrain(args.pretrained)
    smp.barrier()  # all wait until the file is there
    tf.keras.utils.set_random_seed(2)  # pre-training has drawn random numbers on one rank only

    images, test_images, labels, test_labels = digits(5, test_size=0.8)
    model = smp.DistributedModel(lambda: build(str(args.pretrained)))
    # (2) What is trained in each phase, and at what rate. Frozen weights have no gradients and no slots. A change of
    # `trainable` counts after `compile`, as in Keras, and each `compile` here takes a new optimizer.
    phases = [("the head", 1e-2, []), ("the upper layers too", 3e-4, ["upper_1", "upper_2"])]
    before = None
    for (name, rate, unfrozen), epochs in zip(phases, args.epochs, strict=True):
        for layer in unfrozen:
            model.get_layer(layer).trainable = True
        model.compile(optimizer=tf.keras.optimizers.Adam(rate), loss=LOSS, metrics=["accuracy"])
        history = model.fit(images, labels, batch_size=32, epochs=epochs, verbose=0).history
        loss, accuracy = model.evaluate(test_images, test_labels, batch_size=120, verbose=0)
        if smp.rank() == 0:
            for epoch, mean in enumerate(history["loss"], start=1):
                print(f"epoch {epoch:2d}: mean loss {mean:.4f}")
            print(f"trained {name}: test loss {loss:.4f}, test accuracy {accuracy:.4f}")
        # (3) Each rank says what has become of the weights that it stores.
        after = values(model)
        if before is not None:
            kept = sorted({key.split("/")[0] for key in after if (after[key] == before[key]).all()})
            print(f"rank {smp.rank()}: unchanged in this phase: {', '.join(kept) or 'none'}")
        print(f"rank {smp.rank()}: slots for {', '.join(slots(model.optimizer)) or 'none'}")
        before = after


if __name__ == "__main__":
    main()
