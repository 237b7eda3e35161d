"""The collectives behind one interface, and Horovod, which does them."""
