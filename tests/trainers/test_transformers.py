"""The Trainer of Hugging Face: a scheduler it insists on, its own accumulation, loss inside the model, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainers.small import BATCH, CLIP, assert_same, encoder, load, modes, optimizer, plain, verses
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ConstantLR
from torch.utils.data import SequentialSampler

from ocnopt import OCNOpt

pytest.importorskip("transformers", reason="needs ocnopt[trainers]")
pytest.importorskip("accelerate", reason="needs ocnopt[trainers]")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()

    def forward(self, words: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.encoder(words)
        return {"loss": cross_entropy(logits.float(), labels), "logits": logits}


def trainer(
    model: nn.Module, opt: OCNOpt, data: Any, folder: Path, *, epochs: int = 1, accumulate: int = 1, bf16: bool = False
) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(folder),
        num_train_epochs=epochs,
        per_device_train_batch_size=BATCH // accumulate,
        gradient_accumulation_steps=accumulate,
        bf16=bf16,
        max_grad_norm=CLIP,
        logging_strategy="epoch",
        save_strategy="epoch",
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to="none",
    )

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    return InOrder(model, arguments, train_dataset=data, optimizers=(opt, ConstantLR(opt, 1.0)))


def fit(mode: str, folder: Path, resume: bool = False, **options: Any) -> Any:
    model = Classifier()
    opt = optimizer(model.encoder, mode)
    data = [{"words": x, "labels": y} for x, y in verses()]
    trainer(model, opt, data, folder, **options).train(resume_from_checkpoint=resume)
    return model.encoder, opt


@modes
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
def test_it_is_the_plain_loop(mode: str, bf16: bool, tmp_path: Path) -> None:
    assert_same(fit(mode, tmp_path, bf16=bf16), plain(mode, cast=torch.bfloat16 if bf16 else None))


@modes
def test_accumulated_gradients(mode: str, tmp_path: Path) -> None:
    assert_same(fit(mode, tmp_path, accumulate=3), plain(mode, accumulate=3))


@modes
def test_a_checkpoint_brings_back_everything(mode: str, tmp_path: Path) -> None:
    fit(mode, tmp_path)
    assert_same(fit(mode, tmp_path, epochs=2, resume=True), plain(mode, epochs=2))


@modes
@pytest.mark.filterwarnings("ignore:bert.embeddings.position_embeddings.weight. dimension 0")  # one row for all samples
def test_a_model_of_the_library(mode: str, tmp_path: Path) -> None:
    """BERT, called by keywords, with the loss inside: every parameter trains, and the loss falls."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForSequenceClassification(BertConfig(vocab_size=load()[2], num_labels=4, **sizes))
    before = [p.detach().clone() for p in model.parameters()]
    data = [{"input_ids": x, "attention_mask": (x > 0).long(), "labels": y} for x, y in verses()]
    made = trainer(model, optimizer(model, mode), data, tmp_path, epochs=6)
    made.train()
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    assert losses[-1] < 0.9 * losses[0]
    unused = {"bert.embeddings.token_type_embeddings.weight"}
    for (name, p), old in zip(model.named_parameters(), before, strict=True):
        assert name in unused or not torch.equal(p, old), name
