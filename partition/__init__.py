"""From a traced training step to what each stage runs: op graph, costs, placement, split.

This room knows TensorFlow graphs and nothing of Keras. Whoever traces a step hands in the layer tagger and the variable
creator.
"""
