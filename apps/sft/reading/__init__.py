"""From files to samples: rows in their forms, tokens kept on disk, who is held out, which order they come in."""
