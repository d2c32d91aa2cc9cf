"""Batches: targets, parts, and documents that do not fit."""

import pytest
import torch

from optimus.errors import UserError
from optimus.model import Batch

TOKENS_BS = torch.arange(12).view(2, 6)
DOCUMENT_BS = torch.tensor([[3, 3, 4, 6, 6, 6], [0, 0, 0, 0, 0, 0]], dtype=torch.int32)


def test_the_first_token_of_a_document_is_not_predicted() -> None:
    batch = Batch(TOKENS_BS, document_BS=DOCUMENT_BS)
    assert batch.target_BS.tolist() == [[1, -1, -1, 4, 5, -1], [7, 8, 9, 10, 11, -1]]
    assert batch.predicted() == 8
    mask_BS = torch.tensor([[True] * 4 + [False] * 2, [False] * 5 + [True]])
    both = Batch(TOKENS_BS, mask_BS, DOCUMENT_BS)
    assert both.target_BS.tolist() == [[1, -1, -1, -1, -1, -1], [-1, -1, -1, -1, 11, -1]]
    assert both.predicted() == 2


def test_documents_of_a_batch() -> None:
    documents = Batch(TOKENS_BS, document_BS=DOCUMENT_BS).documents()
    assert documents is not None
    assert (documents.lengths, documents.sequences) == ([2, 1, 3, 6], 2)
    assert Batch(TOKENS_BS).documents() is None


def test_parts_of_a_batch_have_what_is_said_of_their_tokens() -> None:
    mask_BS = torch.rand(2, 6) < 0.5
    said = TOKENS_BS, mask_BS, DOCUMENT_BS, torch.tensor([3, 5])
    first, second = Batch(*said).split(1)
    assert all(a.equal(b[:1]) for a, b in zip(first, said, strict=True))
    assert all(a.equal(b[1:]) for a, b in zip(second, said, strict=True))
    assert Batch(TOKENS_BS).split(1)[1][1:] == (None,) * 3


@pytest.mark.parametrize(
    ("document_BS", "message"),
    [
        (DOCUMENT_BS[:, :5], r"has shape \[2, 5\], but the tokens have shape \[2, 6\]: give every token"),
        (DOCUMENT_BS[0], r"has shape \[6\], but the tokens have shape \[2, 6\]"),
        (DOCUMENT_BS.float(), "has dtype torch.float32: give the numbers of documents as int32 or int64"),
        (DOCUMENT_BS.bool(), "has dtype torch.bool: .* int32 or int64"),
        (DOCUMENT_BS.flip(1), "falls from 6 to 4 at token 3 of sequence 0: .* must not decrease"),
    ],
)
def test_documents_that_do_not_fit(document_BS: torch.Tensor, message: str) -> None:
    with pytest.raises(UserError, match=f"`document_BS` {message}"):
        Batch.wrap(Batch(TOKENS_BS, document_BS=document_BS))
