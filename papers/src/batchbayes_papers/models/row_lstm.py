"""A small recurrent network that reads an image row by row."""

from torch import Tensor, nn


class RowLSTM(nn.Module):
    """An LSTM of 100 units that gets the 28 rows of an image as a sequence, and a dense layer behind its last state.

    >>> sum(p.numel() for p in RowLSTM().parameters() if p.ndim > 1)
    52200
    """

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(28, 100, batch_first=True)
        self.output = nn.Linear(100, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (N, 10) of images (N, 1, 28, 28)."""
        states, _ = self.lstm(images[:, 0])  # (N, rows, units)
        return self.output(states[:, -1])
