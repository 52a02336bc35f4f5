"""How step plans run: packed on the paged cache, or one forward per sequence."""
