"""What is known of Keras's insides: layers, optimizers' slots and methods, patches."""
