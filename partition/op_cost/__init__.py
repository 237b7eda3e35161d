"""What one op costs: operations, bytes and working memory, also of functions and loops."""
