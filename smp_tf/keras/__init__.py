"""What smp_tf asks of Keras, as protocols, and the answers of tf_keras; all that is known of its insides."""
