"""Telling other programs about a run while it goes on: TensorBoard, MLflow, Weights & Biases, or a tracker of yours."""
