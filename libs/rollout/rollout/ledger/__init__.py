"""The ledger of a run: which groups were issued, finished and trained, written ahead, so that it survives a kill."""
