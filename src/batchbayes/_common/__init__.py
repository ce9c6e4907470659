"""Small things that all other folders share: random streams, progress, checks, search, files, text, pages."""
