"""Candidates judged by an autoregressive teacher: one teacher-forced pass over all of them,
whatever their lengths.

Gu et al. 2018, arXiv 1711.02281, call it noisy parallel decoding. The teacher knows what a parallel
model cannot: which tokens belong together. Writing costs it a pass for every token, judging costs
one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tinyspec.decoding.refine import Canvas
from tinyspec.errors import TinyspecError
from tinyspec.lm.seq2seq import EncoderOutput, Seq2Seq


def judge(teacher: Seq2Seq, source: Sequence[int], canvas: Canvas) -> Tensor:
    """`said` for the candidates of one source. One pass of the encoder (its source is the only one)
    and one of the decoder.
    """
    return token_logprobs(
        teacher, teacher.encode(torch.tensor([list(source)], device=teacher.device)), canvas
    )


def token_logprobs(teacher: Seq2Seq, memory: EncoderOutput, canvas: Canvas) -> Tensor:
    """log p of every token of every candidate, and of the end behind its last, given its source:
    [C, T + 1], 0 at padding.

    memory  of one source for all candidates, or of each candidate's. What a padding slot holds does
            not matter.
    """
    config, device = teacher.config, teacher.device
    tokens, mask = canvas.tokens.to(device), canvas.mask.to(device)
    teacher.fits(tokens.shape[1] + 1, "translation")
    count, room = tokens.shape
    ends = mask.sum(dim=1)  # [C] where each candidate's end belongs
    read = torch.cat(
        (torch.full((count, 1), config.bos, device=device), tokens.masked_fill(~mask, config.pad)),
        dim=1,
    )
    causal = torch.ones(room + 1, room + 1, dtype=torch.bool, device=device).tril()
    logits = teacher.logits(teacher.decode(teacher.embed(read), memory, causal))  # [C, T + 1, V]
    spoken = torch.cat((tokens, torch.zeros_like(tokens[:, :1])), dim=1)
    places = torch.arange(room + 1, device=device)[None]
    spoken = torch.where(
        places == ends[:, None], config.eos, spoken.masked_fill(places > ends[:, None], 0)
    )
    logits = logits if logits.dtype == torch.float64 else logits.float()
    scores = logits.log_softmax(dim=-1).gather(-1, spoken[..., None])[..., 0]
    return scores.masked_fill(places > ends[:, None], 0)


def best(teacher: Seq2Seq, source: Sequence[int], canvas: Canvas) -> int:
    """The candidate to which the teacher gives the highest probability; of equals, the first."""
    return int(judge(teacher, source, canvas).sum(dim=1).argmax())


def check_teacher(model: Seq2Seq, teacher: Seq2Seq) -> None:
    """Raise TinyspecError unless both read the same tokens."""
    same = not (model.has_tokenizer and teacher.has_tokenizer) or model.tokenizer.same_vocabulary(
        teacher.tokenizer
    )
    if model.config.vocab_size != teacher.config.vocab_size or not same:
        raise TinyspecError(
            f"the teacher {teacher.name} has another vocabulary than {model.name}: use the teacher it was trained with"
        )
    if teacher.config.positional:
        raise TinyspecError(
            f"{teacher.name} does not write from left to right, so it judges nothing: use its teacher"
        )
