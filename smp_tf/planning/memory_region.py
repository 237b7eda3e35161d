"""The region of memory that an allocator takes from the system for a whole stage.

On a processor, TensorFlow's allocator takes regions that double in size. It cuts a tensor out of a free piece only if
the piece is at least twice as large. Otherwise the tensor gets all of the piece, and a weight or a slot keeps it:

    regions that double    ▐weight▒▒▒▒▒▌▐weight│slot▒▒▒▒▒▒▒▌      ▒ nobody's
    one region             ▐weight│weight│slot│slot│ free        ▌

Memory that nobody has written to takes no memory of the machine.
"""

from __future__ import annotations

import tensorflow as tf

from smp_tf.pipeline import allocator
from smp_tf.pipeline.run.host import has_device

#: What a region has in addition to the forecast, so that free pieces of many sizes fit.
_MORE = 1.5
#: Bytes from which on a forecast is worth a region.
_LEAST = 1 << 20
#: Numbers in a row of the tensor that takes the region, and bytes of each. The number of rows is 32 bits long.
_ROW, _ITEM = 1 << 17, 8


def take_region(forecast: int) -> None:
    """Lets the allocator of this process take one region for all that the process is forecast to hold.

    A GPU's allocator does so by itself. Without oneDNN, tensors of a processor come from the C library, one by one, and
    nothing is kept.

    Args:
        forecast: bytes that this process is forecast to hold.
    """
    if forecast < _LEAST or has_device():
        return
    rows = int(_MORE * forecast) // (_ROW * _ITEM) + 1
    try:
        with tf.init_scope(), tf.device("CPU:0"):
            # Nothing is written into it, and it is given back at once. The allocator keeps the region.
            tf.raw_ops.Empty(shape=[rows, _ROW], dtype=tf.float64, init=False)
    except tf.errors.ResourceExhaustedError:
        # The system does not promise so much at once. Then regions double, as without this.
        return
    if allocator.peak():
        # The region itself is not in use.
        allocator.forget_peak()
