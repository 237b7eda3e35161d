"""`smp.callbacks`: what a training over several ranks wants besides Keras's own callbacks.

    model.fit(x, y, callbacks=[smp.callbacks.Checkpoint("checkpoints"), smp.callbacks.PipelineSummary()])

With replicas, `fit` adds `BroadcastInitialState` and `MetricAverage` by itself, before all others.
"""

from smp_tf.training.callbacks import BroadcastInitialState, Checkpoint, MetricAverage, PipelineSummary, Timeline

__all__ = ["BroadcastInitialState", "Checkpoint", "MetricAverage", "PipelineSummary", "Timeline"]
