"""What Keras's list of callbacks calls."""

from __future__ import annotations

import pytest
import tf_keras

from smp_tf.keras import loops

pytestmark = pytest.mark.usefixtures("keras_defaults")


def test_a_list_of_callbacks_finds_out_again_who_wants_each_batch() -> None:
    callbacks = tf_keras.callbacks.CallbackList([])
    called = []
    callbacks.append(tf_keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: called.append(batch)))
    callbacks.on_train_batch_end(0)
    loops.ask_for_batch_hooks(callbacks)
    callbacks.on_train_batch_end(1)
    assert called == [1]
