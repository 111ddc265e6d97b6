"""The mathematics: pure functions on tensors and arrays, knowing nothing of clients, clocks or files."""
