"""Files that exist whole or not at all, and paths that stay within their folder."""
