"""Everything that is trained: one trainer (train.py), the recipes it reads, its losses, and the
texts it learns from.

Draft models and exits (train_lm, distill, exit_losses) and translators (train_mt, taught) are each
a few lines of loss and data on the same trainer: batches that can be drawn again, checkpoints that
go on, a card at the end.
"""
