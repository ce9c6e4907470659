"""The methods: a file or a folder for each. `table.py` lists them."""
