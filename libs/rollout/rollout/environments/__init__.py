"""The environments of an agent: their protocol, and those that come with the library."""
