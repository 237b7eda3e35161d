"""From a traced training step to what each stage runs: op graph, costs, placement, split.

This room knows TensorFlow graphs and nothing of Keras: whoever traces hands in the layer tagger and the variable
creator as arguments.
"""
