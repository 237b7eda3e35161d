"""What smp_tf asks of Keras, as protocols, and tf_keras's answers, with all that is known of its insides."""
