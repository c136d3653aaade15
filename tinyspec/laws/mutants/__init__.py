"""Small defects from the field, each killed by the law meant for it."""
