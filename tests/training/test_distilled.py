"""The translations that a teacher writes are kept on disk, with teacher and settings."""

from pathlib import Path

import pytest
import torch

from tinyspec.errors import TinyspecError
from tinyspec.lm.config import Seq2SeqConfig
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.training import distilled
from tinyspec.training.distilled import (
    BeamSettings,
    distill_translations,
    translations_folder,
    write_translations,
)

SOURCES = [[4, 5, 6, 7], [8], [9, 4, 9], [5, 5], [10, 8, 7, 6, 5]]


def model(seed: int = 0) -> Seq2Seq:
    config = Seq2SeqConfig(
        11, d_model=16, n_heads=2, d_ff=24, encoder_layers=1, decoder_layers=1, max_positions=16
    )
    return Seq2Seq.create(config, torch.Generator().manual_seed(seed), torch.float64)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TINYSPEC_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("beam", [1, 3])
def test_sentences_written_together_are_those_written_one_by_one(beam: int) -> None:
    teacher, writing = model(), BeamSettings(beam=beam)
    together = distill_translations(teacher, SOURCES, writing, batch=3)
    assert together == [write_translations(teacher, [source], writing)[0] for source in SOURCES]
    for source, text in zip(SOURCES, together, strict=True):
        assert len(text) <= writing.limit(teacher, source)
        assert teacher.config.eos not in text


def test_a_beam_of_one_is_greedy() -> None:
    assert write_translations(model(), SOURCES, BeamSettings(beam=1)) == write_translations(
        model(), SOURCES, BeamSettings(beam=1, length_power=0.0)
    )


def test_what_is_written_is_not_written_again_and_an_interrupted_writing_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    teacher, asked = model(), list[int]()

    def counted(*parts: object) -> list[list[int]]:
        asked.append(len(parts[1]))  # type: ignore[arg-type]
        if len(asked) == 2:
            raise KeyboardInterrupt
        return write_translations(*parts)  # type: ignore[arg-type]

    monkeypatch.setattr(distilled, "write_translations", counted)
    with pytest.raises(KeyboardInterrupt):
        distill_translations(teacher, SOURCES, batch=2)
    assert asked == [2, 2]
    whole = distill_translations(teacher, SOURCES, batch=2)
    assert asked == [2, 2, 2, 1]
    assert (
        distill_translations(teacher, SOURCES, batch=2)
        == whole
        == distill_translations(teacher, SOURCES, batch=3)
    )
    assert not list(translations_folder(teacher, SOURCES, BeamSettings()).glob("*.part"))


def test_another_teacher_other_sentences_and_other_settings_have_folders_of_their_own() -> None:
    teacher = model()
    folders = {
        translations_folder(teacher, SOURCES, BeamSettings()),
        translations_folder(model(1), SOURCES, BeamSettings()),
        translations_folder(teacher, SOURCES[1:], BeamSettings()),
        translations_folder(teacher, SOURCES, BeamSettings(beam=1)),
    }
    assert len(folders) == 4
    assert translations_folder(model(), [*SOURCES], BeamSettings()) in folders


def test_bad_input_says_what_to_do() -> None:
    with pytest.raises(TinyspecError, match=r"beam is 0: it must be a whole number from 1"):
        BeamSettings(beam=0)
    with pytest.raises(TinyspecError, match="neither may be negative"):
        BeamSettings(more=-1)
    with pytest.raises(TinyspecError, match="a source is empty"):
        write_translations(model(), [[5], []])
    with pytest.raises(TinyspecError, match="positions: shorten it"):
        write_translations(model(), [[5] * 17])
    where = translations_folder(model(), SOURCES, BeamSettings())
    distill_translations(model(), SOURCES)
    next(where.glob("*.json")).write_text("[[1")
    with pytest.raises(TinyspecError, match=r"damaged .* delete it"):
        distill_translations(model(), SOURCES)
