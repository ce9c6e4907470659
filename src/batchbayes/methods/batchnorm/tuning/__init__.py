"""Tuning of the batch size after training: `batch_size.py` holds `tune_batch_size`."""
