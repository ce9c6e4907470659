"""The front door: a trained network and its data in, an answer to "when can I trust it?" out."""
