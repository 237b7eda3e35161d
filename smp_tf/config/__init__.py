"""The configuration: keys, values, files."""
