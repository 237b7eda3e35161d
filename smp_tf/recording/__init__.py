"""What ran when, in a file."""
