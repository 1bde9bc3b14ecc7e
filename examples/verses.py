"""What the examples share: verses of four books, and a small transformer encoder that tells the books apart.

``verses.txt`` holds Genesis 1–7, Psalms 1–18, Proverbs 1–10 and Matthew 1–7, a verse a line, in the King James Version.
That is in the public domain (in the United Kingdom printing it is a privilege of the Crown).
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

BOOKS = ("Genesis", "Psalms", "Proverbs", "Matthew")
LENGTH = 40  # words; a longer verse loses its end
PADDING, UNKNOWN = 0, 1


def load() -> tuple[TensorDataset, TensorDataset, int]:
    """Verses as numbers of words ``[N, 40]`` with their books ``[N]``, to train on and to test on; how many words."""
    lines = Path(__file__).with_name("verses.txt").read_text(encoding="utf-8").splitlines()
    books, texts = zip(*(line.split("\t") for line in lines), strict=True)
    verses = [re.findall(r"[a-z]+", text.lower()) for text in texts]
    test = torch.arange(len(verses)) % 5 == 0  # every fifth verse
    counts = Counter(word for verse, held_out in zip(verses, test, strict=True) if not held_out for word in verse)
    number = {word: n for n, word in enumerate((w for w, c in counts.items() if c > 1), start=UNKNOWN + 1)}
    rows = [[number.get(word, UNKNOWN) for word in verse[:LENGTH]] for verse in verses]
    x = torch.tensor([row + [PADDING] * (LENGTH - len(row)) for row in rows])
    y = torch.tensor([BOOKS.index(book) for book in books])
    return TensorDataset(x[~test], y[~test]), TensorDataset(x[test], y[test]), len(number) + 2


class Encoder(nn.Module):
    """Two transformer layers over the words of a verse; the mean over the words says which book it is from."""

    def __init__(self, words: int, width: int = 64) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, len(BOOKS))

    def forward(self, words: Tensor) -> Tensor:
        here = (words != PADDING).unsqueeze(-1)
        places = torch.arange(words.shape[1], device=words.device).expand_as(words)
        states = self.layers(self.words(words) + self.places(places), src_key_padding_mask=~here.squeeze(-1))
        logits: Tensor = self.head((states * here).sum(1) / here.sum(1))
        return logits
