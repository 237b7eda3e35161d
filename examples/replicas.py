"""Trains the small GPT of language_model.py with fit, on replicas that are each split over processes.

    horovodrun -np 4 python examples/replicas.py

Two of the four processes are the stages of one replica, and two are those of the other. Each replica trains on its half
of every batch. The gradients of a stage are averaged over the two processes that have it, while others still compute.
With plain `python` it trains in one process, on whole batches, to the same losses (with --compression, nearly the
same).
"""

import argparse

import smp_tf as smp  # before TensorFlow: it says that tf.keras is to be tf_keras

# isort: split
import numpy as np
import tensorflow as tf
from language_model import GPT, batch_of, manual, unigram_entropy


def main():
    """Trains, and prints the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50, help="batches of an epoch")
    parser.add_argument("--batch-size", type=int, default=32, help="samples of all replicas together")
    parser.add_argument("--length", type=int, default=64, help="characters seen at a time")
    parser.add_argument("--depth", type=int, default=4, help="number of blocks")
    parser.add_argument("--partitions", type=int, default=2, help="stages of a replica; so many processes make one")
    parser.add_argument(
        "--microbatches", type=int, default=4, help="parts that a replica cuts its share of a batch into"
    )
    parser.add_argument(
        "--compression",
        choices=["bf16", "fp16", "1bit"],
        help="send gradients in two bytes an element, or after an epoch in about one bit",
    )
    parser.add_argument("--share-slots", action="store_true", help="each replica has a part of the optimizer's slots")
    parser.add_argument(
        "--offload",
        choices=["gradients", "optimizer"],
        help="keep gradients, or the optimizer's slots too, in the host's memory",
    )
    args = parser.parse_args()

    smp.init(
        {
            "partitions": args.partitions,
            "microbatches": args.microbatches,
            "gradient_compression": args.compression,
            "shard_optimizer_state": args.share_slots,
            "gradient_offload": args.offload == "gradients",
            "optimizer_offload": args.offload == "optimizer",
            "seed": 1,
        }
    )
    print(f"rank {smp.rank()}: stage {smp.mp_rank()} of replica {smp.dp_rank()}", flush=True)

    numbers, characters = manual()
    tokens, following = batch_of(numbers, np.random.default_rng(1), args.steps * args.batch_size, args.length)
    batches = tf.data.Dataset.from_tensor_slices((tokens, following)).batch(args.batch_size)

    model = GPT(len(characters), args.length, width=96, depth=args.depth, heads=4)
    adam = tf.keras.optimizers.Adam(3e-3)
    model.compile(
        optimizer=smp.OneBitAdam(3e-3, warmup_steps=args.steps) if args.compression == "1bit" else adam,
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    # Every replica gets its part of each batch.
    history = model.fit(smp.shard_dataset(batches), epochs=args.epochs, verbose=2)
    if smp.rank() == 0:
        print(
            f"{smp.dp_size()} replicas of {smp.mp_size()} stages: loss {history.history['loss'][-1]:.3f} nats per "
            f"character; unigram entropy of the text {unigram_entropy(numbers):.3f}"
        )


if __name__ == "__main__":
    main()
