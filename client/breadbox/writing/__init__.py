"""Cut steps into fragments, append them in the background, estimate advantages."""
