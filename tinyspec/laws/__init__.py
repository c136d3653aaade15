"""What each guarantee means, as code."""
