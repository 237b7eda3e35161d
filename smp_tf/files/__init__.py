"""Files that are there whole or not at all, and paths that stay within their folder."""
