"""The command `smp-tf`."""
