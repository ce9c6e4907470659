"""What is compared, how each does on held-out data, and which one is chosen: records of numbers, no sentences."""
