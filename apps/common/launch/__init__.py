"""Starting the ranks of a run on all its machines, where torchrun does not."""
