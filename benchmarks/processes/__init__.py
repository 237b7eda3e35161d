"""What benchmarks start as processes of their own."""
