"""What the reference pages in docs/ are made of. Nothing here is loaded by a running guard."""
