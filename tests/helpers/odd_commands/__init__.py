"""Generated bad and odd files and options for the command line, each made from a number."""
