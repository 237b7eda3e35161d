"""Scripts as strangers write them, of every kind that a cut batch once trained otherwise."""
