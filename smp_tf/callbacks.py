"""`smp.callbacks`: callbacks for a training over several ranks, besides Keras's own.

    model.fit(x, y, callbacks=[smp.callbacks.Checkpoint("checkpoints"), smp.callbacks.PipelineSummary()])

With replicas, `fit` itself adds `BroadcastInitialState` and `MetricAverage`, before all others.
"""

from smp_tf.training.callbacks import BroadcastInitialState, Checkpoint, MetricAverage, PipelineSummary, Timeline

__all__ = ["BroadcastInitialState", "Checkpoint", "MetricAverage", "PipelineSummary", "Timeline"]
