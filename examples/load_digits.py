"""Loads the model that digits.py saved, with Keras alone, and tests it again.

python examples/load_digits.py
"""

import argparse

import numpy as np
import tf_keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


def main():
    """Loads and tests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="digits_model", help="folder that digits.py wrote")
    args = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).reshape(-1, 8, 8, 1).astype("float32")
    _, images, _, labels = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    model = tf_keras.models.load_model(args.model, compile=False)
    accuracy = np.mean(np.argmax(model(images, training=False), axis=1) == labels)
    print(f"test accuracy {accuracy:.4f}, loaded from {args.model}")


if __name__ == "__main__":
    main()
