"""The version of smp_tf."""

__version__ = "0.1.0"
