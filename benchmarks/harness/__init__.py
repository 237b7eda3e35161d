"""What several benchmarks share: options, processes that take turns, reports."""
