"""What a run issued, finished and trained, written ahead: it survives a kill."""
