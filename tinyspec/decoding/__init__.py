"""What decides: chance, the law a row of logits becomes, and the walk that verifies a draft."""
