"""The assessment of a trained network on its data: how good is it, and when can it be trusted?

`read/` reads, `compare/` compares, `words/` says what was found, and `page/` shows it.
"""
