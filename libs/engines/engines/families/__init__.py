"""Model families: what the engine must know of each, one file a family; what is not registered is refused."""
