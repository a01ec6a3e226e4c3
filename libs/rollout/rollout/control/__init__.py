"""Control of asynchronous training: which groups may begin, what is trained, when weights are synced; a simulation."""
