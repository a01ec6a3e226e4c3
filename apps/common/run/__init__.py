"""What a process of a run does, whatever it trains."""
