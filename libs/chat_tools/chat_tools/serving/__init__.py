"""The parsers inside other people's servers."""
