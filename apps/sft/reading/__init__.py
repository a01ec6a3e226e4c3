"""From files to samples: the forms of rows, tokens on disk, the held-out split, the order of rows."""
