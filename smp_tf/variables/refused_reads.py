"""Says why a weight cannot be read at some place of a script: what the script did there, and what to write instead.

                          a layer is called on values     the weight itself is read
while a model is built    `while_building`                `while_building`
before the first step     `before_the_plan`               `before_the_plan`
on another rank           `of_another_rank`               `of_another_rank`
"""

from __future__ import annotations


def while_building(name: str, layer: str | None) -> str:
    """Returns why a weight has no value while its model is built.

    Args:
        name: of the weight.
        layer: name of the layer that is being called; None where none is.
    """
    if layer is None:
        return (
            f"Weight {name!r} was read while its model is being built. It has no value before the first step, which "
            f"decides which rank stores it. Plain Keras gives its initial value here. To compute with the weight, read "
            f"it in the call of a layer or of a model of your own. To give it another initial value, use an "
            f"initializer, layer.set_weights or variable.assign. To read it, wait for the first step, and let every "
            f"rank call layer.get_weights() or tf.keras.backend.get_value(variable)."
        )
    return (
        f"Layer {layer!r} was called on values while its model is being built, and its weight {name!r} has no value "
        f"before the first step. Plain Keras computes the result once, of the initial weights, and builds it into the "
        f"model as a constant, which no training changes. To make the layer part of the model, call it on what comes "
        f"from tf.keras.Input: tf.range(tf.shape(inputs)[1]) is such a tensor and tf.range(256) is none, nor is "
        f"an array. Or call it in the call of a layer or model of your own. If a constant is what you want, compute it "
        f"with NumPy, or of a layer that was made before smp.DistributedModel was called."
    )


def run_while_building() -> str:
    """Returns why a function that reads weights cannot run while their model is built."""
    return (
        "A function of weights ran while their model is being built, such as predict, fit or a tf.function that calls "
        "a layer. They have no values before the first step, which decides which rank stores them. Plain Keras "
        "computes with the initial ones here. Run it after smp.DistributedModel has returned the model, in a step or "
        "with the model's fit and predict, or on a model that was made before smp.DistributedModel was called."
    )


def before_the_plan(name: str, layer: str | None, doing: str) -> str:
    """Returns why a weight cannot be used before it is decided which rank stores it.

    Args:
        name: of the weight.
        layer: name of the layer that is being called; None where none is.
        doing: what the script does with the weight, such as "read".
    """
    reason = (
        f"Cannot {doing} variable {name!r} yet: which rank stores it is decided at the first call of a step, and it "
        f"has no value before."
    )
    if layer is None:
        return f"{reason} Do this after the first step, or in a hook registered with smp.register_post_partition_hook."
    return (
        f"{reason} Layer {layer!r} was called outside a step, and the layers of its model will be on several ranks. "
        f"Call the model in a function decorated with @smp.step, or use its predict, on every rank."
    )


def of_another_rank(name: str, layer: str | None, owner: int, doing: str) -> str:
    """Returns why a weight cannot be used on a rank that does not store it.

    Args:
        name: of the weight.
        layer: name of the layer that is being called; None where none is.
        owner: the partition that stores it.
        doing: what the script does with the weight, such as "read".
    """
    where = f"partition {owner} owns it and only its rank stores it."
    if doing != "read":
        return (
            f"Cannot {doing} variable {name!r} in a tf.function here: {where} Outside a tf.function every "
            f"rank may assign the same value: the rank that stores the variable takes it, and the others leave it out."
        )
    if layer is not None:
        return (
            f"Cannot read variable {name!r} here: {where} A layer or model of Keras's is called outside a step, "
            f"and its layers are on several ranks. For a model of layers that a distributed model has trained, wrap it "
            f"in smp.DistributedModel and use its predict, or call it in a step, on every rank."
        )
    return (
        f"Cannot read variable {name!r} here: {where} Outside a tf.function, "
        f"tf.keras.backend.get_value(variable), layer.get_weights() and model.get_weights() tell its value to all, "
        f"where every rank calls them. The variables that this rank stores are in model.local_variables."
    )
