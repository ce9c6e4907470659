"""A posterior as one file that predicts without Python (ONNX, .pt2)."""
