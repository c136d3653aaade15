"""Train models: one trainer (train.py), recipes, losses, and the texts that models learn from.

Language models and exits (train_lm.py, exit_losses.py), drafts (distill.py), translation models
(train_mt.py, translation_tasks.py) and the parts that techniques use (technique_parts.py) differ in
loss and batches. driver.py follows a recipe from its file to a checkpoint with a card.
"""
