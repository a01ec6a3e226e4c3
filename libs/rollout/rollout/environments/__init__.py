"""What an agent acts in: the protocol of environments, and those that come with the library."""
