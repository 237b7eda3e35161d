"""The configuration: its keys, their values, and files of them."""
