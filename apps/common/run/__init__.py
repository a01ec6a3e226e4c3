"""The process of a run: folder, checkpoints, reports, export, memory, errors."""
