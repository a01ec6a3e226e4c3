"""Episodes of several ranks: all know their summaries, and rows go to the ranks that train them."""
