"""Detection of inputs unlike those that a network was trained with. `novelty.py` holds the public function."""
