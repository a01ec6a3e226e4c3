"""Maps of weights that others have: for families that the backend has none of its own for."""
